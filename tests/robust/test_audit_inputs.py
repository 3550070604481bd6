"""Inputs of the audit: bad ones, models left as they were, attacks by name, broken results."""

import copy
import math

import pytest
import torch
from audit_cases import QUICK, Net, audited, data, plain, trained
from torch import nn
from torch.utils.data import TensorDataset

from moiety.robust import (
    APGD,
    PGD,
    FromClean,
    Target,
    audit,
    check_audit,
    named_attacks,
    routing_change,
    run_attack,
)
from moiety.robust.audit_result import wilson


@pytest.fixture
def model():
    return plain()


@pytest.fixture
def found():
    return audited()


# -- left as it was, and bad input ---------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model = trained(router="sigmoid-balanced", k=2)
    model.train()
    model.moe.eval()
    for p in model.head.parameters():
        p.requires_grad_(False)
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    rng = torch.get_rng_state()
    with pytest.warns(UserWarning, match="the model is in train mode"):
        audit(model, data(6), [0.05], "apgd", **QUICK)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert [p.requires_grad for p in model.head.parameters()] == [False, False]
    assert all(p.requires_grad for p in model.moe.parameters())
    for p, g in zip(model.parameters(), grads):
        assert (p.grad is None) if g is None else torch.equal(p.grad, g)
    assert torch.equal(rng, torch.get_rng_state())
    assert model.moe._watchers == ()


class Wrong(nn.Module):
    def __init__(self, turn):
        super().__init__()
        self.net, self.turn = Net(k=1), turn

    def forward(self, x):
        return self.turn(self.net(x))


X, Y = data(6)
BAD = {
    "bounds": ({"data": (2 * X, Y)}, "outside bounds"),
    "labels": ({"data": (X, Y + 1)}, "labels must be from 0 to 2"),
    "label type": ({"data": (X, Y.float())}, "whole numbers"),
    "label count": ({"data": (X, Y[:3])}, "one label for each of 6"),
    "no data": ({"data": (X[:0], Y[:0])}, "no example"),
    "data": ({"data": X}, r"data must be \(x, y\)"),
    "ids": ({"data": (torch.ones(6, 4).long(), Y)}, "x holds whole numbers"),
    "probabilities": ({"model": Wrong(lambda z: z.softmax(-1)).eval()}, "returns probabilities"),
    "NaN": ({"model": Wrong(lambda z: z * math.nan).eval()}, "are NaN"),
    "eps": ({"eps": [0]}, "at least one number above 0"),
    "negative eps": ({"eps": [-1]}, "eps must be a number, at least 0"),
    "norm": ({"norm": "l1"}, 'norm must be "linf" or "l2"'),
    "attack": ({"attacks": "fgsn"}, "no attack is named 'fgsn'"),
    "loss": ({"attacks": "apgd + margin"}, "no attack is named"),
    "no attacks": ({"attacks": []}, "attacks is empty"),
    "twice": ({"attacks": ["pgd", "pgd"]}, "two attacks are named 'pgd'"),
    "group": ({"group": 0}, "group must be a whole number"),
    "masking": ({"masking": 0}, "masking must be a whole number"),
    "lipschitz": ({"lipschitz": -1}, "lipschitz must be"),
    "dense": ({"model": nn.Linear(16, 3).eval(), "attacks": "apgd + overload"}, "no MoE layer"),
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
    ],
)
def test_a_broken_result_is_told(found, path, value, says):
    broken = copy.deepcopy(found)
    break_(broken, path, value)
    with pytest.raises(ValueError, match=says):
        check_audit(broken)
