"""Every copy of a multi-task model in `fit_many` ends where a plain loop ends."""

import copy

import pytest
import torch
from samples import DIM, TASKS, feedforward, gated, problem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import moiety
from moiety.multitask import PLE, MultiGate, Task, Trajectory, pack, packed_loss
from moiety.train import fit_many, seeded, step_seed

SEEDS = [3, 0]
NAMES = moiety.list_routers()


def plain(make, seed, steps, batch=16, lr=1e-2, data=None):
    x, targets = data or problem(dtype=torch.float64)
    with seeded(seed):
        model = make(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    generator, order, losses = torch.Generator().manual_seed(seed), [], []
    for step in range(1, steps + 1):
        if not order:
            order = list(torch.randperm(len(x), generator=generator).split(batch))
        rows = order.pop(0)
        with seeded(step_seed(seed, step)):
            loss = model.loss(model(x[rows]), {name: t[rows] for name, t in targets.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def agree(make, steps=5):
    x, targets = problem(dtype=torch.float64)
    data = TensorDataset(x, pack(TASKS, targets).double())
    # float32 holds class ids and labels exactly, but not the numbers: those come again.
    data.tensors[1][:, 3] = targets["c.d"]
    settings = {"steps": steps, "batch": 16, "lr": 1e-2, "loss": packed_loss(TASKS)}
    fitted = fit_many(make, data, seeds=SEEDS, block=2, **settings)
    for i, (seed, model) in enumerate(zip(SEEDS, fitted.models(), strict=True)):
        want, losses = plain(make, seed, steps)
        assert fitted.history[i].loss == pytest.approx(losses, rel=1e-9)
        same(model, want)
    return fitted


def same(model, other):
    pairs = zip(model.state_dict().items(), other.state_dict().values(), strict=True)
    for (name, a), b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("name", NAMES)
def test_every_router_with_its_losses_and_noise(name):
    agree(lambda seed: gated(name, tower=4, log=(3, 2)).double())


def test_uncertainty_and_modules():
    def make(seed):
        modules = [torch.nn.Linear(DIM, 5) for _ in range(4)]
        return MultiGate(TASKS, modules, dim=DIM, weighting="uncertainty").double()

    fitted = agree(make)
    assert not torch.equal(fitted.state["log_variance"], torch.zeros(2, 3))


ALIKE = [Task(f"n{i}", "number", weight=1 + i) for i in range(3)]


def alike_problem():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(44, DIM, generator=g, dtype=torch.float64)
    y = torch.randn(44, 3, generator=g, dtype=torch.float64)
    y[::3, 0], y[5:, 1] = torch.nan, torch.nan  # some batches have no label of the second
    return x, y


@pytest.mark.parametrize("name", ["dselect-k-static", "dselect-k", "top-k", "softmax-static"])
def test_tasks_that_are_alike_run_as_one_batch_with_the_same_results(name):
    x, y = alike_problem()

    def make(seed):
        words = {"tower": 5, "weighting": "uncertainty", "log": (4, 1)}
        return MultiGate(ALIKE, feedforward(), router=name, **words).double()

    assert make(0).joined and make(0).towers_alike
    targets = {f"n{i}": y[:, i] for i in range(3)}
    settings = {"steps": 5, "batch": 16, "lr": 1e-2, "loss": packed_loss(ALIKE)}
    fitted = fit_many(make, TensorDataset(x, y), seeds=SEEDS, **settings)
    for i, (seed, model) in enumerate(zip(SEEDS, fitted.models(), strict=True)):
        want, losses = plain(make, seed, 5, data=(x, targets))
        assert fitted.history[i].loss == pytest.approx(losses, rel=1e-9)
        same(model, want)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [False, True])
def test_in_one_batch_outside_of_vmap_as_on_a_gpu(name, weighted, monkeypatch):
    x, y = alike_problem()
    targets = {f"n{i}": y[:, i] for i in range(3)}
    model = MultiGate(ALIKE, feedforward(), router=name, log=(2, 1)).double()
    weight = torch.rand(44, dtype=torch.float64) if weighted else None
    found = []
    for together in (False, True):
        for module in ("together", "model", "weighting"):
            monkeypatch.setattr(f"moiety.multitask.{module}.pays_off", lambda t, yes=together: yes)
        run = copy.deepcopy(model)
        torch.manual_seed(0)
        outputs = run(x)
        loss = run.loss(outputs, targets, weight)
        slopes = torch.autograd.grad(loss, list(run.parameters()), allow_unused=True)
        buffers = [b.double() for b in run.buffers()]
        gates = [r.dense() for r in outputs.routings.values()]
        found.append([loss, *(g for g in slopes if g is not None), *buffers, *gates])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_more_tasks_need_hardly_more_operations():
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            views = ("view", "detach", "expand", "permute", "select.int")
            self.seen += not any(word in str(func) for word in views)
            return func(*args, **(kwargs or {}))

    def operations(tasks):
        tasks = [Task(f"t{i}", "number") for i in range(tasks)]
        data = TensorDataset(torch.randn(8, DIM), torch.randn(8, len(tasks)))
        words = {"seeds": [0], "loss": packed_loss(tasks)}
        counts = []
        for steps in (1, 3):
            with Count() as count:
                fit_many(lambda s: MultiGate(tasks, feedforward()), data, steps=steps, **words)
            counts.append(count.seen)
        return (counts[1] - counts[0]) / 2  # a step's own, without what is done once

    # Each task has a count of its calls to keep, and a few tensors to put together and apart.
    assert operations(20) - operations(4) < 16 * 8


def test_progressive_layered_extraction():
    agree(lambda seed: PLE(TASKS, dim=DIM, hidden=4, out_dim=6).double())


def test_validation_counts_missing_labels_too():
    x, targets = problem()
    data = TensorDataset(x, pack(TASKS, targets))
    settings = {"steps": 6, "loss": packed_loss(TASKS), "validation": data, "every": 3}
    fitted = fit_many(lambda seed: gated(), data, seeds=SEEDS, **settings)
    model = fitted.models()[0].eval()
    want = model.loss(model(x), targets).item()
    assert fitted.history[0].validation[6] == pytest.approx(want, rel=1e-4)


def test_the_log_of_every_copy_tells_when_it_became_binary():
    x, targets = problem()
    data = TensorDataset(x, pack(TASKS, targets))

    def make(seed):
        words = {"width": 0.05, "balance": {"entropy": 1.0}, "log": (30, 2)}
        return MultiGate(TASKS, feedforward(), k=2, **words)

    settings = {"steps": 40, "lr": 0.02, "loss": packed_loss(TASKS)}
    fitted = fit_many(make, data, seeds=SEEDS, **settings)
    for model in fitted.models():
        found = Trajectory.of(model)
        assert found.steps == list(range(0, 40, 2))
        binary = [step for step in found.binary_step.values() if step is not None]
        assert binary and all(0 < step < 40 for step in binary)
        selected = model.log.active()
        assert selected[0].min() > 2 and selected[-1].min() <= 2
