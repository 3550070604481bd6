"""Files that arrive in a folder in all the ways they do, written while a run takes them.

    write_on(inbox, ledger, over, told)      # until `over` is there; `told` then says what was good

Whole ones are renamed into place; others are written under their name in two goes, or plain with a
.done that comes later. Some are cut off or corrupt for good, some are never meant to be taken.
"""

import gzip
import json
import os
import time
from hashlib import sha256

import torch

from moiety.anytime.data import Examples
from moiety.anytime.tabular import Rows
from moiety.io import read_lines

ROWS, INPUTS = 20, 4
AHEAD = 6  # files that the writer is ahead of the ledger, at most


class Read:
    """Rows of numbers, the class last."""

    classes = 3
    form = None  # that of the first file

    def __call__(self, path):
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        table = torch.tensor([list(map(float, row.split(","))) for row in text.split("\n")])
        if self.form is None:
            self.form = form_of(table)
        return Examples(table[:, :-1], table[:, -1].long())


def form_of(table):
    """A form that tells first files apart by their scales."""
    names = [str(number) for number in range(INPUTS)]
    scales = dict(zip(names, zip(table.mean(0).tolist(), table.std(0).tolist())))
    classes = [str(number) for number in range(Read.classes)]
    return Rows([*names, "class"], "class", classes, scales, [], {}, {})


def text(number):
    """Three classes, each with a coordinate of its own."""
    draw = torch.Generator().manual_seed(number)
    y = torch.randint(Read.classes, (ROWS,), generator=draw)
    x = torch.randn(ROWS, INPUTS, generator=draw)
    x[torch.arange(ROWS), y] += 2
    rows = zip(x.tolist(), y.tolist())
    return "\n".join(f"{','.join(map(str, row))},{c}" for row, c in rows).encode()


class Writer:
    """Writes files; `later` holds what makes those whole that were begun."""

    def __init__(self, inbox):
        self.inbox, self.later, self.good = inbox, [], {}

    def put(self, number):
        """The file of a number, and what must not be taken beside it."""
        data = gzip.compress(text(number), mtime=0)
        bad = data[: len(data) // 2] if number % 2 else data[:-8] + bytes(8)
        (self.inbox / f"{number:03}-bad.csv.gz").write_bytes(bad)
        (self.inbox / f"{number:03}.csv.gz.part").write_bytes(data)
        (self.rename, self.in_two_goes, self.done_later)[number % 3](number, data)

    def finish(self, number):
        """Make a file whole that was begun."""
        self.later.pop(number)()

    def rename(self, number, data):
        name = f"{number:03}.csv.gz"
        self.good[name] = sha256(data).hexdigest()
        (self.inbox / f".{name}").write_bytes(data)
        os.rename(self.inbox / f".{name}", self.inbox / name)

    def in_two_goes(self, number, data):
        path = self.inbox / f"{number:03}.csv.gz"
        self.good[path.name] = sha256(data).hexdigest()
        half = len(data) // 2
        path.write_bytes(data[:half])

        def rest():
            with open(path, "ab") as file:
                file.write(data[half:])

        self.later.append(rest)

    def done_later(self, number, packed):
        data, path = gzip.decompress(packed), self.inbox / f"{number:03}.csv"
        self.good[path.name] = sha256(data).hexdigest()
        path.write_bytes(data)
        line = f"{len(data)} {self.good[path.name]}"
        self.later.append(lambda: path.with_name(f"{path.name}.done").write_text(line))


def write_on(inbox, ledger, over, told):
    """Write until it is over, a few files ahead of the ledger; then make all whole."""
    writer, number = Writer(inbox), 0
    while not over.exists():
        if number - len(read_lines(ledger)) < AHEAD:
            number += 1
            writer.put(number)
            if len(writer.later) > 2:
                writer.finish(0)
        time.sleep(0.01)
    while writer.later:
        writer.finish(0)
    told.write_text(json.dumps(writer.good))
