"""Streams: a data set that is cut into mega-batches, and a folder that fills over time.

    stream = cut(load_problem("mnist"), batches=500, seed=432)
    stream = Folder("inbox", "out/journal.jsonl", Reader(target="label"))
    stream.poll()                                # what arrived, and what is not taken yet, and why
    for batch in stream:                         # all that is known so far, from number 1
        batch.train.x, batch.validation.y

Time is logical: t is the number of a mega-batch. The same seed and the same journal give the same
mega-batches with the same validation rows, whenever and how often they are read.
Paper: Caccia et al., "On Anytime Learning at Macroscale", 2022, section 2.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import Problem, Split
from .apart import Apart, BadTest
from .arrivals import DONE, Incomplete, candidates, prove
from .data import Batch, Examples, problem_examples, shuffled, split_rows
from .journal import Begun, Entry, Journal, Stamp
from .readers import FORMS, Arrays, write_form
from .tabular import Rows


@dataclass(frozen=True)
class Seen:
    """A file that a look at the folder met: now a mega-batch, or the reason why not.

    A journalled file that changed or vanished is met here too (`lost`), with its reason. A file
    that was taken with a warning, such as one without proof, has both, a number and that as its
    reason.
    """

    name: str
    number: int | None = None  # of the mega-batch that it became
    reason: str = ""
    lost: bool = False  # it was taken earlier, and is not what it was

    def __str__(self) -> str:
        taken = " is not taken" if self.number is None else f" is mega-batch {self.number}"
        reason = self.reason.removeprefix(f"{self.name}: ")  # which may begin with the name
        if reason.startswith(f"{self.name} "):
            reason = "it" + reason.removeprefix(self.name)
        text = f"{self.name}{'' if self.lost else taken}" + (f": {reason}" if reason else "")
        return text.encode("utf-8", "backslashreplace").decode()  # a name may be no text


class Stream(ABC):
    """Mega-batches by number, from 1; a kind of stream says where they come from."""

    batches: int | None = None  # how many there will be, where that is known
    classes: int  # how many there are to tell apart; for text, how many tokens

    def __init__(self, *, seed: int = 0, validation: float = 0.1) -> None:
        if not 0 <= validation < 1:
            raise ValueError(f"validation must be from 0 up to below 1, got {validation}")
        self.seed, self.validation = seed, validation

    @abstractmethod
    def known(self) -> int:
        """How many mega-batches have arrived."""

    @abstractmethod
    def rows(self, number: int) -> int:
        """How many examples a mega-batch has, without reading it."""

    @abstractmethod
    def _arrived(self, number: int) -> tuple[str, Examples]:
        """The name and all examples of a mega-batch."""

    def reload(self) -> None:  # noqa: B027 - most streams have nothing to reload
        """Take over what other processes have made known; takes nothing new."""

    def poll(self) -> list[Seen]:
        """Look for new mega-batches; say what is new, and what is not taken, and why."""
        return []

    def form(self) -> dict[str, Any] | None:
        """What turns further rows into inputs, as plain values (`readers.write_form`).

        None: only inputs that are ready for the model can be answered by another process.
        """
        return None

    def __getitem__(self, number: int) -> Batch:
        if not 1 <= number <= self.known():
            raise IndexError(f"mega-batch {number} is not there; {self.known()} have arrived")
        name, examples = self._arrived(number)
        train, held = split_rows(len(examples), self.validation, self.seed, number)
        return Batch(number, name, examples.take(train), examples.take(held))

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(1, self.known() + 1))


class Cut(Stream):
    """A data set in mega-batches, all of which are there at once; made by `cut`."""

    def __init__(
        self, data: Problem | Examples, batches: int, *, seed: int = 0, validation: float = 0.1
    ) -> None:
        super().__init__(seed=seed, validation=validation)
        self.batches = batches
        rows, self.classes, self._take = _source(data)
        self._data = data
        most = rows // 2 if validation else rows
        if not 1 <= batches <= most:
            raise ValueError(
                f"{rows} examples can be cut into 1 to {most} mega-batches, not {batches}"
            )
        self._take(torch.tensor([0]))  # raises now what a stream cannot use
        # The first ones are one longer where there is a rest.
        self._parts = shuffled(rows, seed, 0).tensor_split(batches)

    def known(self) -> int:
        return len(self._parts)

    def rows(self, number: int) -> int:
        return len(self._parts[number - 1])

    def _arrived(self, number: int) -> tuple[str, Examples]:
        return f"part {number} of {self.batches}", self._take(self._parts[number - 1])

    def form(self) -> dict[str, Any] | None:
        """Of images, tables and examples; those of text have none."""
        data = self._data
        if isinstance(data, Examples):
            if not data.x.is_floating_point():
                return None
            names = [str(number) for number in range(self.classes)]
            return write_form(Arrays(tuple(data.x.shape[1:]), names))
        if data.kind == "table" and len(data.scales) == len(data.numbers):
            return write_form(table_form(data))
        if data.shape is None:
            return None
        return write_form(Arrays(data.shape, data.targets[0].classes, data.mean, data.std))


def table_form(data: Problem) -> Rows:
    """What turns further rows of a table into inputs, as its own were."""
    return Rows(
        columns=[*data.numbers, *data.categories, data.targets[0].name],
        target=data.targets[0].name,
        classes=data.targets[0].classes,
        scales=dict(zip(data.numbers, data.scales)),
        dates=data.dates,
        levels=dict(zip(data.categories, data.levels)),
        unused={},
    )


def cut(
    data: Problem | Examples, batches: int, *, seed: int = 0, validation: float = 0.1
) -> Stream:
    """Cut data into equal mega-batches by a seeded permutation; a rest makes some one longer.

    Of a problem, train and validation are cut; its test split is the environment's, see
    `problem_examples(problem, problem.test)`. Each mega-batch gets its own validation rows.
    """
    return Cut(data, batches, seed=seed, validation=validation)


def _source(data: Problem | Examples) -> tuple[int, int, Callable[[Tensor], Examples]]:
    """How many examples and classes there are, and what gives some of the examples."""
    if isinstance(data, Examples):
        return len(data), int(data.y.max()) + 1, data.take
    one, two = data.train, data.validation
    both = Split(
        {name: torch.cat([one.inputs[name], two.inputs[name]]) for name in one.inputs},
        {name: torch.cat([one.targets[name], two.targets[name]]) for name in one.targets},
        one.texts + two.texts,
    )
    classes = len(data.targets[0].classes)
    # Made ready a mega-batch at a time: as floats, images take four times their bytes.
    return len(both), classes, lambda rows: problem_examples(data, both.take(rows))


class Folder(Stream):
    """Files that arrive in a folder, each a mega-batch once it is whole and in the journal.

    `read` makes examples of a file, and refuses with a `ValueError` what it cannot use; the first
    file that it is given sets the form of all later ones (see `readers.Reader`). Plain files need
    a NAME.done beside them, or `settle` seconds without a change (see `arrivals`).

    `test` is a file to score on, in the form of the others: a file that has more than the share
    `overlap` of its rows in common with it is not taken.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        journal: str | os.PathLike[str],
        read: Callable[[Path], Examples],
        *,
        settle: float | None = None,
        test: str | os.PathLike[str] | None = None,
        overlap: float = 0.01,
        seed: int = 0,
        validation: float = 0.1,
    ) -> None:
        super().__init__(seed=seed, validation=validation)
        self.path, self.read, self.settle = Path(path), read, settle
        self.apart = None if test is None else Apart(Path(test), overlap)
        if Path(journal).resolve().parent == self.path.resolve():
            raise ValueError(f"{journal} lies among the data; give the journal another folder")
        if settle is not None:
            if settle <= 0:
                raise ValueError(f"settle must be more than 0 seconds, got {settle}")
            warnings.warn(
                f"--settle {settle:g} (in Python, settle=…): a file whose writer pauses longer is "
                "taken half-written; NAME.done with its size and SHA-256 is safe",
                stacklevel=2,
            )
        candidates(self.path)  # raises where there is no such folder
        self.journal = Journal(journal)
        self._formed = False  # whether `read` has seen mega-batch 1
        self._refused: dict[str, tuple[object, str]] = {}  # by name: what was looked at, the reason

    def known(self) -> int:
        return len(self.journal)

    def rows(self, number: int) -> int:
        return self.journal[number].rows

    @property
    def classes(self) -> int:  # type: ignore[override]
        """How many classes the reader knows, once there is a first mega-batch."""
        self._form()
        classes = getattr(self.read, "classes", None)
        if classes is None:
            raise ValueError("the reader does not say how many classes there are; set its classes")
        return int(classes)

    def form(self) -> dict[str, Any] | None:
        """That of mega-batch 1, where the reader has one of those that `readers` knows."""
        self._form()
        form = getattr(self.read, "form", None)
        if form is None or getattr(form, "kind", None) not in FORMS:
            return None
        return write_form(form)

    def test(self) -> Examples:
        """The test file's examples, once there is a first mega-batch to give them its form."""
        if self.apart is None:
            raise ValueError("this folder was given no test file")
        self._form()
        return self.apart.read(self.read)

    def reload(self) -> None:
        """Read the journal again, which another process may have added to."""
        self.journal.reload()

    def poll(self) -> list[Seen]:
        """Take what is whole into the journal, in the order of names; list the rest."""
        self.reload()
        self._form()
        old = {entry.name for entry in self.journal}
        new = [path for path in candidates(self.path) if path.name not in old]
        return [*self._damage(), *map(self._look, new)]

    def _damage(self) -> Iterator[Seen]:
        """Journalled files that are not what they were; whoever uses one is stopped."""
        for entry in list(self.journal):
            try:
                self.journal.check(entry, self.path)
            except (ValueError, OSError) as error:
                yield Seen(entry.name, reason=str(error), lost=True)

    def _look(self, path: Path) -> Seen:
        """Take one file, or say why not; what was refused is read again once it was touched."""
        stamp = self._stamp(path)
        looked, reason = self._refused.get(path.name, (None, ""))
        if stamp is not None and stamp == looked:
            return Seen(path.name, reason=reason)
        try:
            entry, warning = self._take(path)
        except BadTest:  # no fault of this file
            raise
        except ValueError as error:
            self._refused[path.name] = (stamp, str(error))
            return Seen(path.name, reason=str(error))
        return Seen(path.name, entry.number, warning)

    def _take(self, path: Path) -> tuple[Entry, str]:
        try:
            path.name.encode()  # cards and reports are UTF-8, and name it
        except UnicodeEncodeError:
            raise Incomplete("its name is not UTF-8; rename it") from None
        self._form()
        if (check := getattr(self.read, "check", None)) is not None:
            check(path)  # of another kind, it would not be taken whole either
        proof = prove(path, settle=self.settle)
        # A copy, so that a file that is refused after all does not set the form of the others.
        read = self.read if self._formed else copy.copy(self.read)
        try:
            # Read before it is journalled: what cannot be used must not take a number.
            examples = read(path)
            split_rows(len(examples), self.validation, self.seed, self.known() + 1)
            if self.apart is not None:
                self.apart.check(read, examples, path.name)
            if Stamp.of(path) != proof.stamp:
                raise Incomplete("it is still being written")
        except OSError as error:
            raise Incomplete(f"it cannot be read ({error.strerror or error})") from None
        size, rows = proof.stamp.size, len(examples)
        first = not self._formed
        try:
            entry = self.journal.append(
                path.name, size=size, sha256=proof.sha256, rows=rows, first=first
            )
        except Begun:  # so this file was not read in the form of mega-batch 1
            return self._take(path)
        if self._formed or entry.number == 1:
            self.read, self._formed = read, True
        warned = [proof.warning] if proof.warning else []
        if examples.left_out:
            warned.append(f"{examples.left_out} of its rows have no target and are left out")
        twin = next(old for old in self.journal if old.sha256 == entry.sha256)
        if twin.number < entry.number:
            warned.append(f"it has the same bytes as mega-batch {twin.number}, {twin.name}")
        return entry, "; ".join(warned)

    def _stamp(self, path: Path) -> object:
        """What changes when a file or its .done does; none where that cannot be told yet."""
        stamps = []
        for each in (path, path.with_name(path.name + DONE)):
            with contextlib.suppress(OSError):
                stamps.append(Stamp.of(each))
        newest = max((max(stamp.modified, stamp.changed) for stamp in stamps), default=0)
        settling = time.time() - newest / 1e9 < (self.settle or 0)
        return None if settling or any(stamp.fresh for stamp in stamps) else tuple(stamps)

    def _form(self) -> None:
        """After a restart: let the reader see mega-batch 1 before any other."""
        if not self._formed and self.known():
            self._arrived(1)

    def _arrived(self, number: int) -> tuple[str, Examples]:
        if number > 1:
            self._form()
        entry = self.journal[number]
        path = self.journal.check(entry, self.path)
        stamp = Stamp.of(path)
        examples = self.read(path)
        if Stamp.of(path) != stamp:
            self.journal.check(entry, self.path)  # raises what changed under our hands
        self._formed = True
        return entry.name, examples
