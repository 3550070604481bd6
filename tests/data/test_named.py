"""The built-in sets: the catalogue, and the real files where they are."""

import io
import os
import time
import zipfile
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from moiety.data import load_problem
from moiety.data.catalogue import NAMED
from moiety.data.formats import _idx, lines, omniglot, read_cifar, read_usps
from moiety.data.named import find, load_texts
from moiety.data.published import ADULT_COLUMNS

DATA = Path(os.environ.get("MOIETY_DATA") or Path(__file__).parents[3] / "shared" / "data")
# Train, validation and test after repeats were taken out, and the classes of the first target.
SIZES = {
    "digits": (1797, 10),
    "mnist": (70000, 10),
    "fashion-mnist": (70000, 10),
    "usps": (9298, 10),
    "kmnist": (10000, 10),
    "pneumoniamnist": (5856, 2),
    "omniglot": (4840, 242),
    "adult": (48842, 2),
    "tweeteval-emotion": (5052, 4),
    "semeval2018-emotions": (10983, 2),
    "chemprot": (10065, 13),
    "acl-arc": (1941, 6),
    "scicite": (10097, 3),
    "scierc": (4648, 7),
}


def need(name):
    if NAMED[name].layouts and find(name, DATA) is None:
        pytest.skip(f"{name} is not here: set MOIETY_DATA to the folder of the data sets")


@pytest.mark.parametrize("name", SIZES)
def test_the_real_files_load(name):
    need(name)
    problem = load_problem(name, data_dir=DATA, max_examples=1000)
    total, classes = SIZES[name]
    assert any(f"of {total} examples" in note for note in problem.notes)
    assert len(problem.targets[0].classes) == classes
    assert problem.kind == NAMED[name].kind


@pytest.mark.slow
@pytest.mark.parametrize(("name", "total"), [("census-income", 299285), ("cifar10", 40000)])
def test_the_large_real_files_load(name, total):
    need(name)
    problem = load_problem(name, data_dir=DATA)
    assert sum(map(len, problem.splits.values())) == total
    assert any("marital_status" in str(leak) for leak in problem.leaks) == (name != "cifar10")


def test_adult_as_a_table_of_its_own(tmp_path):
    need("adult")
    frame = pandas.read_csv(
        DATA / "adult" / "adult.data.gz", names=list(ADULT_COLUMNS), skipinitialspace=True
    )
    frame["never_married"] = frame["marital-status"] == "Never-married"
    frame.to_csv(tmp_path / "adult.csv", index=False)
    start = time.perf_counter()
    problem = load_problem(tmp_path / "adult.csv", targets=["income", "never_married"])
    assert time.perf_counter() - start < 10  # one second on an idle core
    found = {(leak.column, leak.target, leak.dropped) for leak in problem.leaks}
    assert found == {
        ("marital-status", "never_married", True),
        ("relationship", "never_married", False),
    }
    assert "marital-status" not in problem.categories
    assert "relationship" in problem.categories
    assert "missing: workclass 5.6%, occupation 5.7%, native-country 1.8%" in str(problem.notes)


def test_adult_by_name_has_both_targets_and_never_learns_from_one():
    need("adult")
    problem = load_problem("adult", data_dir=DATA, max_examples=3000)
    assert "never_married" not in problem.categories
    assert problem.leaks == []
    both = load_problem("adult", targets="income,never_married", data_dir=DATA, max_examples=3000)
    assert [target.name for target in both.targets] == ["income", "never_married"]
    assert both.targets[0].classes == ["<=50K", ">50K"]  # also in adult.test, which ends them in .


def test_classes_keep_the_published_order():
    need("fashion-mnist")
    problem = load_problem("fashion-mnist", data_dir=DATA, max_examples=500)
    assert problem.targets[0].classes[0] == "T-shirt/top"
    assert problem.targets[0].classes[9] == "Ankle boot"


def test_digits_are_the_same_images_as_ever():
    from sklearn.datasets import load_digits

    problem = load_problem("digits")
    images = np.concatenate([s.inputs["images"].numpy() for s in problem.splits.values()])
    ours = sorted(np.round(images / 255 * 16).astype(int).reshape(len(images), -1).tolist())
    assert ours == sorted(load_digits().data.astype(int).tolist())


# -- the catalogue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_a_download_has_a_checksum_and_says_who_published_it(name):
    named = NAMED[name]
    assert named.page.startswith("http")
    for layout in named.layouts:
        files = [*layout.files, *([layout.archive] if layout.archive else [])]
        for file in files:
            assert file.sums or file.packed or file.url == "", file
            for sum in (*file.sums, *filter(None, [file.packed])):
                assert len(sum) == 32 and int(sum, 16) >= 0
            if file.url:
                assert file.sums or file.packed
                assert named.cited


