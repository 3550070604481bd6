"""The studies of DSelect-k on data sets: their models, losses and measures."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.multitask import MultiGate, Outputs, pack
from moiety.routing import build_router
from moiety.studies.dselect_k import census, movielens, multi_digits, multi_fashion, multi_mnist
from moiety.studies.dselect_k.common import not_binary
from moiety.studies.dselect_k.parts import Embed, Layers, predict

STUDIES = [multi_mnist.study, multi_fashion.study, movielens.study, census.study]
TUNED = {"k": 2, "width": 1.0, "entropy": 0.1, "sparsity": 0.1, "units": 32}


def running(study, arm, folder, seed=0, stage="main", lr=0.01, **settings):
    """One run at the smallest scale, with settings as a search would choose them."""
    own = {**study.scale("smoke").settings, **study.arms[arm], "scale": "smoke", "stage": stage}
    space = study.search.of(arm)
    own |= {"lr": lr, **{n: v for n, v in TUNED.items() if n in space}, **settings}
    trial, store = Trial(study.name, arm, seed, own), Store(folder)
    cpu = torch.device("cpu")
    return Running(trial, cpu, store.curve(trial), store.checkpoint(trial), lambda share: None)


def settings_of(study, arm, **settings):
    own = {**study.scale("smoke").settings, **study.arms[arm]}
    own |= {n: v for n, v in TUNED.items() if n in study.search.of(arm)}
    return {**own, **settings}


ARMS = [
    *((multi_mnist.study, arm) for arm in multi_digits.ARMS),
    *((movielens.study, movielens.arm(gate, 0.5)) for gate in movielens.GATES),
    *((census.study, census.arm(gate, "income")) for gate in census.GATES),
]


@pytest.mark.parametrize(("study", "arm"), ARMS, ids=lambda word: getattr(word, "name", word))
def test_every_arm_trains_and_gives_all_metrics(study, arm, need, tmp_path):
    need(study.name)
    runs = [running(study, arm, tmp_path, seed) for seed in (0, 1)]
    found = study.run_block(runs)
    gated = "selected" in runs[0].extra
    for metrics, run in zip(found, runs):
        assert metrics.keys() == study.metrics.keys()
        known = {n for n, value in metrics.items() if value is not None}
        assert known == set(study.metrics) - (set() if gated else {"experts used"})
        assert all(math.isfinite(metrics[n]) for n in known)
        assert run.extra["parameters"] > 0
        assert len(run.curve.rows()) >= 2
    assert found[0] != found[1]
    assert runs[0].extra["flops"] > 0
    assert ("trajectories" in runs[0].extra) == gated
    assert "trajectories" not in runs[1].extra  # a page shows one


@pytest.mark.parametrize("study", [multi_mnist.study, movielens.study], ids=lambda s: s.name)
def test_a_search_sees_validation_alone(study, need, tmp_path):
    need(study.name)
    arm = next(arm for arm in study.arms if arm.startswith("top-k-static"))
    (found,) = study.run_block([running(study, arm, tmp_path, stage="tune")])
    known = {n for n, value in found.items() if value is not None}
    assert known == {study.search.metric, "experts used"}
    assert all(study.metrics[n].split == "validation" for n in known)


@pytest.mark.parametrize("study", STUDIES, ids=lambda s: s.name)
def test_a_search_discards_what_the_rule_forbids(study):
    assert study.search.rule is not_binary
    for arm, settings in study.arms.items():
        record = {"settings": {**settings, "scale": "full"}, "extra": {"allowed": False}}
        if settings["gate"] in ("dselect-k-static", "dselect-k", "gumbel-static"):
            assert study.search.rule(record), arm
        assert study.search.rule({**record, "extra": {"allowed": True}}) is None


@pytest.mark.parametrize("study", STUDIES, ids=lambda s: s.name)
def test_a_claim_compares_arms_of_one_problem(study):
    for claim in study.claims:
        a, b = ({**study.arms[arm], "gate": "", "k": 0} for arm in (claim.a, claim.b))
        assert a == b


@pytest.mark.parametrize("study", STUDIES, ids=lambda s: s.name)
def test_blocks_are_never_larger_than_a_scale_asks_for(study):
    for name in ("small", "full"):
        assert study.scale(name).seeds % study.block == 0
    assert study.scale("smoke").settings["copies"] == study.scale("smoke").seeds


def test_a_number_that_the_search_asks_for_decides_the_training(tmp_path):
    arm = movielens.arm("dselect-k-static", 0.5)
    runs = [running(movielens.study, arm, tmp_path, entropy=weight) for weight in (0.0, 1000.0)]
    none, much = movielens.study.run_block(runs)
    assert none["loss"] != much["loss"]


# -- Multi-MNIST ---------------------------------------------------------------------------------


def test_an_expert_is_the_paper_s_network():
    expert = multi_digits.cnn()
    assert expert(torch.zeros(3, 1, 36, 36)).shape == (3, 50)
    # 10 filters of 5 × 5; 20 of 10 × 5 × 5; 20 maps of 6 × 6 to 50; a bias each.
    assert sum(p.numel() for p in expert.parameters()) == 260 + 5020 + 36_050


@pytest.mark.parametrize("arm", ["top-k-static", "top-k", "softmax", "shared-bottom"])
def test_a_model_of_two_digits(arm):
    model = multi_digits.build(settings_of(multi_mnist.study, arm), seed=0)
    outputs = model(torch.randn(4, 1, 36, 36))
    assert {task: y.shape for task, y in outputs.items()} == {
        "top_left": (4, 10),
        "bottom_right": (4, 10),
    }
    if isinstance(model, MultiGate):
        assert (model.experts.experts, model.experts.dim) == (8, 1296)
        assert all(router.static == ("static" in arm) for router in model.routers)
        towers = [[p.shape for p in tower.parameters() if p.dim() == 2] for tower in model.towers]
        assert towers == [[(50, 50), (50, 50), (10, 50)]] * 2


def test_images_are_normalised_and_keep_their_classes(need):
    need("dselect-k/multi-mnist")
    train, validation, test = multi_digits.data({"set": "mnist", "counts": [300, 20, 10]})
    assert [len(part) for part in (train, validation, test)] == [300, 20, 10]
    x, y = train.tensors
    assert x.shape == (300, 1, 36, 36) and x.dtype == torch.float32
    assert float(x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(x.std()) == pytest.approx(1, abs=1e-3)
    assert y.shape == (300, 2) and set(y.unique().tolist()) == set(range(10))


def test_the_share_of_wrong_names_by_hand():
    targets = {"top_left": torch.tensor([0, 1, 2, 3]), "bottom_right": torch.tensor([0, 0, 0, 0])}
    guess = {"top_left": torch.tensor([0, 1, 2, 9]), "bottom_right": torch.tensor([0, 0, 1, 1])}
    outputs = Outputs({task: F.one_hot(ids, 10).float() for task, ids in guess.items()})
    packed = pack(multi_digits.TASKS, targets)
    assert float(multi_digits.wrong(outputs, packed)) == pytest.approx((1 / 4 + 2 / 4) / 2)
    found = multi_digits.accuracies(outputs, packed)
    assert found == {"accuracy, task 1": 0.75, "accuracy, task 2": 0.5, "accuracy": 0.625}


# -- MovieLens -----------------------------------------------------------------------------------


WATCHED, RATING = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4.0, torch.nan, 1.0])
GUESSES = {
    "watched": torch.tensor([[2.0], [0.0], [0.0]]),
    "rating": torch.tensor([[3.0], [9.0], [3.0]]),
}


@pytest.mark.parametrize("eta", movielens.ETAS)
def test_the_loss_of_films_by_hand(eta):
    # −log σ(2) = 0.126928, −log σ(0) = 0.693147 twice: mean 0.504407; errors 1 and 2: mean 2.5.
    expected = eta * 0.504407 + (1 - eta) * 2.5
    packed = torch.stack([WATCHED, RATING], 1)
    found = movielens.losses(eta, GUESSES, packed)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["rating RMSE"] == pytest.approx(math.sqrt(2.5))
    assert found["watched AUC"] == pytest.approx(0.75)  # one pair in order, one tied
    settings = {"eta": eta}
    assert float(movielens.loss_of(settings)(Outputs(GUESSES), packed)) == pytest.approx(expected)
    score = movielens.score_of(settings, TensorDataset(packed, packed))
    assert float(score(GUESSES, packed)) == pytest.approx(expected)
    parts = [
        float(score({n: y[rows] for n, y in GUESSES.items()}, packed[rows])) * len(packed[rows])
        for rows in (slice(0, 1), slice(1, 2), slice(2, 3))  # one of them without a rating
    ]
    assert sum(parts) / 3 == pytest.approx(expected)


def test_users_and_films_are_embedded_apart():
    embed = Embed([3, 4], 2)
    same = embed(torch.tensor([[1, 1]]))
    assert same.shape == (1, 4) and not torch.equal(same[:, :2], same[:, 2:])
    assert torch.equal(same[0], embed.table.weight[[1, 3 + 1]].flatten())
    numbers = Embed([3], 2, numbers=2)(torch.tensor([[0.5, -7.0, 2.0]]))
    assert numbers[0, :2].tolist() == [0.5, -7.0]


# -- experts -------------------------------------------------------------------------------------


def test_experts_of_one_layer_by_every_path():
    experts, x = Layers(4, 6, 5), torch.randn(7, 6)
    plain = torch.stack(
        [F.linear(x, w, b).relu() for w, b in zip(experts.weight, experts.bias, strict=True)]
    )
    assert torch.allclose(experts.answers(x, None, "dense"), plain, atol=1e-6)
    assert torch.allclose(experts.answers(x, torch.tensor([1, 3])), plain[[1, 3]], atol=1e-6)
    routing = build_router("top-k", dim=6, experts=4, k=2)(x)
    both = [experts(x, routing, backend) for backend in ("loop", "dense")]
    assert torch.allclose(*both, atol=1e-6)
    assert experts.flops_per_row() == [60.0] * 4


def test_dropout_is_of_training_alone():
    experts, x = Layers(2, 6, 500, dropout=0.5), torch.randn(3, 6)
    drawn = experts.answers(x, None, "dense")
    quiet = experts.eval().answers(x, None, "dense")
    kept = drawn[quiet > 0] > 0
    assert 0.4 < float(kept.double().mean()) < 0.6
    assert torch.allclose(drawn[quiet > 0][kept], 2 * quiet[quiet > 0][kept], atol=1e-5)


def test_predictions_in_parts_are_those_of_the_whole():
    model = multi_digits.build(settings_of(multi_mnist.study, "top-k"), seed=0)
    x = torch.randn(5, 1, 36, 36)
    parts = predict(model, x, batch=2)
    with torch.no_grad():
        whole = model.eval()(x)
    assert all(torch.allclose(parts[task], whole[task], atol=1e-5) for task in whole)


# -- census --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", census.GATES)
def test_a_model_of_the_census(gate, need):
    need("dselect-k/census")
    settings = settings_of(census.study, census.arm(gate, "income"), hidden=16)
    model = census.build(settings, seed=0)
    x, y = census.data(settings)[0].tensors
    outputs = model(x[:5])
    assert {task: y.shape for task, y in outputs.items()} == {
        "income": (5, 1),
        "never_married": (5, 1),
    }
    assert y.shape[1] == 2 and set(y.unique().tolist()) == {0.0, 1.0}
    outputs["income"].sum().backward()
    tower = next(model.towers[1].parameters())
    assert tower.grad is None or not tower.grad.any()
    if gate == "single-task":  # nothing is shared
        assert all(p.grad is None for p in model.bottoms[1].parameters())


def test_an_area_that_is_not_defined_is_none():
    outputs = {"income": torch.zeros(2, 1), "never_married": torch.tensor([[0.0], [1.0]])}
    found = census.areas(outputs, torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert found == {"AUC, task 1": None, "AUC, task 2": 1.0, "AUC": None}
