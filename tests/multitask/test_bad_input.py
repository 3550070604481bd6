"""Bad input from table to loss: named in one sentence, or handled as docs/multitask.md says."""

import math

import numpy as np
import pytest
import torch
from samples import DIM, TASKS, gated, problem
from torch import nn
from torch.utils.data import TensorDataset

from moiety.data import load_problem
from moiety.multitask import (
    MISSING,
    MultiGate,
    Outputs,
    Task,
    pack,
    packed_loss,
    task_loss,
    task_metrics,
)
from moiety.train import fit_many

pandas = pytest.importorskip("pandas")


# -- labels that are not there --------------------------------------------------------------------


def nothing(task, target):
    return torch.full_like(target, MISSING if task.kind == "classes" else math.nan)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_a_task_without_a_label_at_all_learns_nothing_and_spoils_nothing(task):
    x, targets = problem()
    targets[task.name] = nothing(task, targets[task.name])
    data = TensorDataset(x, pack(TASKS, targets))
    words = {"seeds": [0], "steps": 12, "batch": 16, "lr": 1e-2, "loss": packed_loss(TASKS)}
    model = fit_many(lambda seed: gated(balance={}, weighting="uncertainty"), data, **words)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = gated(balance={}, weighting="uncertainty")
    (trained,) = model.models()
    at = TASKS.index(task)
    for part in ("routers", "towers"):
        same = zip(getattr(trained, part)[at].parameters(), getattr(fresh, part)[at].parameters())
        assert all(torch.equal(a, b) for a, b in same)
    assert trained.log_variance[at] == 0 and trained.log_variance.any()
    assert all(math.isfinite(loss) for loss in model.history[0].loss)
    found = trained.eval().metrics(trained(x), targets)
    assert set(found[task.name].values()) == {None}
    others = [v for name, own in found.items() if name != task.name for v in own.values()]
    assert None not in others


def test_no_task_has_a_label_in_this_batch():
    model, (x, targets) = gated(balance={}), problem()
    empty = {task.name: nothing(task, targets[task.name]) for task in TASKS}
    loss = model.loss(model(x), empty)
    loss.backward()
    assert loss == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


# -- labels and weights of a wrong type -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("a", ["yes"] * 44, "a tensor of class ids, got list"),
        ("a", np.zeros(44, int), "a tensor of class ids, got ndarray"),
        ("a", None, "a tensor of class ids, got NoneType"),
        (
            "a",
            torch.zeros(44),
            "class ids must be integers .-100 where missing., got torch.float32",
        ),
        ("a", torch.full((44,), 3), "class ids are 0 … 2, -100 if missing; got 3"),
        ("a", torch.full((44,), -1), "class ids are 0 … 2, -100 if missing; got -1"),
        ("a", torch.zeros(44, 3).long(), r"shape \[44\], got \[44, 3\]"),
        ("type", [[0.0, 1.0]] * 44, "a tensor of floats, got list"),
        ("type", torch.zeros(44, 2).long(), "must be floats .NaN where missing., got torch.int64"),
        ("type", torch.zeros(44, 2).bool(), "must be floats .NaN where missing., got torch.bool"),
        ("type", torch.full((44, 2), -100.0), "labels lie in 0 … 1, NaN if missing; got -100"),
        ("c.d", torch.zeros(44).long(), "must be floats .NaN where missing., got torch.int64"),
        ("c.d", torch.zeros(44, dtype=torch.cfloat), "must be floats"),
        ("c.d", torch.full((44,), math.inf), "values are finite, NaN if missing; got inf"),
        ("c.d", torch.zeros(40), r"shape \[44, 1\], got \[40, 1\]"),
    ],
)
def test_targets_of_a_wrong_type_are_named_wherever_they_come_in(name, target, message):
    model, (x, targets) = gated(), problem()
    wrong = {**targets, name: target}
    message = f"task {name!r}: .*{message}"
    with pytest.raises(ValueError, match=message):
        model.loss(model(x), wrong)
    with pytest.raises(ValueError, match=message):
        model.metrics(model(x), wrong)
    with pytest.raises(ValueError, match=message):
        pack(TASKS, wrong)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16])
def test_class_ids_of_any_integer_type(dtype):
    model, (x, targets) = gated(), problem(missing=False)
    narrow = {**targets, "a": targets["a"].to(dtype)}
    torch.testing.assert_close(model.loss(model(x), narrow), model.loss(model(x), targets))


def test_sample_weights_of_a_wrong_type():
    model, (x, targets) = gated(), problem()
    with pytest.raises(ValueError, match="task 'a': sample weights must be a tensor, got list"):
        model.loss(model(x), targets, [1.0] * 44)
    with pytest.raises(ValueError, match=r"task 'c\.d': sample weights must be finite"):
        model.loss(model(x), targets, {"c.d": torch.full((44,), math.nan)})


# -- more of one than of the other ----------------------------------------------------------------


