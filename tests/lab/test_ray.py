"""Trials on a Ray cluster: the same bits as in one process, whoever is killed meanwhile."""

import contextlib
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from moiety import io
from moiety.lab.executors import InProcess, Job, versions
from moiety.lab.executors import ray as on_ray
from moiety.lab.executors.ray import RayExecutor
from moiety.lab.executors.ray_worker import Checkpoint, Curve, Worker
from moiety.lab.store import Store, Trial

SOURCE = Path(__file__).parents[2] / "src"
# Not `importorskip`: how quiet Ray is, is decided when it is first imported.
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='there is no Ray: pip install "moiety[ray]"'
)

# -- the study that is run, and the programs that are killed ---------------------------------------

# A walk whose every step needs the one before. WATCH is a folder outside of the store, in which
# each attempt says its process and its first step; `pace` there is the seconds of a step.
STUDY = """
import os, time
from pathlib import Path
import torch
from moiety.lab.study import Metric, Scale, Study

WATCH = Path({watch!r})

def walk(running):
    if running.arm == "broken":
        raise KeyError("no such thing")
    generator, where, begin = torch.Generator().manual_seed(running.seed), torch.zeros(64), 1
    if running.arm == "saved":
        if state := running.checkpoint.load():
            where, begin = state["where"], state["step"] + 1
            generator.set_state(state["generator"])
        running.curve.rewind(begin - 1)
    mark = WATCH / f"{{running.arm}}-{{running.seed}}"
    with open(mark, "a") as file:
        file.write(f"{{os.getpid()}} {{begin}}\\n")
    for step in range(begin, running.settings["steps"] + 1):
        where = torch.tanh(where + torch.randn(64, generator=generator))
        time.sleep(float((WATCH / "pace").read_text()))
        running.curve.append(0 if running.arm == "backwards" else step, where=where.sum().item())
        running.tick(step / running.settings["steps"])
        if step % 5 == 0 and running.arm == "saved":
            state = {{"step": step, "where": where, "generator": generator.get_state()}}
            running.checkpoint.save(state)
        if running.arm == "deadly":
            os.kill(os.getpid(), 9)
    running.extra["process"] = os.getpid()
    return {{"where": where.sum().item()}}

study = Study(
    name="tests/walk", title="Walks", question="Where does a walk end?", run=walk,
    arms={{"saved": {{}}, "plain": {{}}}}, metrics={{"where": Metric("Where")}},
    scales={{"small": Scale(seeds=10, settings={{"steps": {steps}}})}},
)
"""
# A driver to be killed: the real one.
DRIVER = "import sys; from moiety.lab.driver import run_study\nrun_study({!r}, out={!r}, ray={!r})"


class Walks:
    """The study in a folder of its own, and what its attempts said."""

    def __init__(self, folder, steps):
        self.folder, self.watch, self.steps = folder, folder / "watch", steps
        self.watch.mkdir()
        self.file = folder / "walks.py"
        self.file.write_text(STUDY.format(watch=str(self.watch), steps=steps))

    def set_pace(self, seconds):
        io.write_atomic(self.watch / "pace", str(seconds))

    def jobs(self, *names):
        """Jobs of trials named such as `saved-0`."""
        pairs = [name.split("-") for name in names]
        trials = [Trial("tests/walk", arm, int(seed), {"steps": self.steps}) for arm, seed in pairs]
        return [Job(str(self.file), [trial], "cpu", 1) for trial in trials]

    def run(self, executor, jobs, folder, pace, tick=lambda trial, fraction: None):
        """Run jobs as the driver does; give the outcomes by the arm and the seed."""
        self.set_pace(pace)
        store, outcomes = Store(self.folder / folder), {}
        for outcome in executor.run(jobs, store, tick):
            outcomes[f"{outcome.trial.arm}-{outcome.trial.seed}"] = outcome
            assert outcome.trial.key not in store.finished()  # recording is the driver's
            if outcome.metrics is not None:
                store.finish(outcome.trial, outcome.metrics, duration=1.0, versions={})
        return store, outcomes

    def attempts(self, name):
        """Give (process, first step) of each attempt at a trial."""
        return [tuple(map(int, line.split())) for line in io.read_lines(self.watch / name)]


