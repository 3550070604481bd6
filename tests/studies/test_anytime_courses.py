"""Programs that are kept: made once, found by every arm, study and process."""

import gzip
import json

import pytest
import torch

from moiety.studies.anytime import adaptive_wait, courses, engine, kept, mnist, replay, vision
from moiety.studies.anytime.statements import arm

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOIETY_COURSES", str(tmp_path))
    vision._course.cache_clear()
    return tmp_path


def settings(name, **words):
    return {**mnist.study.scale("smoke").settings, **mnist.study.arms[name], "kept": True, **words}


def test_a_value_is_made_once_and_is_the_same_from_disk(folder):
    made = []
    first = kept.kept("thing", {"a": 1}, lambda: made.append(1) or {"x": [0.1, None, 3]})
    assert kept.kept("thing", {"a": 1}, made.clear) == first == {"x": [0.1, None, 3]}
    kept.kept("thing", {"a": 2}, lambda: made.append(2))
    assert made == [1, 2]
    (one,) = {*folder.rglob("*.gz")} - {kept.place("thing", {"a": 2})}
    assert json.loads(gzip.decompress(one.read_bytes()))["words"] == {"a": 1}


def test_what_fails_is_not_kept(folder):
    with pytest.raises(ZeroDivisionError):
        kept.kept("thing", {}, lambda: 1 / 0)
    assert kept.kept("thing", {}, lambda: 5) == 5


def test_a_program_from_disk_is_the_one_that_ran(monkeypatch):
    own = settings(arm("SM", 4, 500), alone=True)
    monkeypatch.setattr(engine, "SAVE", -1.0)
    ran = vision.course_of(own, (0, 1), CPU)
    assert list(kept.folder().glob("course-*/kept.json.gz"))
    assert not list(kept.folder().glob("course-*/state"))  # of the way, which is over
    vision._course.cache_clear()
    monkeypatch.setattr(vision, "run_cell", None)
    again = vision.course_of(own, (0, 1), CPU)
    assert again == ran and again is not ran


def test_at_full_scale_every_arm_finds_its_program_among_the_jobs(monkeypatch):
    names = ("mnist", "adaptive-wait", "replay-mnist", "cifar", "replay-cifar")
    jobs = courses.all_jobs("full", *names)
    found = {(*vision.program_of(job.settings), job.seeds) for job in jobs if job.seed is None}
    asked = set()
    monkeypatch.setattr(vision, "_course", lambda *words: asked.add(words[:3]))
    for study, seeds in ((mnist.study, 10), (adaptive_wait.study, 10), (replay.study, 5)):
        for own in study.arms.values():
            words = {**study.scale("full").settings, **own, "scale": "full"}
            words = replay.of_set(words) if study is replay.study else words
            if "wait" in words:
                vision.course_of(words, tuple(range(seeds)), CPU)
                vision.ladder_of(words, tuple(range(seeds)), CPU)
    assert asked <= found
    assert sum(job.seed is not None for job in jobs) == 2 * 2 * 10  # policies, widths, seeds
    assert all(job.settings["kept"] for job in jobs)


def test_what_others_wait_for_begins_before_them():
    jobs = courses.all_jobs("full", "mnist", "adaptive-wait", "replay")
    after = [job.seed is not None or bool(job.settings.get("capped")) for job in jobs]
    assert after == sorted(after) and any(after)
    with pytest.raises(ValueError, match=r"there are no courses of 'language'"):
        courses.all_jobs("full", "language")


def test_more_seeds_are_further_programs():
    some, more = (courses.all_jobs("full", name) for name in ("cifar", "cifar:10"))
    assert {job.key for job in some} < {job.key for job in more} and len(more) == 2 * len(some)
    assert {job.seeds for job in more} == {(0, 1, 2, 3, 4), (5, 6, 7, 8, 9)}
