"""What a run is fixed to before its first result: seeds, and examples from a time budget."""

import dataclasses
import os

import pytest
from toy import study as toy

from moiety.lab import plan as planning
from moiety.lab.claims import greater
from moiety.lab.executors import Job, Processes
from moiety.lab.plan import (
    SAFETY,
    asked_by_pilot,
    check_pilot,
    estimate,
    fix_budget,
    fix_seeds,
    parse_time,
    seeds_from_pilot,
)
from moiety.lab.study import Speed

ARMS = {"narrow": {"width": 2}, "wide": {"width": 16}}
SPEEDS = {2: Speed(1e-4, 20.0, 0.1), 16: Speed(4e-4, 160.0, 0.2), 64: Speed(1e-3, 640.0, 0.0)}


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("1h30m", 5400), ("1.5m", 90)]
)
def test_a_time_is_read(text, seconds):
    assert parse_time(text) == seconds
    assert parse_time(seconds) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "-5m", "5d", "0s", 0, -1, float("inf")])
def test_a_time_that_is_none(text):
    with pytest.raises(ValueError, match=r"a time is written like|longer than nothing"):
        parse_time(text)


# -- budget ----------------------------------------------------------------------------------------


class Calls:
    """A study whose speed is known, and how often it was asked for it."""

    def __init__(self, **changes):
        self.asked = []
        self.study = dataclasses.replace(toy, speed=self.speed, **changes)

    def speed(self, settings, device):
        self.asked.append(settings["width"])
        return SPEEDS[settings["width"]]


class Known(Processes):
    """Asks the study in hand for its speed, which lies in no file."""

    def __init__(self, study, workers):
        super().__init__(workers)
        self.study = study

    def speeds(self, job, arms):
        return [self.study.speed(settings, job.device) for settings in arms]


def budgeted(study, plan=None, arms=ARMS, **words):
    plan = {"seeds": 5} if plan is None else plan
    executor = Known(study, words.pop("workers", 1))
    job = Job("known", [], words.pop("device", "cpu"), study.threads)
    words = {"seconds": 100.0, "equal": None, "executor": executor, "job": job, **words}
    fix_budget(plan, study, arms, **words)
    return plan


def planned_time(plan, arms=ARMS):
    return plan["seeds"] * sum(estimate(plan["budget"], arm) for arm in arms)


def examples(plan):
    return {arm: speed["examples"] for arm, speed in plan["budget"]["arms"].items()}


def test_equal_flops_is_the_default_and_fills_the_time():
    plan = budgeted(Calls().study)
    found = examples(plan)
    assert found["narrow"] == pytest.approx(8 * found["wide"], rel=1e-3)
    assert plan["budget"]["per_trial"] == pytest.approx(160 * found["wide"], rel=1e-3)
    assert planned_time(plan) == pytest.approx(100 * SAFETY, rel=1e-3)


def test_equal_examples_and_equal_time_fill_the_time_too():
    plan = budgeted(Calls().study, equal="examples")
    assert len(set(examples(plan).values())) == 1
    assert planned_time(plan) == pytest.approx(100 * SAFETY, rel=1e-3)
    plan = budgeted(Calls().study, equal="time")
    times = [estimate(plan["budget"], arm) for arm in ARMS]
    assert times == pytest.approx([100 * SAFETY / 10] * 2, rel=1e-3)


def test_arms_of_equal_flops_get_equal_examples():
    study = dataclasses.replace(toy, speed=lambda settings, device: Speed(1e-4, 20.0))
    assert len(set(examples(budgeted(study)).values())) == 1


