"""A run over a folder that is killed again and again, while files arrive and a reader looks on.

    python killed.py FOLDER WAIT ACTS

Every life of the run ends by SIGKILL at one of its syncs, renames, links, removals or answers of a
model (growth and scoring answer): the first at the ACTS-th, each further one an act later, until
one comes to the end. Prints as JSON where it was killed,
what is the same as in a run that was left alone, and what the reader met. One process imports torch
and forks for each life, so that a kill costs milliseconds.
"""

import gzip
import itertools
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

from moiety.anytime import base
from moiety.anytime.backbones import MLP
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.growing import GrowingEnsemble
from moiety.anytime.learners import learner
from moiety.anytime.ledger import read_ledger, timeless
from moiety.anytime.run import run_stream
from moiety.anytime.stream import Folder
from moiety.anytime.versions import load_current

FILES, ROWS = 7, 20


class Read:
    """Rows of numbers, the class last."""

    classes = 3

    def __call__(self, path):
        text = gzip.decompress(path.read_bytes()).decode()
        table = torch.tensor([list(map(float, row.split(","))) for row in text.split("\n")])
        return Examples(table[:, :-1], table[:, -1].long())


def text(number):
    draw = torch.Generator().manual_seed(number)
    y = torch.randint(3, (ROWS,), generator=draw)
    x = torch.randn(ROWS, 4, generator=draw)
    x[torch.arange(ROWS), y] += 3
    return "\n".join(f"{','.join(map(str, row))},{c}" for row, c in zip(x.tolist(), y.tolist()))


def write(inbox, number):
    """A good file, and beside it what must not be taken: half a file, a corrupt one, a name."""
    data = gzip.compress(text(number).encode(), mtime=0)
    (inbox / f"{number}.csv.gz.part").write_bytes(data[: len(data) // 2])
    (inbox / f"{number}-half.csv.gz").write_bytes(data[: len(data) // 2])
    (inbox / f"{number}-bad.csv.gz").write_bytes(data[:-8] + bytes(8))
    (inbox / f".{number}").write_bytes(data)
    os.rename(inbox / f".{number}", inbox / f"{number}.csv.gz")


def live(inbox, out, wait):
    """One life of the run."""
    training = Training(epochs=2, batch=16, save_every=0.0)
    made = learner("growing-ensemble", lambda seed: MLP(6, inputs=4, classes=3), training=training)
    stream = Folder(inbox, out / "journal.jsonl", Read(), seed=1)
    run_stream(stream, made, out=out, wait=wait, replay="0.5")


def killer(last, where):
    """Die before the last-th sync, rename, link, removal or answer of a model; say at which."""
    count = itertools.count(1)

    def deadly(name, act):
        def run(*args, **words):
            if next(count) == last:
                on = Path(args[-1]).name if isinstance(args[-1], str | Path) else ""
                where.write_text(f"{name} {on}".strip())
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **words)

        return run

    for name in ("fsync", "replace", "rename", "symlink", "unlink", "rmdir"):
        setattr(os, name, deadly(name, getattr(os, name)))
    base.Learner.predict = deadly("predict", base.Learner.predict)
    GrowingEnsemble._grow = deadly("grow", GrowingEnsemble._grow)


def fork(act, *args):
    """Do it in a process of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        act(*args)
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        os._exit(1)
    os._exit(0)


def ended(child):
    """0, or minus the signal that a process died of."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def read_on(out, stop, told):
    """Load `current` without pause until told to stop."""
    loads, failures = 0, []
    while not stop.exists():
        try:
            state, card = load_current(out)
            assert len(state["models"]) == card["phase"]
            loads += 1
        except Exception as error:
            if "no version yet" not in str(error):
                failures.append(repr(error))
    told.write_text(json.dumps({"loads": loads, "failures": failures}))


def disturbed(folder, wait, acts):
    """The run with kills, to its end; returns where it was killed."""
    inbox, out = folder / "inbox", folder / "out"
    inbox.mkdir(parents=True)
    kills, arrived = [], 0

    def mortal():
        killer(acts + len(kills), folder / "where")
        live(inbox, out, wait)

    while True:
        if arrived < FILES:
            arrived += 1
            write(inbox, arrived)
        code = ended(fork(mortal))
        if code == 0 and arrived == FILES:
            return kills
        if code == -signal.SIGKILL:
            kills.append((folder / "where").read_text())
        elif code:
            raise SystemExit(f"a life ended with {code} after {len(kills)} kills")


def undisturbed(folder, wait):
    """One life over all files."""
    (folder / "inbox").mkdir(parents=True)
    for number in range(1, FILES + 1):
        write(folder / "inbox", number)
    assert ended(fork(live, folder / "inbox", folder / "out", wait)) == 0


def weights(out):
    return (out / "current" / "state.safetensors").read_bytes()


def main(folder, wait, acts):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a forked process has none of its parent's threads
    Training()  # makes torch import the rest of itself, once for all lives
    stop, told = folder / "stop", folder / "told"
    reader = fork(read_on, folder / "killed" / "out", stop, told)
    try:
        kills = disturbed(folder / "killed", wait, acts)
    finally:
        stop.touch()
        ended(reader)
    undisturbed(folder / "alone", wait)
    one, two = folder / "killed" / "out", folder / "alone" / "out"
    same = {
        "journal": (one / "journal.jsonl").read_text() == (two / "journal.jsonl").read_text(),
        "phases": (one / "phases.jsonl").read_text() == (two / "phases.jsonl").read_text(),
        "ledger": timeless(read_ledger(one / "ledger.jsonl"))
        == timeless(read_ledger(two / "ledger.jsonl")),
        "weights": weights(one) == weights(two),
        "files": sorted(os.listdir(one)) == sorted(os.listdir(two)),
        "versions": sorted(os.listdir(one / "versions")) == sorted(os.listdir(two / "versions")),
    }
    report = {"kills": kills, "same": same, **json.loads(told.read_text())}
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
