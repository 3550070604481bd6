"""Who runs a trial makes no difference to it; what a trial does wrong stays its own."""

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moiety import io
from moiety.lab.executors import InProcess, Job, Processes, local, run_job
from moiety.lab.store import Store, Trial

# Trials that forget to seed, that count their threads, that raise, and that kill their process.
STUDY = """
import os, random, signal, sys
import numpy as np
import torch
from moiety.lab.study import Metric, Scale, Study

def run(running):
    if running.arm == "raises":
        raise KeyError("no such thing")
    if running.arm == "leaves":
        raise SystemExit("bye")
    if running.arm == "gives":
        return eval(running.settings["gives"], {"torch": torch, "running": running})
    for step in range(3):  # no rewind: it has no checkpoints
        running.curve.append(step, drawn=torch.rand(()).item())
        if running.arm == "deadly" and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    running.tick(0.5)
    running.extra["process"] = os.getpid()
    running.extra["slow to import"] = "scipy" in sys.modules
    draws = {"torch": torch.rand(()).item(), "numpy": np.random.rand(), "random": random.random()}
    return {**draws, "threads": torch.get_num_threads()}

study = Study(
    name="tests/draws", title="Draws", question="What is drawn?", run=run,
    arms={arm: {} for arm in ("draws", "raises", "leaves", "gives", "deadly")},
    metrics={name: Metric(name) for name in ("torch", "numpy", "random", "threads")},
    scales={"smoke": Scale(seeds=2)},
)
"""


@pytest.fixture
def job(tmp_path):
    """Make jobs of the study above."""
    file = tmp_path / "draws.py"
    file.write_text(STUDY)

    def make(arm, seed=0, threads=1, **settings):
        return Job(str(file), [Trial("tests/draws", arm, seed, settings)], "cpu", threads)

    return make


def ended(executor, jobs, folder, tick=lambda trial, fraction: None):
    outcomes = list(executor.run(jobs, Store(folder), tick))
    assert len(outcomes) == len(jobs)
    return {(outcome.trial.arm, outcome.trial.seed): outcome for outcome in outcomes}


def curves(folder):
    return {path.name: path.read_bytes() for path in (folder / "curves").iterdir()}


def test_processes_give_the_bits_of_one_process_whatever_else_happens(job, tmp_path):
    good = [job("draws", seed) for seed in (0, 1, 2)]
    truth = ended(InProcess(), good, tmp_path / "truth")
    ticks = []
    jobs = [job("raises"), job("deadly"), *reversed(good)]
    found = ended(Processes(2), jobs, tmp_path / "found", lambda *seen: ticks.append(seen))
    for name, outcome in truth.items():
        assert found[name].metrics == outcome.metrics
        assert found[name].extra["process"] != os.getpid() == outcome.extra["process"]
        assert not found[name].extra["slow to import"]  # each worker would pay a second for it
    assert found["raises", 0].traceback.endswith("KeyError: 'no such thing'\n")
    assert "its process died 3 times (exit code -9)" in found["deadly", 0].traceback
    assert found["deadly", 0].metrics is None
    same = curves(tmp_path / "found")
    assert curves(tmp_path / "truth").items() <= same.items()
    assert ticks and all(part == 0.5 for _, part in ticks)


def test_the_global_generators_and_threads_are_the_trials_own_and_restored(job, tmp_path):
    threads = torch.get_num_threads()
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    found = ended(InProcess(), [job("draws", 0, 2), job("draws", 1, 1)], tmp_path)
    again = ended(InProcess(), [job("draws", 1)], tmp_path / "again")
    one, two = found["draws", 0].metrics, found["draws", 1].metrics
    assert one["threads"] == 2 and two["threads"] == 1
    assert again["draws", 1].metrics == two
    assert all(one[name] != two[name] for name in ("torch", "numpy", "random"))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all() and random.getstate() == states[2]


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        ("{'torch': 1}", "the trial gave no metric 'numpy'"),
        ("dict(torch=float('nan'), numpy=1, random=1, threads=1)", "metric 'torch' is nan"),
        ("dict(torch=torch.ones(1), numpy=1, random=1, threads=1)", "metric 'torch' is tensor"),
        ("dict(torch=1, numpy=1, random=1, threads=1, acc=2)", "the study has no metric 'acc'"),
        ("running.extra.update(x=1j) or dict(torch=1, numpy=1, random=1, threads=1)", "extra.x"),
        ("running.extra.update(loads=[1]) or dict(torch=1, numpy=1, random=1, threads=1)", "JSON"),
        ("running.extra.update(flops='x') or dict(torch=1, numpy=1, random=1, threads=1)", "flops"),
        ("1 / 0", "ZeroDivisionError"),
        ("None", "TypeError"),
    ],
)
def test_what_a_trial_gives_wrong_is_its_failure(job, tmp_path, gives, said):
    (outcome,) = ended(InProcess(), [job("gives", gives=gives)], tmp_path).values()
    assert outcome.metrics is None
    assert said in outcome.traceback.strip().splitlines()[-1]


