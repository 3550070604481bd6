"""The cosine routers in practice: measures by hand, held-out data, kills, and the rule for tau."""

import copy
import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from moiety import MoE
from moiety.data.named import MissingData
from moiety.lab.sampling import random_batches
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.routing.cosine import GAIN
from moiety.routing.perturbed_cosine import PerturbedCosine
from moiety.studies.cosine import language, practice, vision

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
RESULT = ROOT / "results" / "cosine-language.json"


def running(study, arm, folder, seed=0, device=CPU, stage="main", **settings):
    scale = study.scale("smoke").settings
    own = {"lr": 5e-3, "stage": stage, **scale, **study.arms[arm], "save_every": 0.0, **settings}
    trial, store = Trial(study.name, arm, seed, own), Store(folder)
    return Running(trial, device, store.curve(trial), store.checkpoint(trial), lambda share: None)


def settings_of(arm, **settings):
    return {**language.SMOKE, "experts": 16, "project": 16, **language.study.arms[arm], **settings}


# -- measures --------------------------------------------------------------------------------------


def losses(steps=200):
    return 2 + 0.1 * torch.randn(steps, generator=torch.Generator().manual_seed(0))


def test_a_spike_is_a_rise_far_above_the_steps_before_and_counts_once():
    quiet = losses()
    assert practice.spikes(quiet) == 0
    quiet[100] = 4.0
    quiet[150:153] = 4.0  # three steps in a row
    assert practice.spikes(quiet) == pytest.approx(1000 * 2 / 150)
    quiet[180] = 0.0  # a fall is none
    assert practice.spikes(quiet) == pytest.approx(1000 * 2 / 150)
    assert practice.spikes(losses(50)) is None


def test_the_effective_rank_counts_directions_around_the_mean():
    signs = torch.tensor([1.0, -1.0])[:, None, None] * torch.eye(4)
    assert practice.effective_rank(signs.flatten(0, 1)) == pytest.approx(4)
    line = (
        torch.arange(6.0)[:, None] * torch.tensor([1.0, 2.0, 3.0]) + 7
    )  # the mean is no direction
    assert practice.effective_rank(line) == pytest.approx(1, abs=1e-6)
    assert practice.effective_rank(torch.zeros(3, 2)) == 1


def test_the_switch_rate_is_of_first_experts_between_checks():
    torch.manual_seed(0)
    model = nn.Sequential(MoE("top-k", 4, dim=8, hidden=8, k=2, balance={}))
    course = practice.Course(model.eval(), torch.randn(100, 8), 200)
    check = course.checked(lambda: 0.5)
    router = model[0].router
    assert check() == 0.5 and course.switched == []  # the first has none before it
    check()
    with torch.no_grad():
        router.weight.copy_(router.weight.roll(1, 0))  # all tokens go to the next expert
    check()
    before = practice.first_experts(model, course.probe)
    with torch.no_grad():
        router.weight[0] = -router.weight[0]
    check()
    moved = (practice.first_experts(model, course.probe) != before).double().mean().item()
    assert 0 < moved < 1
    assert course.switched == [0, 1, moved]
    hear = course.heard(lambda step: losses()[step])
    for step in range(200):
        hear(step)
    assert course.state()["losses"] == losses().tolist()
    found = course.metrics()
    assert found["early switch rate"] == 0 and found["switch rate"] == (1 + moved) / 2
    assert found.keys() == practice.STABILITY.keys()
    assert 0.25 <= found["load"] <= 1 and 0 < found["entropy"] < 1


def test_the_spread_is_over_seeds():
    values = {"a": {"0": 1.0, "1": 3.0}, "b": {"0": 1.0}}
    arms = [{"name": arm, "metrics": {"m": {"values": v}}} for arm, v in values.items()]
    assert practice.spread({"arms": arms}, "m") == {"a": 2**0.5, "b": None}


# -- routers ---------------------------------------------------------------------------------------


def scores(arm):
    """Scores of an arm's router at the start, for tokens of a layer norm."""
    torch.manual_seed(0)
    router = practice.layer(settings_of(arm), 256).router
    tokens = nn.functional.layer_norm(torch.randn(2000, 256), [256])
    return router(tokens).scores.detach()


def test_the_control_has_the_scale_of_the_largest_tau_and_no_perturbation():
    arms = "perturbed 1", language.CONTROL, "cosine", "linear"
    largest, control, plain, linear = (scores(arm).std().item() for arm in arms)
    assert control == pytest.approx(largest, rel=0.02)
    assert plain == pytest.approx(2.16 * control, rel=0.01)  # 2 · (1 + 0.32 / 4)
    assert linear == pytest.approx(plain, rel=0.25)
    assert not hasattr(practice.layer(settings_of(language.CONTROL), 256).router, "tau_1")


@pytest.mark.parametrize(("arm", "ratio"), language.RATIOS.items())
def test_tau_is_a_share_of_the_norm_of_an_embedding(arm, ratio):
    router = practice.layer(settings_of(arm), 256).router
    assert router.tau_1 == router.tau_2 == pytest.approx(ratio * GAIN)
    torch.testing.assert_close(router.embedding.norm(dim=-1), torch.full((16,), GAIN))