def test_workers_make_more_time_as_far_as_cores_and_rounds_go(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    one = planned_time(budgeted(Calls().study))
    assert planned_time(budgeted(Calls().study, workers=2)) == pytest.approx(2 * one, rel=1e-3)
    # Ten trials on four workers take three rounds; eight workers on four cores are four.
    four = planned_time(budgeted(Calls().study, workers=4))
    assert four == pytest.approx(10 / 3 * one, rel=1e-3)
    assert planned_time(budgeted(Calls().study, workers=8)) == pytest.approx(four, rel=1e-3)
    two_threads = Calls(threads=2).study
    assert planned_time(budgeted(two_threads, workers=4)) == pytest.approx(2 * one, rel=1e-3)


def test_a_search_shares_the_time():
    plan = budgeted(Calls().study, tune=15)
    assert planned_time(plan) == pytest.approx(25 * SAFETY, rel=1e-3)


def test_the_stored_budget_is_used_again_with_more_seeds_and_arms():
    calls = Calls()
    plan = budgeted(calls.study)
    before = examples(plan)
    plan["seeds"] = 50
    more = {**ARMS, "widest": {"width": 64}}
    budgeted(calls.study, plan, more, seconds=None)
    assert examples(plan) == {**before, "widest": before["wide"] // 4}
    assert calls.asked == [2, 16, 64]  # each once
    budgeted(calls.study, plan, {**ARMS, "wide": {"width": 64}}, seconds=100.0, equal="flops")
    assert examples(plan)["wide"] == before["wide"] // 4  # its settings changed
    assert examples(plan)["narrow"] == before["narrow"]


@pytest.mark.parametrize("other", [{"seconds": 50.0}, {"equal": "time"}, {"device": "cuda"}])
def test_another_budget_than_the_stored_one_is_refused(other):
    plan = budgeted(Calls().study)
    with pytest.raises(ValueError, match="was calibrated with"):
        budgeted(Calls().study, plan, **other)


def test_a_budget_that_cannot_be_kept_is_refused():
    with pytest.raises(ValueError, match="leave no time to train arm"):
        budgeted(Calls().study, seconds=1.0)
    with pytest.raises(ValueError, match="leave no time to train arm"):
        budgeted(Calls().study, seconds=1.0, equal="time")
    with pytest.raises(ValueError, match="equal in flops, examples, time, not 'steps'"):
        budgeted(Calls().study, equal="steps")
    with pytest.raises(ValueError, match="has no `speed`"):
        budgeted(dataclasses.replace(toy, speed=None))
    broken = dataclasses.replace(toy, speed=lambda settings, device: Speed(0.0, 1.0))
    with pytest.raises(ValueError, match="arm 'narrow': `speed` gave"):
        budgeted(broken)


def test_without_a_budget_nothing_is_measured():
    calls = Calls()
    assert budgeted(calls.study, seconds=None)["budget"] is None
    assert calls.asked == []


# -- seeds -----------------------------------------------------------------------------------------


def test_seeds_are_given_or_stored_or_the_scales():
    plan = {}
    fix_seeds(plan, [], None, 5)
    assert plan == {"seeds": 5, "from": "scale"}
    fix_seeds(plan, [], 5, 5)
    assert plan["from"] == "scale"  # the same number changes nothing
    fix_seeds(plan, [], 8, 5)
    assert plan == {"seeds": 8, "from": "given"}
    fix_seeds(plan, [], None, 5)
    assert plan["seeds"] == 8
    fix_seeds(plan, [], 3, 5)  # nobody has looked
    assert plan["seeds"] == 3
    with pytest.raises(ValueError, match="2 seeds are too few: verdicts on 3 have been seen"):
        fix_seeds(plan, [{"seeds": 3}], 2, 5)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        fix_seeds({}, [], 0, 5)


def pilot_records(spread):
    seeds = enumerate([-spread, 0.0, spread, 0.0])
    noise = {1_000_000 + i: value for i, value in seeds}
    return [
        {"arm": arm, "seed": seed, "metrics": {"error": 0.5 + value * (arm == "wide")}}
        for arm in ("wide", "narrow")
        for seed, value in noise.items()
    ]


def test_a_pilot_asks_for_more_seeds_where_the_spread_is_larger():
    few = seeds_from_pilot(toy, pilot_records(0.01), 4, family=1)
    many = seeds_from_pilot(toy, pilot_records(0.2), 4, family=1)
    assert few["from"] == "pilot" and few["pilot"]["seeds"] == 4
    assert 5 <= few["seeds"] < many["seeds"]
    (needed,) = many["pilot"]["needed"]
    assert needed["seeds"] == many["seeds"] and needed["margin"] == toy.claims[0].margin


def test_the_hungriest_claim_decides_and_all_share_the_correction():
    words = {"metric": "error", "quote": "q", "reason": "r", "tier": "our own"}
    both = [*toy.claims, greater("wide", "narrow", margin=0.1, **words)]
    study = dataclasses.replace(toy, claims=both)
    plan = seeds_from_pilot(study, pilot_records(0.2), 4, family=2)
    alone = dataclasses.replace(toy, claims=both[1:])
    alone = seeds_from_pilot(alone, pilot_records(0.2), 4, family=1)
    needed = [entry["seeds"] for entry in plan["pilot"]["needed"]]
    assert plan["seeds"] == max(needed) == needed[1] > alone["seeds"] > needed[0]


def test_a_pilot_that_asks_for_more_than_there_is_time_for():
    all_of_them = seeds_from_pilot(toy, pilot_records(0.2), 4, family=1)
    few = seeds_from_pilot(toy, pilot_records(0.2), 4, family=1, most=6)
    assert few["seeds"] == 6 < asked_by_pilot(few) == all_of_them["seeds"]
    with pytest.raises(ValueError, match=r"would not decide .* smallest effect, or --most seeds"):
        seeds_from_pilot(toy, pilot_records(50.0), 4, family=1)
    hopeless = seeds_from_pilot(toy, pilot_records(50.0), 4, family=1, most=6)
    assert hopeless["seeds"] == 6 and asked_by_pilot(hopeless) is None
    assert asked_by_pilot({"seeds": 5, "from": "scale"}) is None


def test_a_pilot_leaves_out_seeds_without_a_value():
    records = pilot_records(0.2)
    records[0]["metrics"]["error"] = None
    assert seeds_from_pilot(toy, records, 4, family=1)["seeds"] >= 5
    for record in records[1:3]:
        record["metrics"]["error"] = None
    with pytest.raises(ValueError, match="gave 1 pairs of 'error' for wide and narrow"):
        seeds_from_pilot(toy, records, 4, family=1)


def test_a_pilot_that_plans_nothing_is_refused():
    with pytest.raises(ValueError, match="not both"):
        check_pilot(toy, [], 3, 5)
    with pytest.raises(ValueError, match="at least 2 seeds"):
        check_pilot(toy, [], 1, None)
    with pytest.raises(ValueError, match="has no claims"):
        check_pilot(dataclasses.replace(toy, claims=[]), [], 3, None)
    with pytest.raises(ValueError, match="comes too late"):
        check_pilot(toy, [{"seeds": 5}], 3, None)
    with pytest.raises(ValueError, match="no claim is about two"):
        seeds_from_pilot(toy, pilot_records(0.1)[:4], 4, family=1)
    assert planning.PILOT_SEED == 1_000_000
