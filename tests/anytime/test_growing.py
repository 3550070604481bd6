"""Learners that grow: what growth keeps, what it changes, and what it brings."""

import copy
from functools import partial

import learning
import pytest
import torch
from learning import METER, SHORT, contract, mlp, phase, sparse, trained, tree_mlp, weights
from torch import nn

from moiety import MoE, build_router, watch
from moiety.anytime.backbones import TreeVGG19
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.growing import GrowingEnsemble
from moiety.anytime.learners import Ensemble, Single, learner
from moiety.anytime.trees import GrowingMoE
from moiety.experts import ModuleExperts
from moiety.models import PatchTransformer
from moiety.testing.learner import LEARNER

X = learning.examples(40, seed=9).x


@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("growing-ensemble", mlp, {}),
        ("growing-ensemble", mlp, {"new": "fresh", "every": 2, "optimizer": "carry"}),
        ("growing-moe", tree_mlp, {}),
        ("growing-moe", tree_mlp, {"split": "usage", "every": 2, "optimizer": "carry"}),
        ("growing-switch", sparse(capacity_factor=0.5), {}),
        ("growing-switch", sparse(), {"how": "rows"}),
    ],
)
def test_growing_learners_pass_their_contract(name, model, options):
    contract(partial(learner, name, model), **options)


# -- the growing ensemble ------------------------------------------------------------------------


def test_old_members_of_a_growing_ensemble_stay_and_its_parameters_grow_linearly():
    grown = trained("growing-ensemble", phases=1)
    size, kept = grown.parameters(), []
    for number in (2, 3):
        kept.append(weights(grown.models[-1]))
        grown.train(phase(number))
        assert grown.parameters() == number * size
        assert [torch.equal(weights(m), old) for m, old in zip(grown.models, kept)] == [True] * len(
            kept
        )
        assert not torch.equal(weights(grown.models[-1]), kept[-1])


def test_a_growing_ensemble_starts_as_the_single_model():
    grown, single = trained("growing-ensemble", phases=1), trained("single", phases=1)
    assert torch.equal(grown.predict(X), single.predict(X))


def test_options_of_a_growing_ensemble():
    assert len(trained("growing-ensemble", phases=4, every=2).models) == 2
    assert len(trained("growing-ensemble", phases=3, add=2).models) == 5
    copied = trained("growing-ensemble", phases=1)
    fresh = trained("growing-ensemble", phases=1, new="fresh")
    assert copied.grow(phase(2)) == 0  # two equal votes
    assert fresh.grow(phase(2)) > 1e-3
    assert torch.equal(weights(copied.models[1]), weights(copied.models[0]))


# -- growing mixtures ----------------------------------------------------------------------------


def images(rows: int, seed: int = 0) -> Phase:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 3, 32, 32, generator=g), torch.randint(10, (rows,), generator=g)
    held = Examples(x[:10], y[:10])
    return Phase(train=Examples(x[10:], y[10:]), validation=held, number=seed)


def transformer(seed: int) -> nn.Module:
    def layer(dim):
        return MoE("switch", 2, dim=dim, hidden=8, capacity_factor=1.0)

    return PatchTransformer(
        patches=4, patch_dim=4, classes=3, dim=8, depth=2, heads=2, feedforward=layer
    )


def patches(now: Phase) -> Phase:
    train, held = (Examples(d.x.view(-1, 4, 4), d.y) for d in (now.train, now.validation))
    return Phase(train=train, validation=held, number=now.number)


@pytest.mark.parametrize(
    ("name", "model", "phases"),
    [
        ("growing-moe", tree_mlp, [phase(n) for n in (1, 2, 3, 4)]),
        ("growing-moe", lambda seed: TreeVGG19(2), [images(40, n) for n in (1, 2, 3)]),
        ("growing-switch", transformer, [patches(phase(n)) for n in (1, 2, 3)]),
    ],
    ids=["mlp", "cnn", "transformer"],
)
def test_growth_is_exact_over_many_splits(name, model, phases):
    made = learner(name, model, training=Training(epochs=1, batch=32))
    gaps = [made.train(now).growth for now in phases]
    assert gaps[0] is None
    assert all(growth["gap"] < 1e-6 for growth in gaps[1:])
    layers = [part for part in made.models[0].modules() if isinstance(part, MoE)]
    start = 1 if name == "growing-moe" else 2
    step = 1 if name == "growing-moe" else 2
    assert {layer.experts.experts for layer in layers} == {start + step * (len(phases) - 1)}


def test_leaf_scores_sum_to_one_after_splits():
    made = trained("growing-moe", tree_mlp, phases=4)
    with watch(made.models[0], keep="all") as routes:
        made.predict(X)
    for name in routes.layers:
        leaves = routes[name][0].dense()
        assert leaves.shape == (40, 4)
        torch.testing.assert_close(leaves.sum(1), torch.ones(40))


def test_copied_rows_leave_a_gap_and_families_none():
    rows = trained("growing-switch", sparse(), how="rows")
    families = trained("growing-switch", sparse())
    assert not rows.exact and rows.reports[1].growth["gap"] > 1e-3
    assert families.exact and families.reports[1].growth["gap"] < 1e-6


def test_the_split_follows_loss_or_usage():
    """Expert 0 serves two examples in three at no loss, expert 1 the third at a large one."""
    layer = MoE(
        build_router("switch", dim=2, experts=2, jitter=0.0),
        ModuleExperts([nn.Identity(), nn.Identity()], dim=2),
        capacity_factor=4.0,
        balance={},
    )
    layer.router.weight.data = torch.eye(2)
    x = torch.tensor([[9.0, -9.0], [9.0, -9.0], [-9.0, 9.0]])
    held = Examples(x, torch.tensor([0, 0, 0]))
    parents = {}
    for split in ("loss", "usage"):
        model = copy.deepcopy(layer)
        words = {"split": split, "count": 1, "training": SHORT}
        made = learner("growing-switch", lambda seed, m=model: m, **words)
        made.phases = 1
        made.grow(Phase(train=held, validation=held, number=2))
        parents[split] = made.growth["layers"][0]["parents"]
    assert parents == {"loss": [1], "usage": [0]}