@pytest.mark.parametrize("arm", vision.study.arms)
def test_a_router_of_one_expert_a_token_learns_from_the_task(arm):
    layer = practice.layer({**vision.SMOKE, **vision.study.arms[arm]}, 16)
    layer.balance = {}
    layer(torch.randn(5, 16)).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layer.router.parameters())


# -- language --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", language.study.arms)
def test_no_byte_is_seen_before_it_is_to_be_told(arm):
    torch.manual_seed(0)
    model = language.ByteModel(settings_of(arm)).eval()
    text = torch.randint(256, (2, 16), dtype=torch.uint8)
    later = text.clone()
    later[:, 9:] += 1
    first, second = model(text), model(later)
    torch.testing.assert_close(first[:, :9], second[:, :9])
    assert not torch.allclose(first[:, 9:], second[:, 9:])


def test_the_last_reviews_are_held_out_whole():
    lines, length = language.made_up(), 16
    data = language.texts("made up", length, CPU)
    parts = lines[:360], lines[360:380], lines[380:]
    for found, part in zip((data.train, data.validation, data.test), parts):
        text = bytes(found[:, :-1].flatten().tolist()) + bytes([int(found[-1, -1])])
        whole = b"".join(part)
        assert whole.startswith(text) and len(whole) - len(text) < length


def test_bits_per_byte_of_a_model_that_knows_nothing_are_eight():
    model = language.ByteModel(settings_of("linear")).eval()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    text = torch.randint(256, (5, 17), dtype=torch.uint8)
    assert language.bits(model, text, batch=2) == pytest.approx(8)  # a last batch of one


def test_the_full_scale_is_the_one_asked_for():
    full = language.study.scale("full")
    wanted = {"depth": 6, "dim": 256, "experts": 16, "hidden": 512, "k": 2, "length": 512}
    assert {name: full.settings[name] for name in wanted} == wanted
    assert full.seeds >= 5 and vision.study.scale("full").seeds >= 5
    assert vision.FULL["images"] == 5000 and vision.FULL["experts"] == 6 and vision.FULL["k"] == 1


@pytest.mark.parametrize("study", [language.study, vision.study], ids=lambda study: study.name)
def test_the_search_tries_each_rate_once_on_validation_and_never_tests(study, tmp_path):
    (draws,) = random_batches(study.search.space, study.search.seed, 3)
    assert {draw["lr"] for draw in draws} == set(study.search.space["lr"].values)
    found = study.run(running(study, "cosine", tmp_path, stage="tune"))
    assert [name for name, value in found.items() if value is not None] == [study.search.metric]


def test_a_missing_corpus_is_named_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setenv("MOIETY_DATA", str(tmp_path))
    with pytest.raises(MissingData, match=r"unsup40k.txt.xz is not here: put it into .*imdb-text"):
        language.reviews()


# -- kills -----------------------------------------------------------------------------------------


def killed(study, arm, folder, share, **words):
    """Run a trial to a share of it, kill it there, and go on in a new process's place."""

    def die(done):
        if done > share:
            raise KeyboardInterrupt

    first = running(study, arm, folder, **words)
    first.tick = die
    with pytest.raises(KeyboardInterrupt):
        study.run(first)
    assert first.checkpoint.exists()
    again = running(study, arm, folder, **words)
    return study.run(again), again.curve.rows()


@pytest.mark.parametrize(
    ("study", "arm"),
    [(study, arm) for study in (language.study, vision.study) for arm in study.arms],
    ids=lambda it: it if isinstance(it, str) else it.name,
)
def test_a_killed_trial_goes_on_to_the_same_bits(study, arm, tmp_path):
    words = {"steps": 60, "checks": 6} if study is language.study else {}
    whole = running(study, arm, tmp_path / "whole", **words)
    want = study.run(whole)
    found, rows = killed(study, arm, tmp_path / "killed", 0.55, **words)
    assert found == want and rows == whole.curve.rows()
    if study is language.study:
        assert want["spikes"] is not None and want["switch rate"] is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("arm", language.study.arms)
def test_a_killed_trial_on_a_gpu_goes_on_to_nearly_the_same(arm, tmp_path):
    words = {"steps": 60, "checks": 6, "device": torch.device("cuda")}
    want = language.run(running(language.study, arm, tmp_path / "whole", **words))
    found, _ = killed(language.study, arm, tmp_path / "killed", 0.55, **words)
    assert found[language.BITS] == pytest.approx(want[language.BITS], abs=0.02)
    assert found["switch rate"] == pytest.approx(want["switch rate"], abs=0.05)


# -- vision ----------------------------------------------------------------------------------------