def test_a_metric_may_be_missing_by_none_and_versions_are_kept(job, tmp_path):
    gives = "dict(torch=None, numpy=1, random=1, threads=1)"
    (outcome,) = ended(InProcess(), [job("gives", gives=gives)], tmp_path).values()
    assert outcome.traceback is None and outcome.metrics["torch"] is None
    assert outcome.versions["torch"] == torch.__version__
    assert {"python", "numpy", "moiety"} <= outcome.versions.keys()


def test_leaving_is_a_failure_and_an_interrupt_is_not(job, tmp_path):
    (outcome,) = ended(InProcess(), [job("leaves")], tmp_path).values()
    assert outcome.traceback.endswith("SystemExit: bye\n")
    store, interrupted = Store(tmp_path), job("draws")

    def interrupt(trial, fraction):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(interrupted, store.curve, store.checkpoint, interrupt)


def test_a_trial_that_starts_again_has_an_empty_curve(job, tmp_path):
    again = job("draws")
    store = Store(tmp_path)
    store.curve(again.trials[0]).append(7, drawn=0.0)
    assert ended(InProcess(), [again], tmp_path)["draws", 0].traceback is None
    assert [row["step"] for row in store.curve(again.trials[0]).rows()] == [0, 1, 2]


def test_a_study_file_that_changes_is_loaded_anew(job, tmp_path):
    file = tmp_path / "draws.py"
    ended(InProcess(), [job("draws")], tmp_path)
    file.write_text(STUDY.replace('torch.rand(()).item(), "numpy"', '7.0, "numpy"'))
    os.utime(file, (1, 1))
    assert ended(InProcess(), [job("draws", 5)], tmp_path)["draws", 5].metrics["torch"] == 7.0


def test_no_worker_is_refused():
    with pytest.raises(ValueError, match="at least one worker, not 0"):
        Processes(0)


# -- blocks ----------------------------------------------------------------------------------------

BLOCKS = """
from moiety.lab.study import Metric, Scale, Study

def run_block(runs):
    count = runs[0].settings.get("results", len(runs))
    return [{"size": len(runs) + run.seed / 10} for run in runs][:count]

study = Study(
    name="tests/blocks", title="Blocks", question="How large?", run_block=run_block, block=3,
    arms={"a": {}}, metrics={"size": Metric("Size")}, scales={"smoke": Scale(seeds=2)},
)
"""


def test_a_block_is_one_call_and_shares_its_time_and_its_errors(tmp_path):
    file = tmp_path / "blocks.py"
    file.write_text(BLOCKS)
    for results, good in ((3, True), (2, False)):
        trials = [Trial("tests/blocks", "a", seed, {"results": results}) for seed in range(3)]
        outcomes = list(InProcess().run([Job(str(file), trials, "cpu", 1)], Store(tmp_path), print))
        assert [outcome.trial for outcome in outcomes] == trials
        if good:
            assert [outcome.metrics["size"] for outcome in outcomes] == [3.0, 3.1, 3.2]
            assert len({outcome.duration for outcome in outcomes}) == 1
        else:
            assert all("2 results for 3 trials" in outcome.traceback for outcome in outcomes)


@pytest.mark.parametrize("saved", [True, False])
def test_one_checkpoint_of_a_block_keeps_the_curves_of_all(tmp_path, saved):
    file = tmp_path / "blocks.py"
    file.write_text(BLOCKS)
    trials, store = [Trial("tests/blocks", "a", seed, {}) for seed in range(3)], Store(tmp_path)
    for trial in trials:
        store.curve(trial).append(1, loss=0.5)
    if saved:
        store.checkpoint(trials[0]).save({"step": 1})
    list(InProcess().run([Job(str(file), trials, "cpu", 1)], store, print))
    assert [len(store.curve(trial).rows()) for trial in trials] == [int(saved)] * 3


def test_a_curve_that_is_damaged_is_the_failure_of_its_trial(job, tmp_path):
    damaged, store = job("draws"), Store(tmp_path)
    io.write_atomic(store.curve(damaged.trials[0]).path, "{]\n")
    (outcome,) = ended(InProcess(), [damaged], tmp_path).values()
    assert "is damaged" in outcome.traceback.splitlines()[-1]


def test_a_driver_waits_for_the_workers_of_one_that_was_killed(tmp_path):
    taken, leave, left = threading.Event(), threading.Event(), threading.Event()

    def work():
        with local._lock(tmp_path, shared=True):
            taken.set()
            leave.wait()
            left.set()

    threading.Thread(target=work).start()
    taken.wait()
    threading.Timer(0.2, leave.set).start()
    local.wait_for_workers(tmp_path)
    assert left.is_set()


POOL = """
import os, sys, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from moiety.lab.executors.local import die_with_parent

def work(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), die_with_parent) as pool:
        pool.submit(work, sys.argv[1]).result()
"""


def test_workers_of_a_pool_die_with_it_in_the_middle_of_their_work(tmp_path):
    (tmp_path / "pool.py").write_text(POOL)
    pool = subprocess.Popen([sys.executable, tmp_path / "pool.py", tmp_path / "worker"])
    found = ""
    while not found:
        assert pool.poll() is None
        time.sleep(0.1)
        found = (tmp_path / "worker").read_text() if (tmp_path / "worker").exists() else ""
    pool.kill()
    pool.wait()
    end = time.monotonic() + 30
    while is_alive(found) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_alive(found)


def is_alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2][0] != "Z"  # dead, and nobody has asked
