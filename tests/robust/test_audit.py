"""The audit: what it measures agrees with its parts, on our models and those of transformers."""

import copy
import json
import math

import pytest
import torch
import transformers as hf
from torch import nn
from torch.utils.data import TensorDataset

import moiety
from moiety import MoE, watch
from moiety.data.problem import Problem, Split
from moiety.data.problem import Target as Column
from moiety.models import ImageTransformer
from moiety.robust import APGD, PGD, Target, audit, check_audit, routing_change, run_attack
from moiety.robust.attribution import attribute
from moiety.robust.audit_attacks import FromClean, named_attacks
from moiety.robust.audit_result import wilson
from moiety.robust.routes import use

QUICK = {"steps": 6, "masking": 2, "lipschitz": 0, "progress": False}
EPS = [0, 0.02, 0.1]


class Net(nn.Module):
    """Four tokens of an input, through an MoE layer, to three classes."""

    def __init__(self, router="top-k", **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 16)
        self.moe = MoE(router, dim=16, hidden=16, experts=4, **options)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = self.inner(x.view(len(x), 4, 4)).relu()
        return self.head((h + 2 * self.moe(h)).mean(1))


def data(n=12, shape=(16,), classes=3):
    draw = torch.Generator().manual_seed(0)
    return torch.rand(n, *shape, generator=draw), torch.arange(n) % classes


def trained(kind=Net, **options):
    model, (x, y) = kind(**options), data()
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(80):
        with watch(model) as routes:
            loss = nn.functional.cross_entropy(model(x), y) + routes.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return trained(k=2)


@pytest.fixture(scope="module")
def found(model):
    attacks = ["pgd", "apgd", "apgd + router-margin", "apgd + overload", "apgd + diversity"]
    return audit(model, data(), EPS, attacks, **{**QUICK, "lipschitz": 2}).result


# -- numbers agree with their parts --------------------------------------------------------------


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
    masked = audit(Quantised(model), data(), [0.1], "apgd", **options)
    assert masked.result["masking"]["flagged"] is True
    assert "Gradient masking: The gradient is zero" in str(masked)


# -- groups --------------------------------------------------------------------------------------


def test_a_model_that_couples_examples_is_run_one_by_one():
    model, (x, y) = trained(k=1, capacity_factor=1.0), data()
    found = audit(model, (x, y), [0.05], "pgd", **QUICK).result
    assert "share the capacity" in found["threat"]["coupled"]
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


# -- models --------------------------------------------------------------------------------------

TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "num_experts_per_tok": 2,
}  # fmt: skip


def olmoe():
    return hf.OlmoeForCausalLM(hf.OlmoeConfig(**TEXT, num_experts=4))


def mixtral():
    return hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_local_experts=4))


def vit():
    config = hf.ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=24, num_labels=3,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def upcycled():
    return moiety.upcycle(vit(), experts=4, router="top-k", k=2, init="noise", exact=False)


def bold(make):
    """Weights large enough for predictions to differ."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(5)
    return model


@pytest.mark.parametrize("make", [olmoe, mixtral])
def test_text_models_are_attacked_in_embedding_space(make):
    model = bold(make)
    ids = torch.arange(3, 3 + 6 * 4).view(6, 4) % 32
    with torch.no_grad():
        y = model(input_ids=ids).logits[:, -1].argmax(-1)
    attacks = ["apgd", "apgd + router-margin"]
    found = audit(model, (ids, y), [0, 0.05, 0.5], attacks, **QUICK).result
    assert found["threat"]["bounds"] is None
    assert found["clean"]["error"] == 0.0  # the embeddings are those of the ids
    assert found["union"]["error"][-1] > 0
    assert len(found["routing"]) == 2
    for layer in found["routing"].values():
        assert layer["attacks"]["apgd + router-margin"]["change"][-1] > 0
        assert math.isclose(sum(layer["clean"]["load"]), 1.0)
    assert any(p != 0 for p in found["attribution"]["routes"])
    embedded = model.get_input_embeddings()(ids).detach()
    same = audit(model, (embedded, y), [0.5], "apgd", bounds=None, **QUICK).result
    assert same["attacks"]["apgd"]["loss"] == found["attacks"]["apgd"]["loss"][-1:]


def test_an_upcycled_vit_has_the_error_of_its_dense_one_and_routes():
    x, _ = data(6, (1, 8, 8))
    dense, sparse = bold(vit), bold(upcycled)
    for model, layers in ((dense, 0), (sparse, 2)):
        with torch.no_grad():
            y = model(pixel_values=(x - 0.5) / 0.5).logits.argmax(-1)
        found = audit(
            model,
            (x, y),
            [0, 0.1],
            ["pgd", "apgd"],
            normalize=(0.5, 0.5),
            **{**QUICK, "lipschitz": 1},
        )
        result = found.result
        assert result["clean"]["error"] == 0
        assert result["union"]["error"][-1] > 0
        assert len(result["routing"] or {}) == layers
        assert (result["attribution"] is None) == (layers == 0)
        assert ("routing change" in str(found)) == (layers > 0)


def test_a_problem_of_images(tmp_path):
    images = torch.randint(0, 256, (9, 1, 8, 8), dtype=torch.uint8)
    split = Split({"images": images}, {"kind": torch.arange(9) % 3})
    columns = [Column("kind", "classes", ["a", "b", "c"])]
    problem = Problem("tiles", "image", columns, split, split, split, shape=(1, 8, 8),
                      mean=(0.5,), std=(0.25,))  # fmt: skip
    model = ImageTransformer(shape=(1, 8, 8), outputs=3, dim=16, depth=1).eval()
    found = audit(model, problem, [0.1], "fgsm", **QUICK).result
    assert found["data"] == {"name": "tiles", "examples": 9, "classes": 3}
    with torch.no_grad():
        error = (model(images).argmax(-1) != split.targets["kind"]).double().mean()
    assert found["clean"]["error"] == float(error)


# -- shown ---------------------------------------------------------------------------------------


def test_a_bar_in_a_terminal(model, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    audit(model, data(4), [0.1], "fgsm", **{**QUICK, "progress": True})
    assert "masked gradients" in capsys.readouterr().err
    audit(model, data(4), [0.1], "fgsm", **QUICK)
    assert capsys.readouterr().err == ""


def test_the_table_and_the_page(found, tmp_path):
    from moiety.robust import Audit

    shown = str(Audit(found))
    assert len(shown.splitlines()) < 20
    for word in ("union", "apgd + router-margin", "eps 0.1", "moe", "loss +"):
        assert word in shown
    assert f"{found['union']['error'][-1]:.1%}" in shown
    page = Audit(found).to_html(tmp_path / "audit.html").read_text()
    assert "apgd + router-margin" in page
    again = json.loads(Audit(found).to_json(tmp_path / "audit.json").read_text())
    assert again == found


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
