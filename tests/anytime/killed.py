"""A run over a folder that is killed again and again, while files arrive and a reader looks on.

    python killed.py FOLDER WAIT "step:3 version current …"

Every life of the run ends by SIGKILL at a place of `PLACES`, at its third occurrence or the like;
the last one comes to the end. Meanwhile a second process writes files (see `arriving`) and a third
loads `current` without pause. Prints as JSON how it went, beside a run that was left alone over the
same journal. One process imports torch and forks for each life: a kill costs milliseconds.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from hashlib import sha256
from pathlib import Path

import arriving
import torch

from moiety.anytime import base, fitting
from moiety.anytime.backbones import MLP, TreeMLP
from moiety.anytime.fitting import Training
from moiety.anytime.learners import learner, learners
from moiety.anytime.ledger import read_ledger, timeless
from moiety.anytime.run import run_stream
from moiety.anytime.stream import Folder
from moiety.anytime.versions import read_current
from moiety.io import read_json, read_lines
from moiety.routing.tree import Tree
from moiety.train.state import state_bytes

LONGEST = 60.0  # seconds until a life must have met its end
KINDS = {"growing-ensemble": MLP, "growing-moe": TreeMLP}

# By name: what kind of moment it is, the act at which it happens, whether after or before the act
# or with half a line on the disk, and, for files, the name of the act's target.
PLACES = {
    "step": ("phase", (fitting, "loss_of"), "before", ""),
    "check": ("phase", (fitting.Fit, "_check"), "before", ""),
    "checkpoint": ("write", (os, "replace"), "before", "phase.safetensors"),
    "state": ("write", (os, "replace"), "before", "state.safetensors"),
    "card": ("write", (os, "replace"), "before", "card.json"),
    "form": ("write", (os, "replace"), "before", "form.json"),
    "version": ("write", (os, "rename"), "before", "0*"),
    "link": ("current", (os, "symlink"), "before", ".current.tmp"),
    "current": ("current", (os, "replace"), "before", "current"),
    "switched": ("current", (os, "replace"), "after", "current"),
    "grow": ("growth", (base.Learner, "_grow"), "before", ""),
    "split": ("growth", (Tree, "split"), "before", ""),  # the second time, one layer has grown
    "grown": ("growth", (base.Learner, "_grow"), "after", ""),
    "journal": ("line", (os, "fsync"), "torn", "journal.jsonl"),
    "phases": ("line", (os, "fsync"), "torn", "phases.jsonl"),
    "ledger": ("line", (os, "fsync"), "torn", "ledger.jsonl"),
    "anywhere": ("any", None, "", ""),  # by another process, at any moment
}


# -- a life and its end ----------------------------------------------------------------------------


def live(inbox, out, wait, follow=False):
    """One life of the run; a fixed wait goes with an ensemble, another with a mixture."""
    name = "growing-ensemble" if wait.isdecimal() else "growing-moe"
    made = learner(
        name,
        lambda seed: KINDS[name](6, inputs=arriving.INPUTS, classes=arriving.Read.classes),
        every=2,
        training=Training(epochs=3, batch=16, save_every=0.0),
    )
    stream = Folder(inbox, out / "journal.jsonl", arriving.Read(), seed=1)
    run_stream(stream, made, out=out, wait=wait, replay="0.5", follow=follow, pause=0.005)


def arm(place, out):
    """Make this process die at a place."""
    name, _, times = place.partition(":")
    _, act, when, target = PLACES[name]
    left = int(times or 1)

    def deadly(real):
        def run(*args, **words):
            nonlocal left
            here = _is_target(args, target, out)
            left -= here
            if here and not left and when != "after":
                if when == "torn":
                    os.truncate(args[0], os.fstat(args[0]).st_size - 7)
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **words)
            if here and not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for owner, attribute in _owners(*act):
        setattr(owner, attribute, deadly(getattr(owner, attribute)))


def _owners(owner, attribute):
    """The owner of a method, and the classes below it that have one of their own."""
    below = owner.__subclasses__() if isinstance(owner, type) else []
    found = [pair for each in below for pair in _owners(each, attribute)]
    return [*found, (owner, attribute)] if attribute in vars(owner) else found


def _is_target(args, target, out):
    if not target:
        return True
    if isinstance(args[0], int):  # an open file
        path = out / target
        return path.exists() and os.path.samestat(os.fstat(args[0]), path.stat())
    return Path(args[-1]).match(target)


def fork(act, *args, **words):
    """Do it in a process of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        act(*args, **words)
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


