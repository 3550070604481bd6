"""Inputs of the audit: bad ones, models left as they were, attacks by name, broken results."""

import copy
import math

import pytest
import torch
from audit_cases import QUICK, Net, data
from test_target import photograph, unchanged
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from moiety.robust import (
    APGD,
    PGD,
    Ball,
    FromClean,
    Noise,
    Target,
    audit,
    check_audit,
    freeze,
    named_attacks,
    routing_change,
    run_attack,
)
from moiety.robust.audit_result import wilson

# -- left as it was, and bad input ---------------------------------------------------------------


class Touchy(Net):
    """Counts its calls, makes a buffer and draws a number in each; one of them may fail."""

    def __init__(self, fails=None):
        super().__init__("sigmoid-balanced", k=2)
        self.fails = fails
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", None)
        self.made = 0
        self.train()
        self.moe.eval()
        self.head.requires_grad_(False)
        self.inner.weight.grad = torch.ones_like(self.inner.weight)

    def forward(self, x):
        self.made += 1
        if self.made == self.fails:
            raise OSError("a disk is full")
        self.calls += 1
        self.late = torch.zeros(2)
        return super().forward(x) + 0 * torch.rand(())


def touched(model):
    """Audit a model and see that it is as it was."""
    before = photograph(model), hooks(model)
    try:
        with pytest.warns(UserWarning, match="the model is in train mode"):
            audit(model, data(6), [0.05], "apgd + router-margin", **{**QUICK, "lipschitz": 1})
    finally:
        unchanged(before[0], model)
        assert before[1] == hooks(model) and model.moe._watchers == ()
        assert model.late is None and model.calls == 0