@pytest.mark.parametrize("name", NAMED)
def test_a_set_that_is_not_here_says_what_to_do(name, tmp_path, monkeypatch):
    if not NAMED[name].layouts:
        pytest.skip("comes with scikit-learn")
    monkeypatch.delenv("MOIETY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError) as raised:
        load_problem(name)
    said = str(raised.value)
    assert "\n" not in said
    if f"moiety data get {name}" not in said:
        layout = NAMED[name].layouts[0]
        for part in (NAMED[name].page, layout.files[0].name, str(tmp_path / "moiety")):
            assert part in said


# -- formats ---------------------------------------------------------------------------------------


def test_idx_by_hand():
    data = b"\0\0\x08\x02" + b"\0\0\0\x02\0\0\0\x03" + bytes(range(6))
    assert _idx(data).tolist() == [[0, 1, 2], [3, 4, 5]]
    for bad in (b"", b"\0\0\x0d\x01\0\0\0\x01\0", data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="an idx file"):
            _idx(bad)


def test_cifar_in_its_binary_version_by_hand():
    row = bytes([7]) + bytes([1] * 1024 + [2] * 1024 + [3] * 1024)
    pictures = read_cifar(lambda name: row * (2 if name.startswith("test") else 1))
    assert pictures.images.shape == (7, 3, 32, 32)
    assert pictures.images[0, :, 5, 5].tolist() == [1, 2, 3]
    assert pictures.classes[pictures.ids[0]] == "horse"
    assert list(pictures.given) == ["train"] * 5 + ["test"] * 2


def test_usps_in_the_format_of_libsvm_by_hand():
    line = "10 " + " ".join(f"{n}:{-1 if n % 2 else 1}" for n in range(1, 257))
    pictures = read_usps(lambda name: f"{line}\n".encode())
    assert pictures.ids.tolist() == [9, 9]
    assert pictures.images[0, 0, 0, :4].tolist() == [0, 255, 0, 255]


def drawings(*names, side=105):
    """An archive in which every drawing is as grey as its number."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(f"set/{names[0].rsplit('/', 1)[0]}/", b"")
        for name in names:
            one = io.BytesIO()
            grey = int(name.split("_")[1])
            Image.fromarray(np.full((side, side), grey, np.uint8)).save(one, "png")
            archive.writestr(f"set/{name}.png", one.getvalue())
    return stream.getvalue()


def test_omniglot_by_hand_is_split_by_who_drew():
    content = {
        "a": drawings("Greek/character02/0002_16", "Greek/character01/0001_15"),
        "b": drawings("Greek/character01/0001_15", "Latin/character01/0009_03"),  # one again
    }
    pictures = omniglot(["a", "b"])(content.__getitem__)
    assert pictures.images.shape == (3, 1, 105, 105)
    assert [pictures.classes[id] for id in pictures.ids] == [
        "Greek/character01",
        "Greek/character02",
        "Latin/character01",
    ]
    assert pictures.images[:, 0, 0, 0].tolist() == [15, 16, 3]
    assert list(pictures.given) == ["train", "test", "train"]
    with pytest.raises(ValueError, match="drawings are of 105×105"):
        omniglot(["a"])(lambda _: drawings("Greek/character02/0002_16", side=9))


def test_omniglot_has_15_drawings_of_a_character_to_train_on_and_5_to_test():
    need("omniglot")
    problem = load_problem("omniglot", data_dir=DATA)
    both = sum(len(problem.splits[part]) for part in ("train", "validation"))
    assert (both, len(problem.test)) == (242 * 15, 242 * 5)
    assert set(np.bincount(problem.test.targets["class"])) == {5}


def test_texts_without_labels_by_hand():
    assert lines("a")(lambda name: f"{name} é\n\n b \n".encode()).texts == ["a é", "b"]


def test_texts_without_labels_are_no_problem_to_learn():
    need("imdb-text")
    texts = load_texts("imdb-text", DATA)
    assert len(texts) == 40000 and all(texts)
    assert sum(len(text.split()) for text in texts) == 9265493  # as its README counts them
    with pytest.raises(ValueError, match=r"imdb-text has no labels.*pre-train on it"):
        load_problem("imdb-text", data_dir=DATA)
    with pytest.raises(ValueError, match=r"chemprot has labels; load it with load_problem"):
        load_texts("chemprot", DATA)


def test_a_problem_prints_its_sizes_and_no_tensor():
    said = repr(load_problem("digits", seed=0))
    assert "examples: {'images':" in said and "tensor(" not in said and len(said) < 2000
