"""A problem from a table: splits, columns, targets, and what is said of them."""

import time

import numpy as np
import pandas
import pytest
import torch

from moiety.cli import explain
from moiety.data import load_problem
from moiety.data.frame import from_frame


def people(rows=400, seed=0):
    """A table with every kind of column, and a target that depends on some."""
    draw = np.random.default_rng(seed)
    age = draw.integers(18, 80, rows).astype(float)
    city = draw.choice(["Rome", "Oslo", "Lima"], rows)
    rich = (age + 20 * (city == "Oslo") + draw.normal(0, 15, rows)) > 60
    age[:8] = np.nan
    return pandas.DataFrame(
        {
            "person_id": draw.permutation(rows) + 1000,
            "age": age,
            "height": draw.normal(170, 10, rows),
            "city": np.where(draw.random(rows) < 0.05, None, city),
            "code": [f"{draw.integers(10**9):09x}" for _ in range(rows)],
            "planet": "Earth",
            "empty": None,
            "rich": np.where(rich, "yes", "no"),
            "score": 5.5 * rich + draw.normal(0, 5, rows),
        }
    )


def save(tmp_path, frame, name="people.csv"):
    frame.to_csv(tmp_path / name, index=False)
    return tmp_path / name


def said(problem):
    return "\n".join(problem.notes)


def test_columns_are_told_apart(tmp_path):
    problem = load_problem(save(tmp_path, people()), targets="rich")
    assert problem.kind == "table"
    assert problem.numbers == ["age", "height", "score"]
    assert problem.categories == ["city"]
    assert problem.cardinalities == [4]
    for column, why in {
        "person_id": "an id",
        "code": "an id",
        "planet": "the same in all rows",
        "empty": "empty in all rows",
    }.items():
        assert f"not used: {column}: {why}" in said(problem)
    assert "missing: age 2.0%, city" in said(problem)
    assert problem.targets[0].classes == ["no", "yes"]


