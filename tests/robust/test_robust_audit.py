"""The audit: what it measures agrees with its parts."""

import json

import pytest
import torch
from audit_cases import EPS, QUICK, Net, data, trained
from torch import nn

from moiety.robust import (
    APGD,
    PGD,
    Ball,
    Noise,
    Target,
    audit,
    check_audit,
    named_attacks,
    routing_change,
    run_attack,
)
from moiety.robust.attribution import attribute, freeze
from moiety.robust.routes import use


def test_every_attack_is_that_of_run_attack(model, found):
    x, y = data()
    for name, attack in {"pgd": PGD(steps=6), "apgd": APGD(steps=6)}.items():
        alone = run_attack(attack, model, x, y, EPS)
        assert found["attacks"][name]["error"] == [float(a.fooled.double().mean()) for a in alone]
        losses = [float(a.loss.double().mean()) for a in alone]
        assert found["attacks"][name]["loss"] == pytest.approx(losses)
        assert found["attacks"][name]["settings"] == attack.settings()
    assert found["attacks"]["apgd"]["error"][-1] > found["clean"]["error"]


def test_routing_is_that_of_the_attacked_inputs(model, found):
    x, y = data()
    target = Target(model, watch="choice")
    clean = target(x).routes
    for i, attacked in enumerate(run_attack(APGD(steps=6), model, x, y, EPS)):
        now, layer = target(attacked.x).routes, found["routing"]["moe"]
        change = routing_change(clean, now, examples=len(x))["moe"]
        assert layer["attacks"]["apgd"]["change"][i] == pytest.approx(change)
        assert layer["attacks"]["apgd"]["load"][i] == use(now)["moe"].as_dict()["load"]
    assert found["routing"]["moe"]["clean"] == use(clean)["moe"].as_dict()
    assert layer["attacks"]["apgd"]["change"][-1] > layer["attacks"]["apgd"]["change"][0] == 0


def test_the_attribution_sums_to_the_rise_of_the_loss(model, found):
    x, y = data()
    parts, attack = found["attribution"], found["attacks"]["apgd"]
    x_adv = run_attack(APGD(steps=6), model, x, y, EPS[-1]).x
    by_choice = attribute(Target(model), x, x_adv, y)
    assert parts["attack"] == "apgd"
    assert parts["input"][-1] == pytest.approx(float(by_choice.input.mean()))
    assert parts["routes"][-1] == pytest.approx(float(by_choice.routes.mean()))
    rises = [loss - found["clean"]["loss"] for loss in attack["loss"]]
    assert parts["total"] == pytest.approx(rises, abs=1e-6)
    by_weight = parts["frozen"]["weights"]
    for i in range(len(EPS)):
        assert parts["input"][i] + parts["routes"][i] == pytest.approx(parts["total"][i])
        assert by_weight["input"][i] + by_weight["routes"][i] == pytest.approx(parts["total"][i])
    assert by_weight["routes"][-1] != parts["routes"][-1]
    for kind in ("choices", "weights"):
        errors = parts["frozen"][kind]["error"]
        assert errors[0] == found["clean"]["error"] < errors[-1]


def test_the_frozen_model_is_attacked_itself():
    """Not hit by the points that were found on the live one."""
    model, (x, y), eps = trained(k=1), data(48), [0.02, 0.04, 0.06, 0.08]
    target, attack = Target(model), APGD(steps=6)
    y = model(x).argmax(-1)
    found = audit(model, (x, y), eps, "apgd", **QUICK).result["attribution"]["frozen"]
    noise, differs = Noise(0, torch.arange(len(x))), False
    for kind, weights in (("choices", False), ("weights", True)):
        frozen = freeze(target, x, weights=weights)
        for size, error in zip(eps, found[kind]["error"]):
            with target.at_rest(), torch.no_grad():
                own = frozen(attack(frozen, x, y, Ball(size), noise)).logits.argmax(-1) != y
                others = frozen(attack(target, x, y, Ball(size), noise)).logits.argmax(-1) != y
            assert error == float(own.double().mean())
            differs |= not torch.equal(own, others)
    assert differs


def test_the_union_counts_who_any_attack_fools(model, found):
    x, y = data()
    errors = [each["error"] for each in found["attacks"].values()]
    wrong = torch.zeros(len(x), dtype=torch.bool)
    for attack in named_attacks(found["union"]["of"], 6).values():
        wrong |= run_attack(attack, model, x, y, EPS[1]).fooled
    assert found["union"]["error"][1] == float(wrong.double().mean())
    for one, strongest in zip(found["union"]["error"], map(max, zip(*errors))):
        assert one >= strongest


