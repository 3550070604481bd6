"""`kill -9` at any moment of a study: it ends like one that nobody disturbed, bit for bit."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from toy import EVERY

from moiety import io
from moiety.lab.driver import run_study

TOY = Path(__file__).parent / "toy.py"
TRIALS = 6

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")


class Killed:
    """A study that is run, killed and run again in one folder."""

    def __init__(self, folder, scale, workers):
        self.folder, self.log, self.scale = folder / "killed", folder / "log", scale
        self.command = [sys.executable, "-c", "from moiety.cli import main; main()", "study", "run"]
        self.command += [TOY, "--scale", scale, "--out", self.folder, "--workers", str(workers)]
        self.inside = self.kills = 0
        self.orphans = []  # workers whose driver was killed
        self.torn = set()  # files that were written and not renamed

    def begun(self):
        """(key, step, process) of every step that was begun, over all runs."""
        lines = [line.split() for line in io.read_lines(self.log)]
        return [(key, int(step), int(process)) for key, step, process in lines]

    def start(self, fault="", **words):
        environment = os.environ | {"MOIETY_FAULT": fault, "TOY_LOG": str(self.log)}
        words = {"stdout": subprocess.DEVNULL, **words}
        return subprocess.Popen(self.command, env=environment, **words)

    def wait_for(self, process, steps):
        """Wait until so many steps more are begun: kills shall meet trials, not start-up."""
        goal = len(self.begun()) + steps
        while process.poll() is None and len(self.begun()) < goal:
            time.sleep(0.002)
        assert process.poll() is None, "the study ended before the kill"

    def kill(self, *, after=0, fault="", worker=False):
        """Run; kill a worker or the driver after some steps, or at a write."""
        process = self.start(fault)
        try:
            if worker:
                self.wait_for(process, after)
                os.kill(workers_of(process.pid)[0], signal.SIGKILL)
                self._look()
            if not fault:
                self.wait_for(process, after)
                self.orphans += workers_of(process.pid)
                process.kill()
            assert process.wait(60) == -signal.SIGKILL
            self._look()
        finally:
            process.kill()
            process.wait()

    def _look(self):
        """Count what the kill met, by what is on the disk."""
        self.kills += 1
        done = {path.stem for path in (self.folder / "trials").glob("*.json")}
        saved = {path.parent.name for path in (self.folder / "checkpoints").glob("*/*.safetensors")}
        self.inside += bool(saved - done)
        self.torn |= {path.name for path in self.folder.glob("*/**/.*.tmp")}

    def finish(self):
        """Run to the end in this process, which is one that did nothing of it before."""
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("TOY_LOG", str(self.log))
            run_study(str(TOY), scale=self.scale, out=self.folder, console=Console(quiet=True))
        for orphan in self.orphans:
            wait_until_gone(orphan)


def workers_of(process):
    """The worker processes of a driver."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    command = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
    return [child for child, line in command.items() if b"spawn_main" in line]


def wait_until_gone(process):
    """A worker ends with its driver."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"worker {process} outlives its driver")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nobody killed, by scale."""
    made = {}

    def run(scale):
        if scale not in made:
            made[scale] = tmp_path_factory.mktemp("plain") / scale
            run_study(str(TOY), scale=scale, out=made[scale], console=Console(quiet=True))
        return made[scale]

    return run


def records(folder):
    """The records as they are, the durations aside."""
    files = bytes_of(folder / "trials")
    return {name: {**json.loads(data), "duration": None} for name, data in files.items()}


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same(killed, plain):
    """The killed run ended like the plain one, and each trial went on from its last checkpoint."""
    assert len(records(plain)) == TRIALS
    assert records(killed.folder) == records(plain)
    assert bytes_of(killed.folder / "curves") == bytes_of(plain / "curves")
    assert list((killed.folder / "checkpoints").iterdir()) == []
    results = [io.read_json(folder / "result.json") for folder in (killed.folder, plain)]
    same = ("trials_sha256", "metrics", "curves", "claims", "planned", "failures")
    assert [results[0][name] for name in same] == [results[1][name] for name in same]
    assert len(results[0]["looks"]) == 1
    assert not list(killed.folder.glob("*/**/.*.tmp"))
    resumed = 0
    for key in (Path(name).stem for name in records(plain)):
        mine = [(step, process) for name, step, process in killed.begun() if name == key]
        steps = {step for step, _ in mine}
        assert steps == set(range(1, max(steps) + 1))
        for (last, before), (first, now) in itertools.pairwise(mine):
            if now == before:
                assert first == last + 1
            else:  # what came since the last checkpoint is lost, and no more
                assert last - EVERY <= first - 1 <= last and (first - 1) % EVERY == 0
                resumed += first > 1
    assert resumed


def test_kills_in_one_process(tmp_path, undisturbed):
    killed = Killed(tmp_path, "small", workers=1)
    killed.kill(after=23)
    killed.kill(fault="write:6")
    killed.kill(after=40)
    assert killed.kills == 3 and len(killed.torn) >= 1 and killed.inside >= 2
    killed.finish()
    assert_same(killed, undisturbed("small"))


def test_kills_of_a_worker_and_of_the_driver(tmp_path, undisturbed):
    killed = Killed(tmp_path, "small", workers=2)
    killed.kill(after=23, worker=True)
    assert killed.kills == 2 and killed.inside >= 1
    killed.finish()
    assert_same(killed, undisturbed("small"))


def test_ctrl_c_ends_the_workers_quietly(tmp_path):
    study, pipe = Killed(tmp_path, "full", workers=2), subprocess.PIPE
    # Whoever runs the tests in the background may have them ignore Ctrl-C, which is inherited.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = study.start(stdout=pipe, stderr=pipe, start_new_session=True, text=True, **heard)
    study.wait_for(process, 1)
    workers = workers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all
    out, err = process.communicate(timeout=60)
    assert (
        process.returncode == 130
        and err == "moiety: interrupted; run the same command again to go on.\n"
    )
    assert "trials are done and kept. To continue: moiety study run" in out
    for worker in workers:
        wait_until_gone(worker)


@pytest.mark.slow
def test_many_kills_in_one_process(tmp_path, undisturbed):
    killed, draw = Killed(tmp_path, "full", workers=1), random.Random(0)
    for number in range(15):
        if number % 3 == 1:
            killed.kill(fault=f"write:{draw.randint(5, 9)}")
        else:
            killed.kill(after=draw.randint(10, 60))
    assert killed.kills == 15 and len(killed.torn) >= 4 and killed.inside >= 8
    killed.finish()
    assert_same(killed, undisturbed("full"))


@pytest.mark.slow
def test_many_kills_of_workers_and_drivers(tmp_path, undisturbed):
    killed, draw = Killed(tmp_path, "full", workers=2), random.Random(1)
    for number in range(7):
        killed.kill(after=draw.randint(20, 60), worker=number % 2 == 0)
    assert killed.kills == 11 and killed.inside >= 8
    killed.finish()
    assert_same(killed, undisturbed("full"))
