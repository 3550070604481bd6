"""Files of a stream as examples: mega-batch 1 sets the form, and what does not fit is refused."""

import gzip

import numpy as np
import pytest
import torch

from moiety.anytime import Folder, Reader


def csv(path, rows, header="age,town,label"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


FIRST = [(10, "Bonn", "no"), (30, "Ulm", "yes"), (20, "Bonn", "no"), (20, "Ulm", "no")]


@pytest.fixture
def read(tmp_path):
    """A reader that has seen `FIRST`."""
    reader = Reader(target="label")
    reader(csv(tmp_path / "first.csv", FIRST))
    return reader


def test_a_table_is_scaled_and_coded_as_mega_batch_1_was(tmp_path, read):
    assert read.form.classes == ["no", "yes"] and read.classes == 2
    later = csv(tmp_path / "b.csv", [(20, "Ulm", "yes"), (30, "Mainz", "no"), ("", "Bonn", "no")])
    examples = read(later)
    std = np.std([10, 30, 20, 20])  # the mean is 20
    expected = [[0, 0, 0, 1], [10 / std, 1, 0, 0], [0, 0, 1, 0]]  # unseen, Bonn, Ulm
    assert torch.allclose(examples.x, torch.tensor(expected, dtype=torch.float32))
    assert examples.y.tolist() == [1, 0, 0]


def test_the_order_of_columns_does_not_matter(tmp_path, read):
    turned = csv(tmp_path / "b.csv", [("yes", "Ulm", 30)], header="label,town,age")
    assert torch.equal(read(turned).x, read(tmp_path / "first.csv").x[1:2])


@pytest.mark.parametrize(
    ("header", "rows", "reason"),
    [
        ("age,town,label", [(20, "Ulm", "maybe")], "has the class 'maybe' of label, which mega-ba"),
        ("age,town,label,more", [(20, "Ulm", "no", 1)], "has the new column 'more'"),
        ("age,label", [(20, "no")], "lacks the column 'town'"),
        ("age,town", [(20, "Ulm")], "lacks the column 'label'"),
        ("age,town,label", [("old", "Ulm", "no")], "'age' was a number in mega-batch 1"),
        ("age,town,label", [], "holds no example"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path, read, header, rows, reason):
    with pytest.raises(ValueError, match=reason) as error:
        read(csv(tmp_path / "b.csv", rows, header))
    assert str(error.value).startswith("b.csv") and "\n" not in str(error.value)
    assert len(read(tmp_path / "first.csv")) == 4  # the form is as it was


def test_classes_that_come_later_can_be_named(tmp_path):
    read = Reader(target="label", classes=["no", "yes", "maybe"])
    read(csv(tmp_path / "a.csv", FIRST))
    assert read(csv(tmp_path / "b.csv", [(20, "Ulm", "maybe")])).y.tolist() == [2]


def test_a_class_that_is_not_among_the_given_ones_is_said(tmp_path):
    read = Reader(target="label", classes=["no", "yes"])
    read(csv(tmp_path / "a.csv", FIRST))
    with pytest.raises(ValueError, match=r"'maybe' of label, which --classes .* does not name"):
        read(csv(tmp_path / "b.csv", [(20, "Ulm", "maybe")]))
    read = Reader(classes=["no", "yes"])
    with pytest.raises(ValueError, match=r"the class 2, which --classes .* does not name"):
        read(save(tmp_path / "a.npz", np.zeros((3, 2)), np.arange(3)))
    with pytest.raises(ValueError, match="classes has '1' twice"):
        Reader(classes=[1, "1"])


def test_classes_that_are_numbers_are_in_the_order_of_numbers(tmp_path):
    read = Reader(target="label")
    read(csv(tmp_path / "a.csv", [(n, "Ulm" if n % 2 else "Bonn", n % 12) for n in range(24)]))
    assert read.form.classes == [str(number) for number in range(12)]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("age", "'age' is a number, and a stream predicts classes"),
        ("town:number", "'Bonn'"),
        ("label", "all rows have label = 'no', .* sets the classes; name all of them: --classes"),
    ],
)
def test_a_first_file_that_shows_no_classes_does_not_set_them(tmp_path, target, reason):
    towns = ("Bonn", "Ulm")
    path = csv(tmp_path / "a.csv", [(2 * n, towns[n % 2], "no") for n in range(24)])
    with pytest.raises(ValueError, match=reason):
        Reader(target=target)(path)
    Reader(target="age:classes")(path)
    assert Reader(target="label", classes=["no", "yes"])(path).y.tolist() == [0] * 24


def test_arrays_of_one_class_do_not_set_the_classes(tmp_path):
    path = save(tmp_path / "a.npz", np.zeros((2, 3)), np.zeros(2, int))
    with pytest.raises(ValueError, match=r"all rows are of class 0.*--classes"):
        Reader()(path)
    assert len(Reader(classes=[0, 1])(path)) == 2


def test_columns_that_are_not_used_are_known_with_reasons(tmp_path):
    rows = [(n % 7, f"the {n} th of five words", "yes" if n % 2 else "no") for n in range(24)]
    read = Reader(target="label")
    read(csv(tmp_path / "a.csv", rows))
    assert read.form.unused == {"town": "running text"}


def test_rows_without_a_class_are_left_out(tmp_path, read):
    path = csv(tmp_path / "b.csv", [(20, "Ulm", "no"), (20, "Ulm", ""), (20, "Ulm", "yes")])
    assert read(path).y.tolist() == [0, 1]


def test_a_first_file_that_is_refused_sets_nothing(tmp_path):
    read = Reader(target="label")
    with pytest.raises(ValueError, match="no column 'label'"):
        read(csv(tmp_path / "a.csv", [(1, 2)], header="one,two"))
    with pytest.raises(ValueError, match="once the first mega-batch has been read"):
        _ = read.classes
    assert len(read(csv(tmp_path / "b.csv", FIRST))) == 4


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "tsv", "csv.gz", "csv.zip"])
def test_all_kinds_of_tables_give_the_same_examples(tmp_path, read, kind):
    pandas = pytest.importorskip("pandas")
    frame, path = pandas.read_csv(tmp_path / "first.csv"), tmp_path / f"b.{kind}"
    if kind == "parquet":
        pytest.importorskip("pyarrow")
        frame.to_parquet(path)
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    assert torch.equal(read(path).x, read(tmp_path / "first.csv").x)