def test_a_domain_has_equally_many_images_of_each_class_in_every_part():
    data = vision.domains("stand-ins", 100, CPU)
    assert data.keys() == set(vision.DOMAINS)
    for x, y in data.values():
        assert x.shape == (100, 16, 16)
        assert x.min() >= -vision.MEAN / vision.STD and x.max() <= (1 - vision.MEAN) / vision.STD
        for _, classes in vision.halves((x, y)):
            assert len(classes.bincount().unique()) == 1
    images = [{row.numpy().tobytes() for row in x} for x, _ in data.values()]
    assert not images[0] & images[1] and not images[1] & images[2] and not images[0] & images[2]


def test_by_turns_stops_with_the_rarest_class():
    classes = torch.cat([torch.arange(10).repeat(5), torch.zeros(30, dtype=torch.long)])
    rows = vision.by_turns(classes, 1000)
    assert classes[rows].tolist() == list(range(10)) * 5
    assert len(rows.unique()) == len(rows)


def test_a_batch_holds_as_many_images_of_each_domain():
    seen = []

    class Ear(nn.Module):
        def forward(self, x):
            seen.append(x.flatten().tolist())
            return torch.zeros(len(x), 10)

    training = [(torch.arange(n), torch.zeros(n, dtype=torch.long)) for n in (4, 10)]
    vision.loss_of(Ear(), training)(torch.tensor([3, 5, 9]))
    assert seen == [[3, 1, 1, 3, 5, 9]]


def test_the_domain_left_out_chooses_nothing(tmp_path, monkeypatch):
    data = dict(vision.domains("stand-ins", 100, CPU))

    def left_out(folder):
        run = running(vision.study, "cosine", tmp_path / folder, steps=40)
        return dict(vision.without("usps", run, vision.Parts(run.checkpoint), 0))

    honest = left_out("honest")
    x, y = data["usps"]
    wrong = {**data, "usps": (x, (y + 1) % 10)}  # images of every class called another
    monkeypatch.setattr(vision, "domains", lambda *_: wrong)
    planted = left_out("planted")
    assert honest.pop("accuracy") > 0.15 > planted.pop("accuracy")
    assert planted == honest


# -- the rule for tau ------------------------------------------------------------------------------


def result(low, words, switch):
    """A result: the lower ends of quality, the words on switching, and its rates."""
    claims = []
    for arm in language.RATIOS:
        quality = {"interval": [low[arm], 0.1], "word": "undecided"}
        claims.append({"a": arm, "b": "cosine", "metric": language.BITS, "verdict": quality})
        verdict = {"word": words[arm]}
        claims.append({"a": arm, "b": "cosine", "metric": "switch rate", "verdict": verdict})
    control = {"word": words["control"]}
    claims.append(
        {"a": "perturbed 1", "b": language.CONTROL, "metric": "switch rate", "verdict": control}
    )
    rates = {"cosine": 0.3, **switch}
    arms = [{"name": a, "metrics": {"switch rate": {"mean": r}}} for a, r in rates.items()]
    return {"claims": claims, "arms": arms}


ALL = dict.fromkeys(language.RATIOS, "holds") | {"control": "holds"}
FINE = dict.fromkeys(language.RATIOS, -0.005)
EVEN = dict.fromkeys(language.RATIOS, 0.1)


@pytest.mark.parametrize(
    ("change", "ratio"),
    [
        ({}, 0.01),  # all the same: the smallest
        ({"low": {"perturbed 0.01": -0.02}}, 0.1),  # may be worse by more than δ
        ({"words": {"perturbed 0.01": "undecided"}}, 0.1),  # not known to be steadier
        ({"switch": {"perturbed 1": 0.05}}, 1.0),  # more than a point steadier than the others
        ({"switch": {"perturbed 1": 0.095}}, 0.01),  # less than a point
        ({"switch": {"perturbed 1": 0.05}, "words": {"control": "negligible"}}, 0.01),  # scale
        ({"words": dict.fromkeys(language.RATIOS, "negligible")}, None),
        ({"low": dict.fromkeys(language.RATIOS, -0.011)}, None),
    ],
)
def test_the_default_tau_follows_the_rule(change, ratio):
    parts = {"low": FINE, "words": ALL, "switch": EVEN}
    made = result(**{name: {**part, **change.get(name, {})} for name, part in parts.items()})
    found = language.default_tau(made)
    assert found.ratio == ratio
    assert found.tau == pytest.approx(0.1 if ratio is None else ratio * GAIN)
    assert ("no evidence" in found.reason) == (ratio is None)


def test_one_seed_is_no_evidence_for_a_tau():
    made = copy.deepcopy(result(FINE, ALL, EVEN))
    for claim in made["claims"]:
        claim["verdict"]["interval"] = None
    assert language.default_tau(made).ratio is None


@pytest.mark.skipif(not RESULT.exists(), reason="cosine/language has no full result yet")
def test_the_router_and_the_guide_have_the_tau_that_the_rule_gives_for_the_committed_result():
    found = language.default_tau(json.loads(RESULT.read_text()))
    words = inspect.signature(PerturbedCosine).parameters
    assert words["tau_1"].default == words["tau_2"].default == pytest.approx(found.tau)
    guide = " ".join((ROOT / "docs" / "cosine.md").read_text().split())
    assert found.reason in guide and "results/cosine-language.json" in guide