def found(store):
    """All that must be the same: the metrics and the bytes of the curves."""
    curves = {path.name: path.read_bytes() for path in (store.folder / "curves").glob("*.jsonl")}
    return {key: record["metrics"] for key, record in store.finished().items()}, curves


@pytest.fixture
def walks(tmp_path):
    return Walks(tmp_path, steps=40)


@pytest.fixture(scope="session")
def cluster():
    """A Ray cluster of one node with two CPUs; gives its address."""
    # Not under pytest's folder: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    words = ["-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2"]
    words += ["--port", "0", "--node-ip-address", "127.0.0.1", "--temp-dir", str(folder)]
    words += ["--object-store-memory", str(80 * 2**20), "--include-dashboard", "false"]
    words += ["--min-worker-port", "0", "--max-worker-port", "0", "--disable-usage-stats"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with open(folder / "log", "w") as log:
        head = subprocess.Popen(
            [sys.executable, *words], env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        address = folder / "ray_current_cluster"  # written a moment before or after the log
        says = "Ray runtime started"
        wait_for(
            lambda: head.poll() or (says in (folder / "log").read_text() and address.is_file()), 60
        )
        assert head.poll() is None, (folder / "log").read_text()
        yield address.read_text().strip()
    finally:
        head.terminate()  # it ends the processes of its node; `ray stop` would end those of others
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition, seconds=120):
    """Wait until a condition holds, and give its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
    return value


# -- in the suite ----------------------------------------------------------------------------------


@needs_ray
def test_the_bits_of_one_process_though_a_worker_is_killed(walks, cluster, capfd):
    """Also: a trial that raises, or does what the store refuses, does not disturb the others."""
    good = walks.jobs("saved-0", "plain-0", "saved-1")
    truth = found(walks.run(InProcess(), good, "truth", pace=0)[0])
    (trial,) = good[0].trials
    latest = Store(walks.folder / "ray").checkpoint(trial).latest

    def kill():
        wait_for(latest.exists)
        os.kill(walks.attempts("saved-0")[-1][0], signal.SIGKILL)

    killer, ticks = threading.Thread(target=kill), []
    killer.start()
    jobs = [*walks.jobs("broken-0"), *good, *walks.jobs("backwards-0")]
    (walks.watch / "saved-0").unlink()
    store, outcomes = walks.run(
        RayExecutor(cluster), jobs, "ray", pace=0.02, tick=lambda *seen: ticks.append(seen)
    )
    killer.join()
    assert outcomes["broken-0"].traceback.endswith("KeyError: 'no such thing'\n")
    assert "step 0 does not come after step 0" in outcomes["backwards-0"].traceback
    curve = store.curve(outcomes["backwards-0"].trial)
    assert [row["step"] for row in curve.rows()] == [0]
    curve.path.unlink()
    assert found(store) == truth
    (first, begin), (second, again) = walks.attempts("saved-0")
    assert first != second and begin == 1 and again > 5 and again % 5 == 1
    assert os.getpid() not in {outcome.extra.get("process") for outcome in outcomes.values()}
    assert "raylet" not in "".join(capfd.readouterr())  # Ray says nothing of it
    assert ticks and all(isinstance(seen, Trial) and 0 < part <= 1 for seen, part in ticks)


@needs_ray
def test_no_cluster_is_one_sentence(walks):
    for address in ("127.0.0.1:9", "ray://127.0.0.1:9", "nonsense"):
        with pytest.raises(ConnectionError, match=f"no connection to a Ray cluster at '{address}'"):
            next(RayExecutor(address).run(walks.jobs("plain-0"), Store(walks.folder), print))


def test_no_ray_is_one_sentence(walks, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install \"moiety\[ray\]\""):
        next(RayExecutor("auto").run(walks.jobs("plain-0"), Store(walks.folder), print))


def test_without_jobs_no_cluster_is_needed(walks):
    assert list(RayExecutor("127.0.0.1:9").run([], Store(walks.folder), print)) == []


def test_a_node_has_room_for_whole_jobs():
    (trial,) = [Trial("s", "a", 0, {})]
    jobs = [Job("lab/x", [trial], device, 3) for device in ("cpu", "cuda:1")]
    assert on_ray._needs(jobs[:1]) == {"CPU": 3}
    assert on_ray._needs(jobs) == {"CPU": 3, "GPU": 1}
    assert on_ray._fits({"CPU": 8.0, "GPU": 1.0}, {"CPU": 3}) == 2
    assert on_ray._fits({"CPU": 8.0, "GPU": 1.0}, {"CPU": 3, "GPU": 1}) == 1
    assert on_ray._fits({"CPU": 8.0}, {"CPU": 3, "GPU": 1}) == 0
    assert on_ray._packed(jobs[1], Store("nowhere"))[0].device == "cuda"  # the one that it sees


def worker():
    return Worker(versions()["moiety"])


def test_a_study_file_travels_to_a_node_that_has_another_or_none(walks):
    here = worker()
    text = walks.file.read_text()
    assert here._file(walks.file, text) == str(walks.file)
    copies = {here._file(walks.file, text + "# new"), here._file(walks.folder / "no.py", text)}
    assert {Path(path).read_text() for path in copies} == {text, text + "# new"}
    assert {Path(path).name for path in copies} == {"walks.py", "no.py"}
    assert here._file(walks.folder / "no.py", text) in copies


BLOCK = """
from moiety.lab.study import Metric, Scale, Study

def walk(runnings):
    for running in runnings:
        running.curve.append(1, where=running.seed / 3)
    return [{"where": running.seed / 3} for running in runnings]

study = Study(
    name="tests/block", title="Blocks", question="?", run_block=walk, block=3, arms={"only": {}},
    metrics={"where": Metric("Where")}, scales={"small": Scale(seeds=3)},
)
"""


def test_a_block_is_one_job_and_loses_what_a_dead_worker_said(tmp_path):
    (tmp_path / "block.py").write_text(BLOCK)
    trials = [Trial("tests/block", "only", seed, {}) for seed in range(3)]
    job = Job(str(tmp_path / "block.py"), trials, "cpu", 1)
    store, truth, here = Store(tmp_path / "ray"), Store(tmp_path / "truth"), worker()
    store.curve(trials[1]).append(1, where=0.0)  # of a worker that died
    store.curve(trials[1]).append(2, where=0.0)
    task = on_ray._Task(job)
    task.begin(here, store)
    messages, _ = here.say(*on_ray._packed(job, store))
    while not (outcomes := task.write(messages)):
        messages, _ = here.say()
    expected = list(InProcess().run([job], truth, print))
    assert [outcome.traceback for outcome in outcomes] == [None] * 3
    assert [(o.trial, o.metrics) for o in outcomes] == [(o.trial, o.metrics) for o in expected]
    assert found(store) == found(truth)


def test_one_checkpoint_of_a_block_keeps_the_curves_of_all(tmp_path):
    (tmp_path / "block.py").write_text(BLOCK)
    trials = [Trial("tests/block", "only", seed, {}) for seed in range(3)]
    store, here = Store(tmp_path / "ray"), worker()
    store.checkpoint(trials[0]).save({"step": 1})
    job, text = on_ray._packed(Job(str(tmp_path / "block.py"), trials, "cpu", 1), store)
    messages, _ = here.say(job, text)
    while messages[-1][0] != "end":
        messages += here.say()[0]
    assert "rewind" not in [what for what, _, _ in messages]


def test_a_node_measures_the_speed_of_a_study_that_travelled(tmp_path):
    text = BLOCK.replace('arms={"only": {}},', 'arms={"only": {}}, speed=speed,').replace(
        "study =",
        "from moiety.lab.study import Speed\nspeed = lambda s, d: Speed(s['x'], 1.0)\nstudy =",
    )
    job = Job(str(tmp_path / "not-here.py"), [], "cpu", 1)
    speeds = worker().speeds(job, text, [{"x": 1.0}, {"x": 2.0}])
    assert [speed.seconds for speed in speeds] == [1.0, 2.0]


def test_a_node_with_another_version_is_refused():
    with pytest.raises(ImportError, match=r"it has version .*, the driver 0\.0\.0"):
        Worker("0.0.0")


def test_a_trial_waits_for_the_driver_when_too_much_is_kept():
    here, said = worker(), []
    thread = threading.Thread(
        target=lambda: [here.keep("append", "k", i, full=3) for i in range(10)], daemon=True
    )
    thread.start()
    while len(said) < 10:
        messages, _ = here.say()
        assert len(messages) <= 3
        said += [content for _, _, content in messages]
    assert said == list(range(10))


def test_what_the_store_would_refuse_raises_in_the_trial():
    here = worker()
    with pytest.raises(ValueError, match="nan"):
        Curve(here, "key").append(1, loss=float("nan"))
    with pytest.raises(ValueError, match="cannot hold"):
        Checkpoint(here, "key", None).save({"model": object()})
    assert here.messages == []


def test_a_damaged_checkpoint_raises_in_the_trial(walks):
    (job,), store = walks.jobs("saved-0"), Store(walks.folder)
    (trial,) = job.trials
    io.write_atomic(store.checkpoint(trial).latest, b"half of it")
    packed, _ = on_ray._packed(job, store)
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        Checkpoint(worker(), trial.key, packed.states[trial.key]).load()


def test_a_saved_state_is_a_copy_and_so_is_a_loaded_one():
    checkpoint, weight = Checkpoint(worker(), "key", None), torch.zeros(2)
    saver = threading.Thread(target=lambda: checkpoint.save({"w": weight, 1: (2,)}), daemon=True)
    saver.start()
    ((what, key, sent),), _ = checkpoint.worker.say()
    saver.join()
    weight += 1
    checkpoint.load()["w"].add_(1)
    assert (what, key) == ("save", "key") and sent[1] == (2,)
    assert sent["w"].tolist() == checkpoint.load()["w"].tolist() == [0, 0]


# -- behind a marker -------------------------------------------------------------------------------


@needs_ray
@pytest.mark.slow
def test_after_three_deaths_a_trial_is_given_up_and_the_rest_go_on(walks, cluster):
    jobs = walks.jobs("deadly-0", "plain-0")
    store, outcomes = walks.run(RayExecutor(cluster), jobs, "ray", pace=0)
    assert outcomes["deadly-0"].metrics is None
    last = outcomes["deadly-0"].traceback.splitlines()[-1]
    assert last == "RuntimeError: its process died 3 times; is memory too small?"
    assert [first for _, first in walks.attempts("deadly-0")] == [1, 1, 1]
    assert len(store.finished()) == 1


@needs_ray
@pytest.mark.slow
def test_a_budget_is_calibrated_on_the_cluster_with_its_room(walks, cluster):
    speed = ", speed=lambda s, d: __import__('moiety.lab.study').lab.study.Speed(os.getpid(), 1.0)"
    text = walks.file.read_text()
    walks.file.write_text(text.replace('title="Walks"', f'title="Walks"{speed}'))
    executor, job = RayExecutor(cluster), Job(str(walks.file), [], "cpu", 1)
    assert executor.lanes(job) == 2
    processes = [speed.seconds for speed in executor.speeds(job, [{}, {}])]
    assert len(set(processes)) == 1 and processes[0] != os.getpid()
    with pytest.raises(ValueError, match="no node of the Ray cluster has 1 CPU and 1 GPU"):
        executor.speeds(Job(str(walks.file), [], "cuda", 1), [{}])


@needs_ray
@pytest.mark.slow
def test_a_job_that_no_node_can_run_is_one_sentence(walks, cluster):
    (job,) = walks.jobs("plain-0")
    job.threads = 3
    with pytest.raises(ValueError, match="no node of the Ray cluster has 3 CPU; add a node"):
        next(RayExecutor(cluster).run([job], Store(walks.folder), print))


@needs_ray
@pytest.mark.slow
def test_25_kills_of_workers_and_3_of_the_driver_change_no_bit(tmp_path, cluster):
    walks = Walks(tmp_path, steps=120)
    walks.set_pace(0)
    run_driver(walks, "truth", None).wait()
    for mark in walks.watch.glob("*-*"):
        mark.unlink()
    walks.set_pace(0.03)
    hunt = Hunt(walks, cluster)
    try:
        for number in range(25):
            if number in (7, 13, 19):
                hunt.kill_driver()
            hunt.kill_worker(checkpointed=number % 5 < 3)
        assert hunt.driver.wait(600) == 0
    finally:
        hunt.driver.kill()
    assert hunt.after_checkpoint >= 8
    later = [first for seed in range(10) for _, first in walks.attempts(f"saved-{seed}")[1:]]
    assert sum(first > 1 for first in later) >= 8
    assert found(hunt.store) == found(Store(tmp_path / "truth"))
    assert len(hunt.store.finished()) == 20 and not hunt.store.failed()


def run_driver(walks, folder, address):
    text = DRIVER.format(str(walks.file), str(walks.folder / folder), address)
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen([sys.executable, "-c", text], env=env, stdout=subprocess.DEVNULL)


class Hunt:
    """Kills what runs a study, wherever it has come to."""

    def __init__(self, walks, address):
        self.walks, self.address, self.random = walks, address, random.Random(0)
        self.store, self.after_checkpoint = Store(walks.folder / "ray"), 0
        self.gone, self.kills = set(), {}  # processes; kills by trial under this driver
        self.driver = run_driver(walks, "ray", address)

    def kill_driver(self):
        self.driver.kill()
        self.driver.wait()
        self.gone |= {process for _, process in self.running()}
        self.kills = {}
        self.driver = run_driver(self.walks, "ray", self.address)

    def kill_worker(self, checkpointed):
        """Kill the process of a trial in flight, one that has a checkpoint where that is asked."""
        name, process = wait_for(lambda: self.victim(checkpointed))
        time.sleep(self.random.random() / 2)
        os.kill(process, signal.SIGKILL)
        assert self.lines(name) < self.walks.steps - 10  # it was in the middle
        self.after_checkpoint += checkpointed
        self.gone.add(process)
        self.kills[name] = self.kills.get(name, 0) + 1

    def victim(self, checkpointed):
        """A trial and its process, far from its end; at three deaths it would be given up."""
        for name, process in self.running():
            if process in self.gone or self.kills.get(name, 0) == 2:
                continue
            if name.startswith("plain") and checkpointed:
                continue
            if (6 if checkpointed else 1) <= self.lines(name) < self.walks.steps - 50:
                return name, process
        return None

    def running(self):
        """The last attempt at each trial that has begun: its name and process."""
        names = sorted(path.name for path in self.walks.watch.glob("*-*"))
        return [(name, self.walks.attempts(name)[-1][0]) for name in names]

    def lines(self, name):
        """How many lines the driver has written of a trial's curve."""
        paths = (self.store.folder / "curves").glob(f"{name.replace('-', '-s')}-*.jsonl")
        return sum(len(io.read_lines(path)) for path in paths)