def test_numbers_are_standardised_by_train_and_gaps_are_its_mean(tmp_path):
    frame = people()
    problem = load_problem(save(tmp_path, frame), targets="rich")
    train = problem.train.inputs["numbers"]
    assert train.dtype == torch.float32
    torch.testing.assert_close(train[:, 1].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(train[:, 1].std(correction=0), torch.tensor(1.0))
    gaps = sum(int((s.inputs["numbers"][:, 0] == 0).sum()) for s in problem.splits.values())
    assert gaps == 8
    assert not any(torch.isnan(s.inputs["numbers"]).any() for s in problem.splits.values())


def test_categories_unseen_in_train_and_gaps_are_zero(tmp_path):
    frame = people()
    frame["split"] = ["train"] * 300 + ["dev"] * 50 + ["test"] * 50
    frame.loc[399, "city"] = "Atlantis"
    problem = load_problem(save(tmp_path, frame), targets="rich")
    assert "split: given" in said(problem)
    assert [len(split) for split in problem.splits.values()] == [300, 50, 50]
    assert problem.test.inputs["categories"][-1, 0] == 0
    gaps = frame["city"][:300].isna().to_numpy()
    zero = (problem.train.inputs["categories"][:, 0] == 0).numpy()
    assert (zero == gaps).all()
    assert problem.cardinalities == [4]


@pytest.mark.parametrize("numbers", [2, 4])
def test_several_targets_do_not_change_the_shares_of_the_splits(tmp_path, numbers):
    draw = np.random.default_rng(0)
    table = {f"t{i}": draw.normal(size=1000) for i in range(numbers)} | {
        "x": draw.normal(size=1000)
    }
    table["class"] = ["rare"] * 4 + ["common"] * 996
    pandas.DataFrame(table).to_csv(tmp_path / "t.csv", index=False)
    names = [*(f"t{i}:number" for i in range(numbers)), "class:classes"]
    problem = load_problem(tmp_path / "t.csv", targets=",".join(names))
    sizes = [len(split) for split in problem.splits.values()]
    assert sizes == pytest.approx([700, 150, 150], abs=40)
    for split in (problem.train, problem.test):  # a rare class is still dealt out
        assert (split.targets["class"] == problem.targets[-1].classes.index("rare")).any()


def test_the_split_keeps_the_share_of_each_class_and_follows_the_seed(tmp_path):
    path = save(tmp_path, people(1000))
    problem = load_problem(path, targets="rich", seed=1)
    shares = [s.targets["rich"].float().mean() for s in problem.splits.values()]
    assert max(shares) - min(shares) < 0.01
    assert [len(s) for s in problem.splits.values()] == pytest.approx([700, 150, 150], abs=3)
    again, other = (load_problem(path, targets="rich", seed=seed) for seed in (1, 2))
    numbers = problem.train.inputs["numbers"]
    assert torch.equal(numbers, again.train.inputs["numbers"])
    assert not torch.equal(numbers, other.train.inputs["numbers"])


def test_max_examples_takes_from_every_class_alike(tmp_path):
    problem = load_problem(save(tmp_path, people(1000)), targets="rich", max_examples=100)
    assert sum(map(len, problem.splits.values())) == pytest.approx(100, abs=6)
    assert "of 1000 examples" in said(problem)


def test_several_targets_of_both_kinds(tmp_path):
    frame = people()
    problem = load_problem(save(tmp_path, frame), targets="rich, score")
    assert [(t.name, t.kind) for t in problem.targets] == [("rich", "classes"), ("score", "number")]
    score = problem.targets[1]
    values = (
        torch.cat([s.targets["score"] for s in problem.splits.values()]) * score.std + score.mean
    )
    np.testing.assert_allclose(np.sort(values), np.sort(frame["score"]), atol=1e-4)
    assert "score" not in problem.numbers


def test_the_kind_of_a_target_may_be_said(tmp_path):
    frame = people()
    frame["grade"] = np.arange(len(frame)) % 7
    path = save(tmp_path, frame)
    assert load_problem(path, targets="grade").targets[0].kind == "classes"
    assert load_problem(path, targets="grade:number").targets[0].kind == "number"
    assert load_problem(path, targets="grade").targets[0].classes == list("0123456")


def test_the_usual_name_of_a_target_needs_no_option(tmp_path):
    path = save(tmp_path, people().rename(columns={"rich": "Label"}))
    assert load_problem(path).targets[0].name == "Label"


def test_rows_without_a_target_are_left_out_and_counted(tmp_path):
    frame = people()
    frame.loc[:9, "rich"] = None
    problem = load_problem(save(tmp_path, frame), targets="rich")
    assert "10 rows without a target were left out" in said(problem)
    assert sum(map(len, problem.splits.values())) == 390


def test_rows_of_test_that_train_repeats_are_taken_out_of_train(tmp_path):
    frame = people(300)
    frame["split"] = ["train"] * 200 + ["validation"] * 50 + ["test"] * 50
    frame.loc[0:4] = frame.loc[295:299].assign(split="train").to_numpy()
    problem = load_problem(save(tmp_path, frame), targets="rich")
    assert len(problem.train) == 195
    assert "5 examples that are also in a later split were taken out" in said(problem)
    (leak,) = (leak for leak in problem.leaks if leak.column == "(repeated examples)")
    assert leak.score == pytest.approx(0.1)


def test_rows_of_few_different_values_may_repeat(tmp_path):
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame({"a": draw.integers(0, 3, 300), "label": draw.choice(list("xy"), 300)})
    problem = load_problem(save(tmp_path, frame))
    assert sum(map(len, problem.splits.values())) == 300
    assert "few different values" in said(problem)


def test_wild_values_and_words_among_numbers_count_as_missing(tmp_path):
    frame = people()
    frame["height"] = frame["height"].astype(object)
    frame.loc[3, "height"], frame.loc[4, "height"] = "tall", "inf"
    problem = load_problem(save(tmp_path, frame), targets="rich")
    assert "height: 1 values that are no numbers, such as 'tall', count as missing" in said(problem)
    assert "height: 1 infinite or huge values count as missing" in said(problem)
    assert all(torch.isfinite(s.inputs["numbers"]).all() for s in problem.splits.values())


# -- text ------------------------------------------------------------------------------------------


def tweets(rows=200):
    draw = np.random.default_rng(0)
    words = ["so", "glad", "angry", "rain", "sun", "today", "never", "again"]
    texts = [" ".join(draw.choice(words, 8)) + f" {row}" for row in range(rows)]
    return pandas.DataFrame({"text": texts, "label": draw.choice(["joy", "anger"], rows)})


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_column_of_text_is_found(tmp_path, suffix):
    path = tmp_path / f"tweets.{suffix}"
    if suffix == "csv":
        tweets().to_csv(path, index=False)
    else:
        tweets().to_json(path, orient="records", lines=True)
    problem = load_problem(path)
    assert (problem.kind, problem.text) == ("text", "text")
    assert len(problem.train.texts) == len(problem.train) == pytest.approx(140, abs=3)
    assert problem.targets[0].classes == ["anger", "joy"]
    texts = {text for split in problem.splits.values() for text in split.texts}
    assert texts == set(tweets()["text"])


def test_short_texts_are_found_by_a_usual_name_or_when_named(tmp_path):
    frame = tweets().assign(text=[f"w{row}" for row in range(200)])
    assert load_problem(save(tmp_path, frame)).kind == "text"
    path = save(tmp_path, frame.rename(columns={"text": "said"}))
    with pytest.raises(ValueError, match="said is an id, or short text to be named as text"):
        load_problem(path)
    assert load_problem(path, text="said").text == "said"


def test_a_text_in_two_splits_is_taken_out_of_train(tmp_path):
    frame = tweets()
    frame["split"] = ["train"] * 120 + ["dev"] * 40 + ["test"] * 40
    frame.loc[0, "text"] = "  " + frame.loc[199, "text"].upper()
    problem = load_problem(save(tmp_path, frame), text="text")
    assert len(problem.train.texts) == len(problem.train) == 119


def test_tables_of_a_folder_are_its_splits(tmp_path):
    for name, rows in {"train": 100, "dev": 30, "test": 40}.items():
        tweets(rows).assign(text=lambda t, n=name: t["text"] + n).to_json(
            tmp_path / f"{name}.jsonl", orient="records", lines=True
        )
    problem = load_problem(tmp_path)
    assert [len(split) for split in problem.splits.values()] == [100, 30, 40]


# -- errors ----------------------------------------------------------------------------------------


def change(frame, **columns):
    return frame.assign(**columns)


BAD = {
    "no such target": (lambda f: f, {"targets": "rihc"}, "has no column 'rihc'.*did you mean rich"),
    "no target said": (lambda f: f, {}, "say which column to predict, of person_id, age"),
    "mostly no target": (
        lambda f: change(f, rich=[None] * 300 + ["yes", "no"] * 50),
        {"targets": "rich"},
        "300 of 400 rows have no 'rich'; fill that column",
    ),
    "one class": (lambda f: change(f, rich="yes"), {"targets": "rich"}, "at least two classes"),
    "a single example": (
        lambda f: change(f, rich=["maybe", *f["rich"][1:]]),
        {"targets": "rich"},
        "the class 'maybe' of rich has a single example",
    ),
    "unseen in train": (
        lambda f: change(
            f, rich=[*f["rich"][:-1], "maybe"], split=["train"] * 300 + ["test"] * 100
        ),
        {"targets": "rich"},
        "test has the class 'maybe' of rich, which train lacks",
    ),
    "an id as target": (lambda f: f, {"targets": "code"}, "'code' has 400 different values"),
    "infinite target": (
        lambda f: change(f, score=[np.inf, *f["score"][1:]]),
        {"targets": "score"},
        "'score' is not a finite number in 1 rows",
    ),
    "words in a number": (
        lambda f: change(f, score=["unknown", *f["score"][1:]]),
        {"targets": "score"},
        "'score' is a number but for 1 rows such as 'unknown'",
    ),
    "no rows": (lambda f: f[:0], {"targets": "rich"}, "holds no row"),
    "few rows": (lambda f: f[:8], {"targets": "score"}, "there are 8 examples; at least 10"),
    "only targets": (lambda f: f[["rich"]], {"targets": "rich"}, "no column to predict from"),
    "no such text": (lambda f: f, {"targets": "rich", "text": "txt"}, "no column 'txt' with text"),
    "empty text": (
        lambda f: change(f, words=" "),
        {"targets": "rich", "text": "words"},
        "the column 'words' is empty",
    ),
    "no train": (lambda f: change(f, split="test"), {"targets": "rich"}, "no training examples"),
    "leaks": (lambda f: f, {"targets": "rich", "leaks": "maybe"}, "leaks must be drop or keep"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_one_sentence(tmp_path, case):
    spoil, options, words = BAD[case]
    path = save(tmp_path, spoil(people()))
    with pytest.raises(ValueError, match=words) as raised:
        load_problem(path, **options)
    assert "\n" not in str(raised.value)


def test_a_path_that_does_not_exist_names_near_ones(tmp_path):
    save(tmp_path, people())
    with pytest.raises(ValueError, match=r"did you mean people.csv\?"):
        load_problem(tmp_path / "peple.csv")
    with pytest.raises(ValueError, match=r"did you mean fashion-mnist\?"):
        load_problem("fashion_mnist")


def test_a_large_table_is_quick(tmp_path):
    frame = pandas.concat([people(1000, seed) for seed in range(30)])
    path = save(tmp_path, frame)
    load_problem(path, targets="rich", max_examples=100)  # imports are not what is measured
    start = time.perf_counter()
    load_problem(path, targets="rich")
    assert time.perf_counter() - start < 10  # about one second on an idle core


# -- anything --------------------------------------------------------------------------------------


def column(draw, rows):
    """A column of some kind, sane or not."""
    kinds = [
        lambda: draw.normal(size=rows),
        lambda: draw.integers(0, 5, rows),
        lambda: draw.integers(0, 10**12, rows),
        lambda: draw.choice(["a", "b", "c"], rows),
        lambda: [None] * rows,
        lambda: np.where(draw.random(rows) < 0.5, np.nan, draw.normal(size=rows)),
        lambda: [{"a": 1} if row % 2 else "x" for row in range(rows)],
        lambda: [["x", 1, None, 2.5][row % 4] for row in range(rows)],
        lambda: draw.random(rows) < 0.5,
        lambda: pandas.array([None, *draw.integers(0, 9, rows - 1).tolist()], dtype="Int64"),
        lambda: pandas.Categorical(draw.choice(["u", "v"], rows)),
        lambda: pandas.date_range("2020", periods=rows, freq="h", tz="UTC"),
        lambda: draw.choice([np.inf, -np.inf, 1.0, 2.0, np.nan], rows),
        lambda: draw.normal(size=rows) * 1e300,
        lambda: [f"some words, number {row}, in a text" for row in range(rows)],
    ]
    return kinds[draw.integers(len(kinds))]()


@pytest.mark.filterwarnings("error")
def test_any_table_gives_a_problem_or_one_sentence():
    made = 0
    for seed in range(120):
        draw = np.random.default_rng(seed)
        rows = int(draw.choice([1, 5, 12, 40, 200]))
        frame = pandas.DataFrame({f"c{i}": column(draw, rows) for i in range(draw.integers(1, 7))})
        targets = list(frame.columns[: draw.integers(1, 3)])
        try:
            problem = from_frame(frame, "table", targets=targets)
        except ValueError as error:
            assert explain(error) and "\n" not in str(error), seed  # noqa: PT017
            continue
        made += 1
        for split in problem.splits.values():
            assert len(split) > 0
            assert all(len(values) == len(split) for values in split.inputs.values())
            for values in (*split.inputs.values(), *split.targets.values()):
                assert torch.isfinite(values.float()).all()
    assert made > 20
