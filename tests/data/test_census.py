"""The census tasks: their labels, what is no input, and the weights, on the real files."""

import os
from pathlib import Path

import pytest
import torch

from moiety.data.census import _read, census
from moiety.data.named import find

DATA = Path(os.environ.get("MOIETY_DATA") or Path(__file__).parents[3] / "shared" / "data")
TELLING = {"household_detail", "household_summary", "tax_filer"}


@pytest.fixture(scope="module")
def whole():
    if find("census-income", DATA) is None:
        pytest.skip("census-income is not here: set MOIETY_DATA to the folder of the data sets")
    return census(data_dir=DATA)


@pytest.fixture(scope="module")
def second(whole):
    return census(("college", "never_married"), data_dir=DATA, max_examples=20_000)


def test_sizes_and_labels_are_the_published_ones(whole):
    assert [len(split) for split in whole.splits.values()] == [199_523, 49_881, 49_881]
    assert [(t.name, t.classes) for t in whole.targets] == [
        ("income", ["no", "yes"]),
        ("never_married", ["no", "yes"]),
    ]
    assert int(whole.train.targets["income"].sum()) == 12_382
    assert int(whole.train.targets["never_married"].sum()) == 86_485
    later = whole.validation.targets["income"].sum() + whole.test.targets["income"].sum()
    assert int(later) == 6186


def test_no_input_tells_a_task(whole, second):
    used = {*whole.numbers, *whole.categories}
    assert not used & {"income", "never_married", "marital_status", "instance_weight", *TELLING}
    assert "education" in used
    assert len(used) == 42 - 6
    used = {*second.numbers, *second.categories}
    assert not used & {"college", "education", "never_married", "marital_status", *TELLING}
    assert "income" in used
    assert not any(leak.target in ("income", "never_married") for leak in whole.leaks)
    assert any("not among the inputs: income, marital_status" in note for note in whole.notes)


def test_weights_stand_beside_the_examples_they_belong_to(whole):
    for part, split in whole.splits.items():
        assert whole.weights[part].shape == (len(split),)
    # The first line of the training file has the weight 1700.09, the second 1053.55.
    assert whole.weights["train"][:2].tolist() == pytest.approx([1700.09, 1053.55])
    assert whole.weights["train"].mean() == pytest.approx(1740.38, abs=0.01)


def test_weights_follow_their_rows_when_fewer_are_taken(whole, monkeypatch):
    frame, given = _read(DATA)
    frame["instance_weight"] = frame["age"].astype(float)
    monkeypatch.setattr("moiety.data.census._read", lambda _: (frame, given))
    few = census(max_examples=2000)
    for part, split in few.splits.items():
        age = split.inputs["numbers"][:, few.numbers.index("age")]
        assert torch.stack([age, few.weights[part]]).corrcoef()[0, 1] == pytest.approx(1)


def test_college_is_some_college_or_more(second):
    share = second.train.targets["college"].float().mean()
    assert share == pytest.approx(67_003 / 199_523, abs=0.01)


def test_leaks_are_kept_where_asked(second):
    kept = census(("income", "never_married"), data_dir=DATA, max_examples=5000, leaks="keep")
    assert set(kept.categories) >= TELLING
    assert "marital_status" not in kept.categories
    assert {leak.column for leak in kept.leaks} & TELLING


def test_the_seed_halves_the_test_file(second):
    again, other = (
        census(("college", "never_married"), seed, data_dir=DATA, max_examples=20_000)
        for seed in (0, 1)
    )
    assert torch.equal(second.test.inputs["numbers"], again.test.inputs["numbers"])
    assert torch.equal(second.weights["test"], again.weights["test"])
    assert not torch.equal(second.weights["test"], other.weights["test"][: len(second.test)])


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("income", "tasks are a list of different names"),
        ((), "tasks are a list of different names"),
        (("income", "income"), "tasks are a list of different names"),
        (("income", "colege"), "no task 'colege'; .* did you mean college?"),
    ],
)
def test_wrong_tasks_are_named(tasks, said):
    with pytest.raises(ValueError, match=said):
        census(tasks)


def test_a_wrong_word_and_a_set_that_is_not_here(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="leaks must be drop or keep, got 'some'"):
        census(leaks="some")
    monkeypatch.delenv("MOIETY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="census-income is not here; take census-income"):
        census()