def test_count_and_every_of_growing_mixtures():
    two = trained("growing-moe", tree_mlp, phases=3, every=2)
    assert [report.growth is not None for report in two.reports] == [False, False, True]
    three = trained("growing-switch", sparse(), phases=2, count=1)
    assert [layer["children"] for layer in three.growth["layers"]] == [[2]]


@pytest.mark.parametrize(
    ("name", "model", "options", "match"),
    [
        ("growing-moe", sparse(), {}, "splits soft tree gates"),
        ("growing-moe", sparse("tree", k=1), {}, "splits soft tree gates"),
        ("growing-moe", tree_mlp, {"split": "size"}, "split must be"),
        ("growing-switch", sparse("hash"), {"how": "rows"}, "no row for an expert"),
        ("growing-switch", sparse(), {"how": "leaves"}, "how must be"),
        ("growing-switch", sparse(), {"count": 0}, "count must be"),
    ],
)
def test_bad_words_of_growing_mixtures_are_refused(name, model, options, match):
    with pytest.raises(ValueError, match=match):
        learner(name, model, **options)


# -- what growth brings --------------------------------------------------------------------------


def planted(seed: int) -> Phase:
    """Two linear rules, one for each sign of the first number: a linear expert knows one."""
    g = torch.Generator().manual_seed(seed)
    x, rules = torch.randn(900, 6, generator=g), torch.randn(2, 5, generator=g)
    y = ((x[:, 1:] * rules[(x[:, 0] > 0).long()]).sum(1) > 0).long()
    train, held = Examples(x[:600], y[:600]), Examples(x[600:], y[600:])
    return Phase(train=train, validation=held, number=1, seed=seed)


def linear_expert(router: str, **options):
    def make(seed: int) -> nn.Module:
        experts = ModuleExperts([nn.Linear(6, 2)], dim=6, out_dim=2)
        return MoE(build_router(router, dim=6, experts=1, **options), experts, balance={})

    return make


@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("growing-moe", linear_expert("tree"), {}),
        ("growing-switch", linear_expert("switch", capacity_factor=None), {"count": 1}),
    ],
)
def test_a_grown_model_learns_what_needs_two_experts(name, model, options):
    words = {"batch": 100, "method": "adam", "lr": 0.05, "score": "loss", "min_gain": 0.0}
    for seed in range(5):
        now, losses = planted(seed), []
        # In the first seed the copies train for the 200 steps after which they must differ.
        epochs = 34 if seed == 0 else 10
        for kind, make, own in (("single", lambda _: nn.Linear(6, 2), {}), (name, model, options)):
            made = learner(kind, make, seed=seed, training=Training(epochs=3, **words), **own)
            made.train(now)
            made.training = Training(epochs=epochs, patience=epochs, **words)
            assert made.train(now).steps == epochs * 6
            losses.append(made.measure(now.validation)["loss"])
        assert losses[1] < losses[0] - 0.1
        if seed == 0:
            assert not torch.equal(*(weights(m) for m in made.models[0].experts.members))
            assert _served(made.models[0], now.validation.x).min() > 0.02


def _served(model: MoE, x: torch.Tensor) -> torch.Tensor:
    """The share of examples for which each expert has the largest weight."""
    return torch.bincount(model.route(x).dense().argmax(1), minlength=2) / len(x)


# -- the contract finds those that tell something wrong -------------------------------------------


class SaysExact(GrowingEnsemble):
    exact = True


class SaysNotExact(GrowingMoE):
    exact = False


class GrowsNot(GrowingMoE):
    def _grow(self, phase):
        return {}


class Sums(Ensemble):
    def predict(self, x):
        return super().predict(x) * 2


class Draws(Single):
    def begin(self, phase):
        self.models[0](torch.randn(1, learning.INPUTS))


class Forgets(Single):
    def load(self, state):
        super().load({**state, "carried": [None]})


class StartsAgain(Single):
    def _fit(self, i, phase, saved):
        return super()._fit(i, phase, None)


class Lies(GrowingEnsemble):
    def grow(self, phase):
        gap = super().grow(phase)
        return None if gap is None else gap + 0.1


@pytest.mark.parametrize(
    ("kind", "model", "check", "seen"),
    [
        (SaysExact, mlp, "growth_as_declared", "exact is True"),
        (SaysNotExact, tree_mlp, "growth_as_declared", "exact is False"),
        (GrowsNot, tree_mlp, "growth_as_declared", "it grew and has no parameter more"),
        (Lies, mlp, "growth_as_declared", "it tells a gap"),
        (Sums, mlp, "answers_are_probabilities", "sum to 1"),
        (Draws, mlp, "training_is_deterministic", "draws the caller's"),
        (Forgets, mlp, "states_round_trip", "goes on to another"),
        (StartsAgain, mlp, "killed_phases_resume", "killed after"),
    ],
)
def test_check_learner_finds_a_wrong_learner(kind, model, check, seen):
    words = {"training": SHORT, "meter": METER, "optimizer": "carry"}
    (one,) = (each for each in LEARNER if each.name == check)
    with pytest.raises(AssertionError, match=f"{check}: .*{seen}"):
        one(lambda seed: kind(model, seed=seed, **words))
