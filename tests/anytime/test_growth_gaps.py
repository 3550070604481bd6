"""The gap of a growth that is not exact: as worked out by hand, and as it stands in the ledger."""

import torch
from torch import nn

from moiety import MoE, build_router
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.learners import learner
from moiety.anytime.run import run_stream
from moiety.anytime.stream import cut
from moiety.anytime.versions import Versions
from moiety.experts import ModuleExperts

DIM, CLASSES = 6, 3
SHORT = Training(epochs=2, batch=16)


def examples(rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, DIM, generator=g)
    return Examples(x, (x @ torch.randn(DIM, CLASSES, generator=g)).argmax(1))


def phase(number):
    return Phase(train=examples(60, number), validation=examples(40, -number), number=number)


def switch(seed):
    """One sparse layer of linear experts."""
    experts = ModuleExperts([nn.Linear(DIM, CLASSES) for _ in range(2)], dim=DIM, out_dim=CLASSES)
    router = build_router("switch", dim=DIM, experts=2, jitter=0.0, capacity_factor=None)
    return MoE(router, experts)


def after_first(name, model, **options):
    made = learner(name, model, training=SHORT, **options)
    made.train(phase(1))
    return made


def test_a_fresh_member_moves_the_mean_half_way_to_its_own_answer():
    made = after_first("growing-ensemble", lambda seed: nn.Linear(DIM, CLASSES), new="fresh")
    now = phase(2)
    x = now.validation.x
    old, new = (model(x).softmax(-1) for model in (made.models[0], made.build(1)))
    gap = made.grow(now)
    torch.testing.assert_close(torch.tensor(gap), (new - old).abs().max() / 2)


def test_a_copied_row_takes_its_share_of_every_gate():
    """The gate of a token is e^s / Z; a second row of the parent adds its e^s to Z."""
    made = after_first("growing-switch", switch, how="rows", count=1)
    model, now = made.models[0], phase(2)
    x = now.validation.x
    scores = torch.exp(x @ model.router.weight.detach().T)
    chosen = scores.argmax(1)
    answers = torch.stack([expert(x) for expert in model.experts.members], 1)
    own = answers[torch.arange(len(x)), chosen] * scores.amax(1, keepdim=True)
    gap = made.grow(now)
    (parent,) = made.growth["layers"][0]["parents"]
    total = scores.sum(1, keepdim=True)
    old, new = own / total, own / (total + scores[:, [parent]])
    moved = (new.softmax(-1) - old.softmax(-1)).abs().max().detach()
    assert moved > 1e-3
    torch.testing.assert_close(torch.tensor(gap), moved)


def test_the_ledger_holds_the_gap_of_each_growth(tmp_path):
    for how in ("rows", "families"):
        data, out = cut(examples(200), 3), tmp_path / how

        def made(how=how):
            return learner("growing-switch", switch, how=how, count=1, training=SHORT)

        lines = run_stream(data, made(), out=out).lines
        assert lines[0]["growth"] is None
        for number in (2, 3):
            before = made()
            before.load(Versions(out).load(number - 1)[0])
            batch = data[number]
            x = batch.validation.x
            old = before.predict(x)
            before.grow(Phase(train=batch.train, validation=batch.validation, number=number))
            moved = float((before.predict(x) - old).abs().max())
            assert lines[number - 1]["growth"]["gap"] == moved
            assert moved > 1e-3 if how == "rows" else moved < 1e-6
