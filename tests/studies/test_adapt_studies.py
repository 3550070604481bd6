"""The studies of adaptation: which arms there are, what they share, what is asked of them."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from moiety.lab import loading
from moiety.lab.statistics import t_interval
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running
from moiety.lab.tuning import FIRST_SEED, Tuner
from moiety.studies.adapt import pool, preparing, projection, scales, statements, tables, tunes
from moiety.studies.adapt.targets import TARGETS, Target

NAMES = ["images", "text", "low-resource", "ablation", "rounds", "gap", "steps", "weight"]
NAMES = [f"adapt/{name}" for name in (*NAMES, "ablation-text", "moe", "supcon")]
SELF = [  # one and the same, in the words of each study
    ("adapt/ablation", "fashion-mnist / self-distillation"),
    ("adapt/steps", "fashion-mnist / self-distillation, once"),
    ("adapt/weight", "fashion-mnist / weight 1"),
]

load_study = functools.cache(loading.load_study)  # which looks through all studies there are


def trial(name, arm, folder, seed=0, **settings):
    """A trial of a study at its smallest scale."""
    study = load_study(name)
    own = {**study.scale("smoke").settings, "lr": 1e-3, "longer": 1, **study.arms[arm], **settings}
    one, store = Trial(name, arm, seed, own), Store(folder)
    cpu = torch.device("cpu")
    return Running(one, cpu, store.curve(one), store.checkpoint(one), lambda share: None)


def full(name, arm):
    """The settings of an arm at full scale."""
    study = load_study(name)
    return {**study.scale("full").settings, "lr": 1e-3, "longer": 1, **study.arms[arm]}


# -- runs ----------------------------------------------------------------------------------------


def test_studies_read_the_same_runs(tmp_path, monkeypatch):
    first, *others = (trial(name, arm, tmp_path) for name, arm in SELF)
    found = tables.run_block([first])[0]
    assert found.keys() == tables.METRICS.keys()
    monkeypatch.setattr(tunes, "finetune", None)  # nothing trains again
    for name in ("self_distill", "further_pretrain"):
        monkeypatch.setattr(pool, name, None)
    assert all(tables.run_block([one])[0] == found for one in others)
    assert [row["step"] for row in first.curve.rows()] == [1, 2]


def test_they_do_so_at_full_scale():
    asked = [full(name, arm) for name, arm in SELF]
    assert len({str((pool.plan_of(one), tunes.tune_of(one), one["target"])) for one in asked}) == 1
    for name in ("adapt/images", "adapt/gap"):  # and the same sets in two studies
        _, fashion, *_ = pool.each_of(full(name, "self-distillation"))
        assert fashion["target"] == "fashion-mnist"
        assert pool.plan_of(fashion) == pool.plan_of(asked[0])
    rounds = [full("adapt/rounds", f"fashion-mnist / round {t}") for t in (0, 1)]
    plan = pool.plan_of(asked[0])
    assert [pool.plan_of(one) for one in rounds] == [plan["teacher"], plan]
    # Where weights and losses are compared, fine-tunes are alike in two studies.
    assert tunes.tune_of(fashion) == tunes.tune_of(rounds[1])


@pytest.mark.parametrize("name", ["adapt/gap", "adapt/rounds"])
def test_weights_and_losses_are_compared_after_one_fine_tune_for_all(name):
    study = load_study(name)
    assert study.search is None
    assert len({str(tunes.tune_of(pool.each_of(full(name, arm))[0])) for arm in study.arms}) == 1
    assert all((arm["lr"], arm["longer"]) == (5e-4, 2) for arm in study.arms.values())
    said = [*study.deviations, *study.notes]
    assert statements.ALIKE_TUNED in said
    assert statements.CHOSEN not in said and statements.SEARCHING not in said


def test_what_is_kept_of_another_cut_of_a_set_is_not_read(tmp_path, monkeypatch):
    settings = trial("adapt/ablation", "fashion-mnist / self-distillation", tmp_path).settings
    case, plan = pool.case_of(settings, 0, torch.device("cpu")), pool.plan_of(settings)
    before = case.home(plan)
    monkeypatch.setitem(TARGETS, case.target, replace(TARGETS[case.target], only="1"))
    assert case.home(plan) != before


def test_a_search_reads_seed_0_and_no_test(tmp_path, monkeypatch):
    monkeypatch.setattr(Target, "test", None)
    for arm in ("fine-tuning", "further pre-training"):
        one = trial("adapt/images", arm, tmp_path, seed=FIRST_SEED, stage="tune")
        found = tables.run_block([one])[0]
        assert found.keys() == load_study("adapt/images").metrics.keys()
        assert [name for name, value in found.items() if value is not None] == ["validation score"]


def test_several_sets_have_the_mean_of_their_numbers(tmp_path, monkeypatch):
    told = {"usps": 0.5, "omniglot": 0.7}
    words = dict.fromkeys(tables.METRICS, 0.0)
    monkeypatch.setattr(
        tables, "run_set", lambda runs, number, _: [{**words, "score": [*told.values()][number]}]
    )
    one = trial("adapt/gap", "self-distillation", tmp_path, target=["usps", "omniglot"])
    found = tables.run_block([one])[0]
    assert found["score"] == pytest.approx(0.6)
    assert (found["score, usps"], found["score, omniglot"]) == (0.5, 0.7)


def test_a_seed_is_a_new_source_split_and_part(tmp_path):
    arm, words = "fashion-mnist / fine-tuning", {"target": "usps", "copies": 2}
    runs = [trial("adapt/steps", arm, tmp_path, seed=seed, **words) for seed in (0, 1)]
    cases = [pool.case_of(one.settings, one.seed, one.device) for one in runs]
    assert cases[0].source.path != cases[1].source.path
    labels = [one.open().labelled(one.seed).inputs for one in cases]
    assert not torch.equal(*labels)
    found = tables.run_block(runs)
    tune = tunes.tune_of(runs[0].settings)
    tuned = tunes.tuned([tunes.Asked(case, None, tune, 0, test=True) for case in cases])
    for part, (metrics, one) in enumerate(zip(found, tuned)):
        moved = {}  # by what part s of the test does to both seeds
        for of in ("accuracy", "loss"):
            each = [tunes.on_part(other, of, part) - other["test"][of] for other in tuned]
            moved[of] = sum(each) / 2
        assert metrics["judged score"] == pytest.approx(one["test"]["accuracy"] + moved["accuracy"])
        assert metrics["score"] == one["test"]["accuracy"]
        assert metrics["gap"] == pytest.approx(one["test"]["loss"] - one["train"]["loss"])
        assert metrics["judged test loss"] == pytest.approx(one["test"]["loss"] + moved["loss"])
        assert metrics["judged gap"] == pytest.approx(metrics["gap"] + moved["loss"])


def test_judged_scores_by_hand():
    parts = [[0.5, 0.7, 0.9], [0.2, 0.4, 0.6], [0.8, 0.7, 0.6]]  # of three seeds
    whole = [0.7, 0.4, 0.7]
    # On the mean of the seeds the parts are at 0.5, 0.6 and 0.7, the whole is at 0.6.
    assert tables.judged(whole, parts) == pytest.approx([0.6, 0.4, 0.8])


@pytest.mark.parametrize(
    "spreads", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 0.5, 3)], ids=str
)
def test_intervals_of_judged_scores_hold(spreads):
    """Simulated: seeds and parts that differ, and a rest; the true mean is 0."""
    draw, seeds, times = np.random.default_rng(0), 8, 1500
    shapes = ((seeds, 1), (1, seeds), (seeds, seeds))
    inside, wide, alone = 0, [], []
    for _ in range(times):
        terms = [spread * draw.standard_normal(shape) for spread, shape in zip(spreads, shapes)]
        table = sum(terms)
        low, high = t_interval(tables.judged(table.mean(1).tolist(), table.tolist()))
        inside += low <= 0 <= high
        wide.append(high - low)
        alone.append(np.subtract(*t_interval(np.diag(table).tolist())[::-1]))
    assert inside / times > 0.935  # 95 %, less two and a half standard errors
    assert np.mean(wide) <= np.mean(alone) * 1.01  # never wider than each on its own part


def test_nested_fine_tunes_are_averaged(tmp_path):
    one = trial("adapt/steps", "fashion-mnist / fine-tuning", tmp_path, tunes=2)
    case, tune = pool.case_of(one.settings, 0, one.device), tunes.tune_of(one.settings)
    asked = [tunes.Asked(case, None, tune, number, test=True) for number in range(2)]
    both = [found["test"]["loss"] for found in tunes.tuned(asked)]
    assert both[0] != both[1]
    assert tables.run_block([one])[0]["test loss"] == pytest.approx(sum(both) / 2)


# -- arms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_arms_really_differ(name):
    study = load_study(name)
    asked = {
        str(
            [
                pool.plan_of(pool.each_of(full(name, arm))[0]),
                tunes.tune_of(pool.each_of(full(name, arm))[0]),
                [settings.get(word) for word in ("target", "labels", "experts")],
            ]
        )
        for arm, settings in study.arms.items()
    }
    assert len(asked) == len(study.arms)


def test_the_variants_of_the_ablation_are_those_of_the_table():
    plans = {
        arm.removeprefix("fashion-mnist / "): pool.plan_of(full("adapt/ablation", arm))
        for arm in load_study("adapt/ablation").arms
    }
    whole = plans["self-distillation"]
    assert plans["without L_MAE"] == {**whole, "mae_weight": 0.0}
    assert plans["further pre-training"] == whole["teacher"]
    assert plans["further pre-training, twice"]["steps"] == 2 * whole["steps"]
    assert plans["prediction matching"] == {**whole, "match": "prediction"}
    assert plans["weight matching, l2"] == {**whole, "match": "weights"}
    assert plans["weight matching, MARS"] == {**whole, "match": "weights", "norm": "mars"}
    assert plans["every 4 steps"] == {**whole, "distill_every": 4}


def test_a_round_has_the_student_of_the_one_before_as_teacher():
    plans = [pool.plan_of(full("adapt/rounds", f"fashion-mnist / round {t}")) for t in range(4)]
    assert all(later["teacher"] == before for before, later in itertools.pairwise(plans))


# -- the search ----------------------------------------------------------------------------------


def test_every_arm_has_the_same_search(tmp_path):
    study, draws = load_study("adapt/images"), {}

    def make(arm, seed, tuned):
        draws.setdefault(arm, []).append(tuned)
        return Trial(study.name, arm, seed, tuned)

    Tuner(study, scale="full", make=make).next(Store(tmp_path))
    shared = [[(one["lr"], one["longer"]) for one in each] for each in draws.values()]
    assert len(draws) == 6 and all(each == shared[0] for each in shared)
    assert len(shared[0]) == 8
    low, high = scales.RATES["image"].low, scales.RATES["image"].high
    ends = [low * (high / low) ** (i / 4) for i in range(5)]
    places = Counter(
        (sum(lr >= end for end in ends), longer) for lr, longer in shared[0]
    )  # one rate in each quarter, for each length
    assert places == Counter(itertools.product(range(1, 5), (1, 2)))
    assert draws["MARS"][0].keys() - {"lr", "longer"} == {"radius"}
    rates = [one["lr"] * one["strength"] for one in draws["RecAdam"]]
    assert max(rates) <= 1  # more is refused


# -- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_claims_have_their_place_and_are_judged_with_the_error_of_the_test(name):
    study = load_study(name)
    assert study.paper == load_study("adapt/theory").paper
    for claim in study.claims:
        assert claim.mark.startswith("3 §") == (claim.tier == "proxy")
        assert claim.metric.startswith("judged") or claim.metric == "log distance"
        assert claim.a.split(" / ")[:-1] == claim.b.split(" / ")[:-1]  # of one set
        assert {claim.a, claim.b} <= study.arms.keys()


def test_a_statement_is_asked_once():
    asked = [load_study(name).claims for name in NAMES]
    quotes = [(claim.mark, claim.quote) for claims in asked for claim in claims]
    assert len(quotes) == len(set(quotes)) == 41  # as the notes say


def test_every_table_of_the_digest_is_asked():
    marks = {claim.mark for name in NAMES for claim in load_study(name).claims if claim.mark}
    sections = {mark.removeprefix("3 §") for mark in marks}
    wanted = {"5.3", "5.4", "5.5", "5.6", "5.7 Table 5", "5.7 Table 6", "1, §5.3"}
    wanted |= {f"5.8 Fig. {figure}" for figure in ("1", "3", "4", "5a", "5b", "5c")}
    assert sections == wanted


# -- what it takes -------------------------------------------------------------------------------


def test_what_studies_share_is_counted_once(monkeypatch):
    whole = projection.count("full", "image")
    monkeypatch.setitem(projection.BATCHES, "image", ["images"])
    alone = projection.count("full", "image")
    monkeypatch.setitem(projection.BATCHES, "image", ["gap", "images", "gap"])
    both = projection.count("full", "image")
    assert alone["further"] == alone["distil"] == 4 * 8 * 600  # sets, seeds, steps
    # Points and seeds, one of two lengths on the mean; Omniglot is tuned twice as long.
    assert alone["tune mars"] == (3 + 2) * (8 + 8) * 1.5 * 250
    assert alone["tune plain"] == 3 * alone["tune mars"] < whole["tune plain"]
    # What gap has besides: two arms of five seeds, fine-tuned as the paper does, without a search.
    assert both - alone == Counter({"tune plain": 2 * (3 + 2) * 5 * 2 * 250})


@pytest.mark.parametrize("name", NAMES)
def test_a_study_of_images_does_not_change_with_the_settings_of_texts(name):
    text = name in ("adapt/text", "adapt/ablation-text", "adapt/moe")
    for scale in load_study(name).scales.values():
        assert ("text" in scale.settings, "image" in scale.settings) == (text, not text)


def test_the_docs_have_the_counts_of_today():
    for kind in projection.BATCHES:
        found = projection.count("full", kind)
        for step in ("further", "distil"):
            assert f"{round(found[step] / 1000)}k {step}" in projection.__doc__


def test_steps_are_measured(monkeypatch):
    monkeypatch.setattr(projection, "STEPS", 2)
    found = projection.measure("smoke", "cpu", "image", ["further", "tune plain of a mixture"])
    assert all(0 <= seconds < 1 for seconds in found.values()) and len(found) == 2


def test_encoders_are_prepared_teachers_first_and_each_once():
    asked = preparing.encoders("full", projection.BATCHES["image"])
    plans = [pool.plan_of(settings) for settings, _ in asked]
    depths = [preparing.depth(plan) for plan in plans]
    assert depths == sorted(depths) and depths[0] == 1 and depths[-1] == 4
    counted, steps = projection.count("full", "image"), Counter()
    for plan, (_, seeds) in zip(plans, asked):
        steps[plan["stage"]] += len(seeds) * plan["steps"]
    assert steps["supcon"] == counted["supcon"]
    assert steps["distil"] == sum(counted[step] for step in ("distil", "prediction", "weights"))


def test_as_many_seeds_are_prepared_as_the_study_with_most_asks_for():
    for names in (["images", "gap"], ["gap", "images"]):
        assert all(seeds == list(range(8)) for _, seeds in preparing.encoders("full", names))
    assert all(seeds == list(range(5)) for _, seeds in preparing.encoders("full", ["gap"]))


def test_encoders_of_some_studies_are_prepared_alone():
    some, all_of = (
        len(preparing.encoders("full", names)) for names in (["gap"], ["gap", "rounds"])
    )
    assert (some, all_of) == (8, 10)  # two of each of four sets; rounds 2 and 3 of one of them
    with pytest.raises(SystemExit, match="no study adapt/gaps that needs encoders"):
        preparing.main("smoke", "cpu", "1", "gaps")


def test_what_was_prepared_is_what_a_study_reads(tmp_path, monkeypatch):
    settings = trial(
        "adapt/steps", "fashion-mnist / further pre-training, twice", tmp_path
    ).settings
    preparing._encoders((dict(settings), [0, 1], "cpu"))
    monkeypatch.setattr(pool, "further_pretrain", None)  # nothing trains again
    arm, words = "fashion-mnist / further pre-training, twice", {"copies": 2}
    runs = [trial("adapt/ablation", arm, tmp_path, seed=seed, **words) for seed in (0, 1, 2)]
    *found, unasked = tables.run_block(runs)
    assert all(one["score"] is not None for one in found)
    assert unasked.keys() == found[0].keys() and set(unasked.values()) == {None}


def test_a_block_runs_whole_or_is_found_whole(tmp_path, monkeypatch):
    arm, words = "fashion-mnist / fine-tuning", {"target": "usps", "copies": 3, "lr": 2e-3}
    runs = [trial("adapt/steps", arm, tmp_path, seed=seed, **words) for seed in range(3)]
    whole = tables.run_block(runs)
    cases = [pool.case_of(one.settings, one.seed, one.device) for one in runs]
    tune = tunes.tune_of(runs[0].settings)
    paths = [tunes.Asked(case, None, tune, 0, test=True).path() for case in cases]
    paths[1].unlink()
    before = paths[0].stat().st_mtime_ns
    assert tables.run_block(runs) == whole  # with dropout, which is drawn for all at once
    assert paths[0].stat().st_mtime_ns == before
    monkeypatch.setattr(tunes, "finetune", None)
    assert tables.run_block(runs) == whole


def test_an_encoder_that_diverges_fails_alone(tmp_path, monkeypatch):
    arm, words = "fashion-mnist / further pre-training, twice", {"target": "usps", "copies": 3}
    runs = [trial("adapt/steps", arm, tmp_path, seed=seed, **words) for seed in range(3)]
    usual = pool.further_pretrain

    def further(*args, seed, **more):
        return usual(*args, **{**more, "seed": seed, "lr": 1e30 if seed == 1 else more["lr"]})

    monkeypatch.setattr(pool, "further_pretrain", further)
    monkeypatch.setattr(pool, "RECIPE", -1)  # apart from those of other tests
    found = tables.run_block(runs)
    assert found[1] == {} and found[0]["score"] is not None is not found[2]["score"]


@pytest.mark.parametrize("name", NAMES)
def test_no_more_seeds_are_trained_than_are_asked_for(name):
    study = load_study(name)
    for scale in study.scales.values():
        assert scale.seeds == scale.settings.get("copies", study.block)


def test_models_train_alone_where_the_scale_says_so(tmp_path, monkeypatch):
    def refuse(calls):
        raise AssertionError("one program for all")

    monkeypatch.setattr(pool, "together", refuse)
    arm, words = "fashion-mnist / self-distillation, once", {"copies": 2, "lr": 3e-3}
    runs = [trial("adapt/steps", arm, tmp_path, seed=s, **words) for s in (0, 1)]
    with pytest.raises(AssertionError, match="one program"):
        tables.run_block(runs)
    alone = [trial("adapt/steps", arm, tmp_path, seed=s, crew=False, **words) for s in (0, 1)]
    assert all(one["score"] is not None for one in tables.run_block(alone))


def test_a_point_of_the_search_that_diverges_is_the_only_one_that_fails(tmp_path):
    words = {"stage": "tune", "target": "usps"}
    runs = [
        trial(
            "adapt/steps",
            "fashion-mnist / fine-tuning",
            tmp_path,
            seed=FIRST_SEED + i,
            lr=lr,
            **words,
        )
        for i, lr in enumerate((1e-3, 1e30, 1e-4))
    ]
    one, lost, other = tables.run_block(runs)
    assert lost == {} and one["validation score"] is not None is not other["validation score"]