def hooks(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def test_the_model_is_left_as_it_was_even_after_an_error():
    model = Touchy()
    touched(model)
    for fails in range(1, model.made, max(model.made // 12, 1)):
        with pytest.raises(OSError, match="a disk is full"):
            touched(Touchy(fails))


class Wrong(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.net, self.turn = Net(k=1), turn

    def forward(self, x):
        return self.turn(self.net(x))


class Strange:
    """An attack of somebody's own."""

    name = "strange"

    def __init__(self, move):
        self.move = move

    def __call__(self, target, x, *given, **words):
        return self.move(x)


X, Y = data(6)
BAD = {
    "bounds": ({"data": (2 * X, Y)}, "outside bounds"),
    "labels": ({"data": (X, Y + 1)}, "labels must be from 0 to 2"),
    "label type": ({"data": (X, Y.float())}, "whole numbers"),
    "label count": ({"data": (X, Y[:3])}, "one label for each of 6"),
    "no data": ({"data": (X[:0], Y[:0])}, "no example"),
    "data": ({"data": X}, r"data must be two tensors \(x, y\), .* got Tensor"),
    "arrays": ({"data": (X.numpy(), Y.numpy())}, r"got \['ndarray', 'ndarray'\]"),
    "no labels": ({"data": {"pixel_values": X}}, r"a dict with labels .* got \['Tensor', 'None"),
    "ids": ({"data": (torch.ones(6, 4).long(), Y)}, "x holds whole numbers"),
    "probabilities": ({"model": Wrong(lambda z: z.softmax(-1)).eval()}, "returns probabilities"),
    "NaN": ({"model": Wrong(lambda z: z * math.nan).eval()}, "are NaN"),
    "eps": ({"eps": [0]}, "at least one number above 0"),
    "negative eps": ({"eps": [-1]}, "eps must be a number, at least 0"),
    "no eps": ({"eps": None}, "eps must be a number, at least 0, got None"),
    "norm": ({"norm": "l1"}, 'norm must be "linf" or "l2"'),
    "bounds text": ({"bounds": "none"}, r"bounds must be \(low, high\) or None, got 'none'"),
    "bounds turned": ({"bounds": (1, 0)}, r"bounds must be \(low, high\) or None"),
    "normalize": ({"normalize": ([0.5] * 3, [1.0] * 3)}, "normalize has 3 numbers and x"),
    "attack class": ({"attacks": [PGD]}, "an attack is a name or an object such as APGD"),
    "attack number": ({"attacks": 3}, r"an attack is a name or an object .* got 3"),
    "attack": ({"attacks": "fgsn"}, "no attack is named 'fgsn'"),
    "loss": ({"attacks": "apgd + margin"}, "no attack is named"),
    "no attacks": ({"attacks": []}, "attacks is empty"),
    "twice": ({"attacks": ["pgd", "pgd"]}, "two attacks are named 'pgd'"),
    "source": ({"source": nn.Linear(16, 2).eval()}, "the model has 2 classes"),
    "group": ({"group": 0}, "group must be a whole number"),
    "large group": ({"group": 8}, "groups of 8 need as many examples, and there are 6"),
    "seed": ({"seed": 2**63}, r"seed must be a whole number from 0 to 2\^63 - 1, got 9223"),
    "negative seed": ({"seed": -1}, r"seed must be a whole number from 0 .* got -1"),
    "masking": ({"masking": 0}, "masking must be a whole number"),
    "lipschitz": ({"lipschitz": -1}, "lipschitz must be a whole number, at least 0"),
    "dense": ({"model": nn.Linear(16, 3).eval(), "attacks": "apgd + overload"}, "no MoE layer"),
    "NaN attack": ({"attacks": [Strange(lambda x: x * math.nan)]}, "attack 'strange' returned NaN"),
    "cut attack": ({"attacks": [Strange(lambda x: x[:, :1])]}, r"attack 'strange' .* got \[6, 1\]"),
    "no points": ({"attacks": [Strange(lambda x: None)]}, "attack 'strange' .* got NoneType"),
    "target": ({"model": Target(Net(k=1).eval()), "normalize": (0, 1)}, "has its own normalize"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_changes_nothing(case):
    changes, says = BAD[case]
    given = {"model": Net(k=1).eval(), "data": (X, Y), "eps": [0.1], "attacks": "pgd", **QUICK}
    given |= changes
    model, rng = given["model"], torch.get_rng_state()
    module = model.model if isinstance(model, Target) else model
    state = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=says):
        audit(**given)
    assert all(torch.equal(state[k], v) for k, v in module.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("words", [{"norm": "l1"}, {"attacks": "fgsn"}, {"bounds": (1, 0)}])
def test_a_wrong_name_is_told_before_the_data_are_read(words):
    class Unread(DataLoader):
        def __iter__(self):
            raise AssertionError("the data were read")

    given = {"eps": [0.1], "attacks": "pgd", **QUICK, **words}
    with pytest.raises(ValueError):
        audit(Net(k=1).eval(), Unread(TensorDataset(X, Y)), **given)


SEEING = {
    "no experts": (nn.Linear(16, 3).eval(), "overload", "Linear has no MoE layer"),
    "no choice": (Net("softmax").eval(), "router-margin", "experts that were not chosen"),
    "no balance": (Net(k=1, balance={}).eval(), "auxiliary", "needs a balance loss"),
}


@pytest.mark.parametrize("case", SEEING)
def test_a_router_that_is_not_there_is_told_before_any_attack(case):
    def run(x):
        raise AssertionError("an attack ran")

    model, loss, says = SEEING[case]
    attacks = {"first": Strange(run), "second": APGD(loss={"ce": 1.0, loss: 1.0})}
    with pytest.raises(ValueError, match=f"leave out the attack 'second': .*{says}"):
        audit(model, (X, Y), [0.1], attacks, **QUICK)


FORMS = {
    "int32 labels": (X, Y.int()),
    "half": ((X * 256).round().half() / 256, Y),
    "a graph": (X.clone().requires_grad_(), Y),
    "loader": DataLoader(TensorDataset(X, Y), 4),
    "batches by name": DataLoader([{"pixel_values": x, "labels": y} for x, y in zip(X, Y)], 4),
    "words": {"pixel_values": X, "labels": Y},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.filterwarnings("error")
def test_forms_of_data(form, model):
    x = (X * 256).round() / 256 if form == "half" else X
    same = audit(model, (x, Y), [0.05], "apgd", **QUICK).result
    found = audit(model, FORMS[form], [0.05], "apgd", **QUICK).result
    for part in ("clean", "attribution", "routing"):
        assert found[part] == same[part]
    assert found["attacks"]["apgd"]["loss"] == same["attacks"]["apgd"]["loss"]


def test_inside_inference_mode(model):
    expected = audit(model, (X, Y), [0.05], "apgd", **{**QUICK, "lipschitz": 1}).result
    with torch.inference_mode():
        data = X.clone(), Y.clone()
        found = audit(model, data, [0.05], "apgd", **{**QUICK, "lipschitz": 1}).result
    for part in ("clean", "attribution", "lipschitz", "masking"):
        assert found[part] == expected[part]


def test_eps_in_any_order_and_twice_and_as_a_tensor(model):
    for eps in ([0.1, 0, 0.1], torch.tensor([0.1, 0.0], dtype=torch.float64)):
        assert audit(model, (X, Y), eps, "fgsm", **QUICK).result["eps"] == [0.0, 0.1]


def test_data_sets_and_targets_and_named_objects(model):
    x, y = data(6)
    one = audit(model, (x, y), 0.05, {"mine": PGD(steps=3)}, attribution=False, **QUICK).result
    two = audit(Target(model), TensorDataset(x, y), [0.05], [PGD(steps=3)], **QUICK).result
    assert list(one["attacks"]) == ["mine"]
    assert one["attacks"]["mine"]["error"] == two["attacks"]["pgd"]["error"]


# -- names and intervals -------------------------------------------------------------------------


def test_attacks_by_name():
    found = named_attacks(["fgsm", "apgd-dlr", "apgd-dlr-targeted", "random-search"], steps=5)
    assert list(found) == ["fgsm", "apgd-dlr", "apgd-dlr-targeted", "random-search"]
    assert [a.settings()["steps"] for a in found.values()] == [1, 5, 5, 5]
    assert found["apgd-dlr-targeted"].settings()["loss"] == "dlr-targeted"


def test_an_attack_on_the_router_comes_with_autopgd():
    found = named_attacks("pgd+router-margin+overload")
    assert list(found) == ["apgd", "pgd + router-margin + overload"]
    attack = found["pgd + router-margin + overload"]
    assert isinstance(attack, FromClean)
    assert attack.attack.loss == {"ce": 1.0, "router-margin": 1.0, "overload": 1.0}


def test_the_margin_alone_starts_from_the_clean_choice_too():
    assert isinstance(named_attacks("apgd-router-margin")["apgd-router-margin"], FromClean)


def test_the_anchor_leaves_frozen_routes_frozen(model):
    """Its loss is that of the frozen model: only the task counts, and the task loss is the same."""
    x, y = data()
    frozen, noise = freeze(Target(model), x), Noise(0, torch.arange(len(x)))
    loss = {"ce": 1.0, "router-margin": 0.0}
    for at in (frozen, Target(model)):
        one, other = (
            attack(at, x, y, Ball(0.1), noise, keep="loss")
            for attack in (FromClean(APGD(loss=loss, steps=6)), APGD(steps=6))
        )
        torch.testing.assert_close(one, other)


def test_the_clean_choice_as_anchor_changes_more_routes(model):
    x, y = data()
    loss = {"router-margin": 1.0}
    clean = Target(model, watch="choice")(x).routes

    def change(attack):
        x_adv = run_attack(attack, model, x, y, 0.1, keep="loss").x
        return routing_change(clean, Target(model, watch="choice")(x_adv).routes, len(x))["moe"]

    assert change(FromClean(APGD(loss=loss, steps=20))) > change(APGD(loss=loss, steps=20))


def test_wilson_by_hand():
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # Wilson 1927
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 0) == (0.0, 1.0)


def break_(result, path, value):
    *way, last = path
    at = result
    for step in way:
        at = at[step]
    at[last] = value


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("schema",), 2, "schema 1"),
        (("clean", "error"), 1.5, r"audit\['clean'\]\['error'\] must be a number from 0 to 1"),
        (("attacks", "pgd", "error"), [0.1], "error of pgd must have a number for each of 3 eps"),
        (("attacks", "pgd", "low"), [1.0] * 3, "is outside"),
        (("union", "error"), [0.0] * 3, "is outside|less than"),
        (("attribution", "input"), [9.0] * 3, "must sum to"),
        (("routing", "moe", "clean"), {}, "has no 'load'"),
        (("model",), [], "must be a dict"),
        (("eps",), 3, "must be a list"),
        (("lipschitz", "end_to_end", "max"), math.nan, "a finite number"),
        (("masking", "examples"), None, "a whole number from 0 on"),
    ],
)
def test_a_broken_result_is_told(found, path, value, says):
    broken = copy.deepcopy(found)
    break_(broken, path, value)
    with pytest.raises(ValueError, match=says):
        check_audit(broken)
