"""Every copy of a multi-task model in `fit_many` ends where a plain loop ends."""

import pytest
import torch
from samples import DIM, TASKS, feedforward, gated, problem
from torch.utils.data import TensorDataset

import moiety
from moiety.multitask import PLE, MultiGate, Trajectory, pack, packed_loss
from moiety.train import fit_many, seeded, step_seed

SEEDS = [3, 0]
NAMES = moiety.list_routers()


def plain(make, seed, steps, batch=16, lr=1e-2):
    x, targets = problem(dtype=torch.float64)
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
        pairs = zip(model.state_dict().items(), want.state_dict().values(), strict=True)
        for (name, a), b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m)
    return fitted


@pytest.mark.parametrize("name", NAMES)
def test_every_router_with_its_losses_and_noise(name):
    agree(lambda seed: gated(name, tower=4, log=(3, 2)).double())


def test_uncertainty_and_modules():
    def make(seed):
        modules = [torch.nn.Linear(DIM, 5) for _ in range(4)]
        return MultiGate(TASKS, modules, dim=DIM, weighting="uncertainty").double()

    fitted = agree(make)
    assert not torch.equal(fitted.state["log_variance"], torch.zeros(2, 3))


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