def test_times_are_numbers_of_days(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    days = pandas.date_range("2026-01-01", periods=4).repeat(2)
    frame = pandas.DataFrame({"day": days, "label": list("ab") * 4})
    frame.to_parquet(tmp_path / "a.parquet")
    frame.assign(day=days.tz_localize(None).as_unit("ms")).to_parquet(tmp_path / "b.parquet")
    read = Reader(target="label")
    first = read(tmp_path / "a.parquet").x
    assert torch.equal(first, read(tmp_path / "b.parquet").x) and first.std() > 0.9


def save(path, x, y):
    np.savez(path, x=x, y=y)
    return path


def test_arrays_are_taken_as_they_are_and_bytes_as_shares(tmp_path):
    x = np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2)
    examples = Reader()(save(tmp_path / "a.npz", x, np.array([0, 2, 1])))
    assert torch.allclose(examples.x, torch.from_numpy(x) / 255) and examples.y.tolist() == [
        0,
        2,
        1,
    ]
    examples = Reader()(save(tmp_path / "b.npz", np.array([[2.5]]), np.array([1], np.uint8)))
    assert examples.x.tolist() == [[2.5]] and examples.y.dtype == torch.int64


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (np.zeros((2, 4)), np.zeros(2, int), r"the shape \[4\], and those of mega-batch 1 \[3\]"),
        (
            np.zeros((2, 3)),
            np.array([0, 2]),
            "the class 2, which mega-batch 1 did not have.* by --classes",
        ),
        (np.zeros((2, 3)), np.array([0, -1]), "has the class -1"),
        (np.zeros((2, 3)), np.zeros(2), "y .N. class ids, got float64"),
        (np.zeros((2, 3)), np.zeros(3, int), "must be"),
        (np.full((2, 3), np.nan), np.zeros(2, int), "NaN or infinite"),
        (np.zeros((0, 3)), np.zeros(0, int), "holds no example"),
        (np.array([[{}]]), np.zeros(1, int), "allow_pickle"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, x, y, reason):
    read = Reader()
    read(save(tmp_path / "a.npz", np.zeros((2, 3)), np.array([0, 1])))
    with pytest.raises(ValueError, match=reason):
        read(save(tmp_path / "b.npz", x, y))