def test_more_or_fewer_targets_towers_and_outputs_than_tasks():
    model, (x, targets) = gated(), problem()
    more, fewer = {**targets, "d": targets["a"]}, {"a": targets["a"], "type": targets["type"]}
    for given, message in ((more, "targets has 'd'"), (fewer, r"targets lacks task 'c\.d'")):
        with pytest.raises(ValueError, match=message):
            model.loss(model(x), given)
        with pytest.raises(ValueError, match=message):
            pack(TASKS, given)
    towers = {name: nn.Linear(DIM, 1) for name in more}
    with pytest.raises(ValueError, match=r"tower has 'd', but the tasks are a, type, c\.d"):
        gated(tower=towers)
    with pytest.raises(ValueError, match=r"tower lacks task 'c\.d'"):
        gated(tower={name: towers[name] for name in fewer})
    with pytest.raises(ValueError, match="outputs lacks task 'a'"):
        model.loss(Outputs({}), targets)
    with pytest.raises(ValueError, match=r"task 'type': .*shape \[5, 2\], got \[44, 2\]"):
        pack(TASKS, {**targets, "a": targets["a"][:5]})


def test_outputs_that_would_broadcast():
    number = Task("n", "number")
    for use in (task_loss, task_metrics):
        with pytest.raises(ValueError, match=r"task 'n': the output must have shape \[B, 1\]"):
            use(number, torch.zeros(5), torch.zeros(5))


# -- tables ---------------------------------------------------------------------------------------


def table(tmp_path, **columns):
    """Forty rows with a split, two targets, a number and a category; `columns` replace some."""
    rows = {
        "split": ["train"] * 24 + ["validation"] * 8 + ["test"] * 8,
        "bought": [i % 2 for i in range(40)],
        "price": [0.5 + i % 7 for i in range(40)],
        "age": [20.0 + (7 * i) % 31 for i in range(40)],
        "city": [("Bern", "Oslo", "Rome")[i % 3] for i in range(40)],
        **columns,
    }
    path = tmp_path / "shop.csv"
    pandas.DataFrame(rows).to_csv(path, index=False)
    return load_problem(path, targets="bought,price:number")


class Trunk(nn.Module):
    def __init__(self, problem):
        super().__init__()
        sizes, width = problem.cardinalities, problem.train.inputs["numbers"].shape[1]
        self.embed = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.out = nn.Linear(4 * len(sizes) + width, DIM)

    def forward(self, numbers, categories):
        columns = [embed(ids) for embed, ids in zip(self.embed, categories.unbind(1), strict=True)]
        return self.out(torch.cat([numbers, *columns], 1))


def loss_of(found, split):
    part, tasks = getattr(found, split), [Task("bought", size=2), Task("price", "number")]
    model = MultiGate(tasks, [nn.Linear(DIM, 8) for _ in range(4)], dim=DIM, trunk=Trunk(found))
    return model.loss(model(part.inputs), part.targets)


def test_a_category_unseen_in_training_is_id_0(tmp_path):
    city = [("Bern", "Oslo", "Rome")[i % 3] for i in range(39)] + ["Lima"]
    found = table(tmp_path, city=city)
    assert found.cardinalities == [4]  # three cities of train, and 0
    assert found.test.inputs["categories"][-1].item() == 0
    assert found.train.inputs["categories"].min() == 1
    assert loss_of(found, "test").isfinite()


def test_a_column_of_nothing_is_left_out_and_a_column_with_gaps_is_filled(tmp_path):
    age = [math.nan if i % 5 == 0 else 20.0 + (7 * i) % 31 for i in range(40)]
    found = table(tmp_path, age=age, empty=[math.nan] * 40)
    assert "not used: empty: empty in all rows" in found.notes
    assert any(note.startswith("missing: age 20.0%") for note in found.notes)
    numbers = found.train.inputs["numbers"]
    assert numbers.isfinite().all() and (numbers[::5] == 0).all()
    assert loss_of(found, "train").isfinite()


def test_a_column_that_is_empty_in_train_alone_says_nothing(tmp_path):
    age = [math.nan] * 24 + [20.0 + i for i in range(16)]
    found = table(tmp_path, age=age)
    assert not found.train.inputs["numbers"].any()
    assert found.test.inputs["numbers"].isfinite().all() and loss_of(found, "test").isfinite()


def test_targets_of_a_table_that_cannot_be_learned_are_named(tmp_path):
    words = [("no", "yes")[i % 2] for i in range(39)] + ["perhaps"]
    with pytest.raises(ValueError, match="test has the class 'perhaps' of bought, which train la"):
        table(tmp_path, bought=words)
    with pytest.raises(ValueError, match="40 of 40 rows have no 'bought'"):
        table(tmp_path, bought=[math.nan] * 40)
    with pytest.raises(
        ValueError, match="'price' is not a finite number in 1 rows, such as 'dear'"
    ):
        table(tmp_path, price=[*range(39), "dear"])


def test_nan_that_reaches_a_model_is_named_by_column():
    x, _ = problem()
    x[3:5, 7] = math.nan
    with pytest.raises(ValueError, match="column 7 of x is NaN or infinite in 2 of 44 examples"):
        gated()(x)
