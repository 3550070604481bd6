"""`anytime/replay`: which arms there are, and what equal steps are."""

import pytest
import torch
from test_lab_studies import running

from moiety.studies.anytime import replay, vision
from moiety.studies.anytime.replay import GAIN, study

CPU = torch.device("cpu")


def block(name, folder):
    return [running(study, name, folder, seed, scale="smoke") for seed in range(2)]


def test_replay_has_no_limit_at_the_longer_waiting_times_only():
    names = [f"MNIST SM c=64 w={w} r=1" for w in (1, 5, 10, 50, 100, 500)]
    assert [name in study.arms for name in names] == [False] * 3 + [True] * 3
    assert all(f"{name}, equal steps" in study.arms for name in names)
    names = [f"CIFAR Ens c=32 w={w} r=0.2" for w in (2, 10, 50, 100)]
    assert [name in study.arms for name in names] == [False] + [True] * 3


def test_an_arm_has_the_settings_of_its_set():
    arm = {**study.arms["CIFAR gEns c=32 w=10 r=1"], "scale": "full"}
    settings = replay.of_set(arm)
    assert (settings["model"], settings["width"], settings["batches"]) == ("vgg", 32, 100)
    assert settings["replay"] == "1" and settings["learner"] == "growing-ensemble"


def test_equal_steps_are_those_without_replay_and_the_gain_is_against_it(tmp_path):
    name = "MNIST Ens c=64 w=50"
    plain, more, equal = (
        replay.run_block(block(f"{name} r={r}", tmp_path / r)) for r in ("0", "1", "1, equal steps")
    )
    for i in range(2):
        assert plain[i]["steps"] == equal[i]["steps"] and plain[i][GAIN] == 0
        saved = plain[i]["average error"] - more[i]["average error"]
        assert more[i][GAIN] == pytest.approx(saved)
    # A second phase on twice the rows; at 27 of them and batches of 128 a step is an epoch.
    assert equal[0]["compute"] > plain[0]["compute"]


def test_without_replay_a_course_is_shared():
    arm = {**study.arms["MNIST SM c=64 w=50 r=0"], "scale": "smoke"}
    capped = {**study.arms["MNIST SM c=64 w=50 r=1, equal steps"], "scale": "smoke"}
    plain = vision.course_of(replay.of_set(arm), (0, 1), CPU)
    course = vision.course_of(replay.of_set(capped), (0, 1), CPU)
    # Of each seed the members, but not the growing ensemble, which has no arm of equal steps.
    assert course.checks == [own[:3] + own[4:7] for own in plain.checks]
    assert course.lines.keys() == {"single", "ensemble"}


def test_one_phase_has_nothing_to_replay():
    names = [f"CIFAR SM c=32 w=100 r={r}" for r in ("0", "1", "0.2, equal steps")]
    arms = [{**study.arms[name], "scale": "full"} for name in names]
    assert len({vision.program_of(replay.of_set(arm)) for arm in arms}) == 1