def test_the_rest_of_the_result(model, found):
    check_audit(json.loads(json.dumps(found, allow_nan=False)))
    assert found["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["model"]["layers"] == ["moe"]
    assert found["model"]["flops"] > 0
    assert found["data"] == {"name": "data", "examples": 12, "classes": 3}
    assert found["threat"] == {
        "norm": "linf", "bounds": [0.0, 1.0], "group": 1, "label": "per example", "coupled": None,
    }  # fmt: skip
    assert found["noise"] == {"error": 0.0, "change": {"moe": 0.0}}
    assert found["masking"]["transfer"] is not None
    assert (found["masking"]["examples"], found["masking"]["eps"]) == (2, EPS[-1])
    assert set(found["lipschitz"]["layers"]) == {"moe"}
    assert found["lipschitz"]["end_to_end"]["median"] > 0


def test_settings_change_something(model, found):
    """Every option reaches what it is about."""
    x, y = data()
    far = audit(model, (x, y), [0.1], "pgd", norm="l2", attribution=False, **QUICK).result
    near = found["attacks"]["pgd"]["loss"][-1]
    assert far["attacks"]["pgd"]["loss"][0] < near  # an l_2 ball of the same eps is smaller
    assert far["attribution"] is None
    options = {**QUICK, "attribution": False, "masking": 1}
    other = audit(model, (x, y), [0.1], "apgd", seed=3, repeats=1, **options).result
    assert other["lipschitz"] is None
    assert other["noise"]["change"] == {}
    assert other["seed"] == 3
    assert other["attacks"]["apgd"]["loss"][0] != found["attacks"]["apgd"]["loss"][-1]
    shifted = audit(model, (x, y), [0.1], "pgd", normalize=(0.5, 0.5), **options).result
    assert shifted["clean"]["loss"] != found["clean"]["loss"]
    loose = audit(model, (3 * x, y), [0.1], "pgd", bounds=None, name="net", **options).result
    assert loose["threat"]["bounds"] is None
    assert loose["model"]["name"] == "net"
    source = audit(model, (x, y), [0.1], "pgd", source=Net(k=1).eval(), **QUICK).result
    assert source["masking"]["transfer"] != found["masking"]["transfer"]


class Noisy(Net):
    """Random in eval mode as well."""

    def forward(self, x):
        return super().forward(x + 0.3 * torch.randn_like(x))


def test_noise_of_a_random_model_is_told_from_the_attack():
    model = trained(Noisy, k=1)
    found = audit(model, data(24), [0.0, 0.1], "fgsm", repeats=4, **QUICK).result
    assert found["noise"]["change"]["moe"] > 0.1
    assert found["noise"]["error"] > 0
    again = audit(model, data(24), [0.0, 0.1], "fgsm", repeats=4, **QUICK).result
    assert again["noise"] == found["noise"]  # seeded
    assert again["attacks"]["fgsm"]["error"] == found["attacks"]["fgsm"]["error"]


def test_drops_are_a_change_that_no_attack_made():
    model = Net(k=1, capacity_factor=0.5, group="example").eval()
    found = audit(model, data(), [0, 0.1], "apgd + overload", **QUICK).result
    layer = found["routing"]["moe"]
    assert found["noise"]["change"]["moe"] == layer["attacks"]["apgd"]["change"][0] > 0
    assert layer["clean"]["dropped"] > 0
    assert found["threat"]["coupled"] is None


def test_the_balance_losses_join_the_attack(model):
    balanced = trained(k=2, balance={"switch": 0.1, "importance": 0.1})
    found = audit(balanced, data(), [0.05], "apgd + auxiliary", **QUICK).result
    assert found["union"]["of"] == ["apgd", "apgd + auxiliary"]
    losses = [found["attacks"][name]["loss"] for name in found["union"]["of"]]
    assert losses[0] != losses[1]


def test_rows_of_labels(model):
    x, y = data()
    rows = nn.functional.one_hot(y, 3)
    found = audit(model, (x, rows), [0, 0.1], "apgd-sigmoid", **QUICK).result
    parts, losses = found["attribution"], found["attacks"]["apgd-sigmoid"]["loss"]
    assert parts["total"] == pytest.approx([a - found["clean"]["loss"] for a in losses], abs=1e-6)


class Quantised(nn.Module):
    """Rounds its input, so that its gradient is zero."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model((x * 50).round() / 50)


def test_masking_is_flagged_and_an_honest_model_with_a_hard_router_is_not(model):
    options = {**QUICK, "masking": 12, "attribution": False}
    assert audit(model, data(), [0.1], "apgd", **options).result["masking"]["flagged"] is False
    masked = audit(Quantised(model).eval(), data(), [0.1], "apgd", **options)
    assert masked.result["masking"]["flagged"] is True
    assert "Gradient masking: The gradient is zero" in str(masked)


# -- groups --------------------------------------------------------------------------------------


def test_a_model_that_couples_examples_is_run_one_by_one():
    model, (x, y) = trained(k=1, capacity_factor=1.0), data()
    found = audit(model, (x, y), [0.05], "pgd", **QUICK).result
    assert "a whole batch shares the capacity" in found["threat"]["coupled"]
    with torch.no_grad():
        alone = torch.cat([model(one) for one in x.split(1)])
    wrong = alone.argmax(-1) != y
    assert found["clean"]["error"] == float(wrong.double().mean())


def test_groups_are_kept_whole_and_labelled():
    model, (x, y) = trained(k=1, capacity_factor=1.0), data(10)
    found = audit(model, (x, y), [0.05], "apgd", group=4, **QUICK).result
    assert found["threat"]["label"] == "batch threat model"
    assert found["threat"]["group"] == 4
    with torch.no_grad():
        grouped = torch.cat([model(four) for four in x.split(4)])
    wrong = grouped.argmax(-1) != y
    assert found["clean"]["error"] == float(wrong.double().mean())
