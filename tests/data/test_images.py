"""A problem from a folder of images by class."""

import time

import numpy as np
import pytest
import torch
from PIL import Image

from moiety.data import load_problem


def fill(folder, rows=12, size=(8, 8), mode="L", seed=0, suffix="png"):
    """A folder of random images."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    shape = size[::-1] if mode == "L" else (*size[::-1], 3)
    for row in range(rows):
        image = Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8))
        image.save(folder / f"{row}.{suffix}")
    return folder


@pytest.fixture
def photos(tmp_path):
    for seed, name in enumerate(["cat", "dog", "eel"]):
        fill(tmp_path / "photos" / name, rows=20, seed=seed)
    return tmp_path / "photos"


def test_a_folder_of_grey_images_keeps_one_channel_and_their_pixels(photos):
    problem = load_problem(photos)
    assert (problem.kind, problem.shape) == ("image", (1, 8, 8))
    assert problem.targets[0].classes == ["cat", "dog", "eel"]
    assert [len(split) for split in problem.splits.values()] == pytest.approx([42, 9, 9], abs=3)
    images, ids = problem.train.inputs["images"], problem.train.targets["class"]
    assert images.dtype == torch.uint8
    scaled = images.double() / 255
    assert problem.mean[0] == pytest.approx(float(scaled.mean()))
    assert problem.std[0] == pytest.approx(float(scaled.std(correction=0)))
    cats = [np.asarray(Image.open(path)).tobytes() for path in (photos / "cat").iterdir()]
    for image, id in zip(images, ids):
        assert (image.numpy().tobytes() in cats) == (id == 0)


def test_folders_of_splits_are_the_split(tmp_path):
    for seed, (split, rows) in enumerate({"train": 30, "val": 8, "test": 6}.items()):
        for place, name in enumerate(["cat", "dog"]):
            fill(tmp_path / split / name, rows=rows, seed=10 * seed + place)
    problem = load_problem(tmp_path)
    assert [len(split) for split in problem.splits.values()] == [60, 16, 12]


def test_sizes_and_colours_are_brought_to_one(tmp_path):
    fill(tmp_path / "cat", size=(100, 60))
    fill(tmp_path / "cat", size=(30, 90), suffix="jpg")
    fill(tmp_path / "dog", size=(90, 120), mode="RGB", seed=1)
    fill(tmp_path / "dog", size=(30, 90), suffix="jpg", seed=2)
    problem = load_problem(tmp_path)
    assert problem.shape == (3, 45, 45)  # the median of the shorter sides
    assert "3 sizes (sides of 30 to 120 pixels) resized and cropped to 45×45" in str(problem.notes)
    assert load_problem(tmp_path, image_size=16).shape == (3, 16, 16)


def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path):
    for place, name in enumerate(["cat", "dog"]):
        (tmp_path / name).mkdir()
        for row in range(8):
            pixels = np.full((8, 8), 257 * (100 + 10 * row + place), dtype=np.uint16)
            Image.fromarray(pixels).save(tmp_path / name / f"{row}.png")
    problem = load_problem(tmp_path)
    values = torch.cat([s.inputs["images"][:, 0, 0, 0] for s in problem.splits.values()])
    assert sorted(values.tolist()) == sorted(100 + 10 * r + p for r in range(8) for p in range(2))


def test_an_image_in_two_splits_is_taken_out_of_train(tmp_path):
    for seed, split in enumerate(["train", "test"]):
        for place, name in enumerate(["cat", "dog"]):
            fill(tmp_path / split / name, rows=10, seed=10 * seed + place)
    copy = tmp_path / "train/cat/copy.png"
    copy.write_bytes((tmp_path / "test/dog/0.png").read_bytes())
    problem = load_problem(tmp_path)
    assert "1 examples that are also in a later split were taken out" in "\n".join(problem.notes)
    assert sum(map(len, problem.splits.values())) == 40
    assert problem.leaks[0].score == pytest.approx(1 / 20)


def test_a_size_that_tells_the_class_is_a_leak(tmp_path):
    fill(tmp_path / "cat", rows=20, size=(20, 20))
    fill(tmp_path / "dog", rows=20, size=(30, 30), seed=1)
    (leak,) = load_problem(tmp_path).leaks
    assert leak.column == "(size and format)"
    assert leak.score == 1


def test_max_examples_reads_only_what_is_taken(photos, monkeypatch):
    opened = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda path: opened.append(path) or real(path))
    problem = load_problem(photos, max_examples=12)
    taken = sum(map(len, problem.splits.values()))
    assert taken == pytest.approx(12, abs=4)
    assert len(set(opened)) == taken
    for split in problem.splits.values():
        assert set(split.targets["class"].tolist()) == {0, 1, 2}


def test_an_unreadable_image_is_named(photos):
    (photos / "dog/7.png").write_bytes((photos / "dog/7.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"^photos/dog/7.png cannot be read as an image"):
        load_problem(photos)


def test_an_image_of_too_many_pixels_is_refused(photos):
    Image.new("1", (12000, 8000)).save(photos / "dog/huge.png")
    with pytest.raises(ValueError, match=r"photos/dog/huge.png has more than 64 million pixels"):
        load_problem(photos)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: fill(f), "put the images of each class into a folder of its own"),
        (lambda f: (f / "cat").mkdir(parents=True), "cat holds no image"),
        (lambda f: fill(f / "cat"), "at least two classes are needed"),
        (
            lambda f: (fill(f / "cat"), fill(f / "dog", rows=1, seed=1)),
            "the class 'dog' of class has a single example",
        ),
        (
            lambda f: (fill(f / "train/cat"), fill(f / "test/cat"), fill(f / "test/dog", seed=1)),
            "which train lacks",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path, make, said):
    make(tmp_path / "photos")
    with pytest.raises(ValueError) as raised:
        load_problem(tmp_path / "photos")
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_images_have_no_columns(photos):
    with pytest.raises(ValueError, match="it has no columns to name"):
        load_problem(photos, targets="label")


def test_a_thousand_images_are_quick(tmp_path):
    for seed, name in enumerate(["cat", "dog"]):
        fill(tmp_path / name, rows=500, size=(28, 28), seed=seed)
    start = time.perf_counter()
    load_problem(tmp_path)
    assert time.perf_counter() - start < 5  # about half a second on an idle core