def ended(child, what):
    """0, or minus the signal that a process died of."""
    deadline = time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise SystemExit(f"a life did not come to {what} within {LONGEST:g} s")


# -- three processes -------------------------------------------------------------------------------


def read_on(out, stop, told):
    """Load `current` without pause until told to stop; a version must never change."""
    loads, failures, digests = 0, [], {}
    while not stop.exists():
        try:
            state, card, form = read_current(out)
            assert state["phases"] == card["phase"], "state and card of two versions"
            assert form["kind"] == "a table", "no form"
            digest = sha256(state_bytes({"state": state, "form": form})).hexdigest()
            assert digests.setdefault(card["phase"], digest) == digest, "a version changed"
            loads += 1
        except Exception as error:
            early = "no version yet" in str(error) or "there is no folder" in str(error)
            if loads or not early:
                failures.append(repr(error))
    told.write_text(json.dumps({"loads": loads, "failures": failures, "versions": len(digests)}))


def disturbed(folder, wait, places):
    """The run, killed at each of the places while files arrive; then to its end."""
    inbox, out, over = folder / "inbox", folder / "out", folder / "over"
    draw = random.Random(0)

    def mortal(place):
        if place != "anywhere":
            arm(place, out)
        live(inbox, out, wait, follow=True)

    writer = fork(arriving.write_on, inbox, out / "ledger.jsonl", over, folder / "good.json")
    try:
        for number, place in enumerate(places):
            child = fork(mortal, place)
            if place == "anywhere":
                time.sleep(draw.uniform(0.01, 0.4))
                os.kill(child, signal.SIGKILL)
            code = ended(child, place)
            if code != -signal.SIGKILL:
                raise SystemExit(f"life {number} ended with {code}, not at {place}")
    finally:
        over.touch()
        written = ended(writer, "the last file")
    if written or ended(fork(live, inbox, out, wait), "its end"):
        raise SystemExit("the writer or the last life failed")


def undisturbed(folder, wait):
    """One life over the journal of the other run."""
    out = folder / "alone"
    out.mkdir()
    shutil.copy(folder / "out" / "journal.jsonl", out)
    assert ended(fork(live, folder / "inbox", out, wait), "its end") == 0


# -- what is the same ------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line) for line in read_lines(path)]


def version(out, name):
    path = out / "versions" / name
    card = read_json(path / "card.json")
    card["line"].pop("seconds")
    return card, *((path / name).read_bytes() for name in ("state.safetensors", "form.json"))


def compare(folder):
    """What must hold, by name."""
    one, two = folder / "out", folder / "alone"
    good = read_json(folder / "good.json")  # names and digests, as they were written
    journal, phases = lines(one / "journal.jsonl"), lines(one / "phases.jsonl")
    ledger = read_ledger(one / "ledger.jsonl")
    used = [number for record in phases for number in record["numbers"]]
    kept = sorted(os.listdir(one / "versions"))
    return {
        "no mega-batch lost": {entry["name"]: entry["sha256"] for entry in journal} == good,
        "none twice": used == list(range(1, len(used) + 1)),
        "a line for each": [line["t"] for line in ledger] == list(range(1, len(good) + 1)),
        "journal": journal == lines(two / "journal.jsonl"),
        "phases": phases == lines(two / "phases.jsonl"),
        "ledger": timeless(ledger) == timeless(read_ledger(two / "ledger.jsonl")),
        "files": sorted(os.listdir(one)) == sorted(os.listdir(two)),
        "versions": kept == sorted(os.listdir(two / "versions")),
        "weights": all(version(one, name) == version(two, name) for name in kept),
        "current": os.readlink(one / "current") == os.readlink(two / "current"),
    }


def main(folder, wait, places):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    Training(), learners()  # imports the rest of torch and of the learners, once for all lives
    (folder / "inbox").mkdir(parents=True)
    stop, told = folder / "stop", folder / "told"
    reader = fork(read_on, folder / "out", stop, told)
    try:
        disturbed(folder, wait, places)
    finally:
        stop.touch()
        ended(reader, "its last load")
    undisturbed(folder, wait)
    ledger = read_ledger(folder / "out" / "ledger.jsonl")
    report = {
        "kills": [PLACES[place.partition(":")[0]][0] for place in places],
        "holds": compare(folder),
        "mega_batches": len(ledger),
        "phases": ledger[-1]["phase"],
        "growths": sum(line["growth"] is not None for line in ledger),
        **json.loads(told.read_text()),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split())
