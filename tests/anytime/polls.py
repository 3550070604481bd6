"""Children that poll a folder and are killed, while their parent fills it: `test_folder` runs it.

python polls.py FOLDER OUT KILLS

Forked from one process, so that torch is loaded once. A child logs every mega-batch that it reads.
"""

import gzip
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from moiety.anytime import Examples, Folder
from moiety.io import read_lines


def read(path):
    values = [float(word) for word in gzip.decompress(path.read_bytes()).split()]
    return Examples(torch.tensor(values)[:, None], torch.zeros(len(values), dtype=torch.long))


def die_inside(sync, draw, out):
    """Be killed inside the write of a line, at the given sync; the line may be torn."""
    fsync, left = os.fsync, [sync]

    def die(handle):
        left[0] -= 1
        if left[0]:
            fsync(handle)
            return
        if draw.random() < 0.5:
            os.truncate(handle, os.fstat(handle).st_size - draw.randrange(1, 20))
        with open(out / "inside", "a") as file:
            file.write(f"{os.getpid()}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = die


def follow(folder, out):
    """Poll and use what is known, without end."""
    stream, used = Folder(folder, out / "journal.jsonl", read), 0
    while True:
        stream.poll()
        for number in range(used + 1, stream.known() + 1):
            batch, used = stream[number], number
            total = int(batch.train.x.sum() + batch.validation.x.sum())
            with open(out / "used", "a") as file:
                file.write(f"{os.getpid()} {number} {batch.name} {total}\n")


def put(folder, number, draw):
    """A good file that is renamed into place, and at times a half-written and a damaged one."""
    data = gzip.compress(b"\n".join(b"%d" % (number * 10 + row) for row in range(10)))
    name = f"{draw.randrange(1000):03}-{number}.txt.gz"
    (folder / f".{name}").write_bytes(data)
    os.rename(folder / f".{name}", folder / name)
    if number % 3 == 0:
        (folder / f"half-{number}.txt.gz").write_bytes(data[: len(data) // 2])
        (folder / f"bad-{number}.txt.gz").write_bytes(data[:-6] + b"xx" + data[-4:])
        (folder / f"more-{number}.txt.gz.part").write_bytes(data)
    if number % 6 == 0:  # the rest of a half-written file comes after all
        (folder / f"half-{number - 3}.txt.gz").write_bytes(data)


def wait_for(log, child, uses):
    """Wait until a child has used so many mega-batches: kills shall meet work, not its start."""
    while sum(line.startswith(f"{child} ") for line in read_lines(log)) < uses:
        time.sleep(0.002)


def main(folder, out, kills):
    draw = random.Random(0)
    for number in range(1, kills + 1):
        inside = number % 2 == 0
        put(folder, 2 * number, draw)
        child = os.fork()
        if not child:
            if inside:
                die_inside(draw.randrange(1, 3), draw, out)
            follow(folder, out)
        time.sleep(draw.random() * 0.04)
        put(folder, 2 * number + 1, draw)
        if not inside:
            wait_for(out / "used", child, draw.randrange(1, 2 * number + 1))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "a child failed by itself"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