def test_arrays_of_other_names_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros(2))
    with pytest.raises(ValueError, match="must hold the arrays x and y; it holds images"):
        Reader()(tmp_path / "a.npz")


def test_text_becomes_blocks_of_its_bytes_or_of_given_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh")
    examples = Reader(length=3)(tmp_path / "a.txt")
    assert examples.x.tolist() == [[97, 98, 99], [100, 101, 102]]
    assert examples.y.tolist() == [[98, 99, 100], [101, 102, 103]]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"one two one"))
    words = {"one": 0, "two": 1}
    read = Reader(length=2, tokens=2, encode=lambda text: [words[w] for w in text.split()])
    assert read(tmp_path / "b.txt.gz").x.tolist() == [[0, 1]] and read.classes == 2
    with pytest.raises(ValueError, match=r"a.txt: 8 tokens are too few for a block of 9"):
        Reader(length=9)(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="token 103 is none of the 103"):
        Reader(length=3, tokens=103)(tmp_path / "a.txt")


def test_another_kind_of_file_is_refused(tmp_path, read):
    with pytest.raises(ValueError, match=r"b.npz is arrays, and mega-batch 1 is a table"):
        read(save(tmp_path / "b.npz", np.zeros((2, 3)), np.array([0, 1])))
    for name in ("a.pdf", "a.npz.gz", "a.zip", "a"):
        with pytest.raises(ValueError, match="is no kind of file that can be learned from"):
            Reader()(tmp_path / name)


def test_a_late_mega_batch_read_first_after_a_restart_has_the_form_of_the_first(tmp_path):
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    for name, rows in {"a": FIRST, "b": [(age + 7, "Ulm", "no") for age, *_ in FIRST]}.items():
        text = csv(tmp_path / "plain", rows).read_bytes()
        (inbox / f"{name}.csv.gz").write_bytes(gzip.compress(text))
    stream = Folder(inbox, tmp_path / "journal.jsonl", Reader(target="label"))
    stream.poll()
    again = Folder(inbox, tmp_path / "journal.jsonl", Reader(target="label"))
    assert torch.equal(again[2].train.x, stream[2].train.x)


def test_a_folder_refuses_what_does_not_fit_and_goes_on(tmp_path):
    inbox = tmp_path / "inbox"
    inbox.mkdir()

    def put(name, rows, header="age,town,label"):
        text = csv(tmp_path / "plain", rows, header).read_bytes()
        (inbox / name).write_bytes(gzip.compress(text))

    put("a.csv.gz", FIRST)
    put("b.csv.gz", [(20, "Ulm", "maybe")] * 4)
    put("c.csv.gz", [(20, "no")] * 4, header="age,label")
    put("d.csv.gz", [])
    put("e.csv.gz", FIRST * 2)
    save(inbox / "f.npz", np.zeros((2, 3)), np.array([0, 1]))
    stream = Folder(inbox, tmp_path / "journal.jsonl", Reader(target="label"))
    found = {each.name: each for each in stream.poll()}
    assert [each.number for each in found.values()] == [1, None, None, None, 2, None]
    assert all(bool(each.reason) == (each.number is None) for each in found.values())
    assert stream.classes == 2 and stream[2].rows == 8
    again = Folder(inbox, tmp_path / "journal.jsonl", Reader(target="label"))
    assert again.classes == 2
    assert torch.equal(again[2].train.x, stream[2].train.x)
    assert torch.equal(again.read(inbox / "e.csv.gz").x, stream.read(inbox / "e.csv.gz").x)
