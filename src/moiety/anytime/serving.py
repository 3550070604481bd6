"""`load_current`: the newest model of a run, in any process, to answer rows without a target.

    current = load_current("out")                # of `moiety anytime`; beside a run that trains on
    found = current.predict("new.csv")           # or a pandas.DataFrame; of .npz, or an array `x`
    found.names, found.probability               # the answer to each row, and its probability
    found.probabilities                          # [N, C], by `found.classes`

A version has weights and the form of its rows, but no code: for a run whose learner was made in
Python, give that learner, or what makes it from the form:

    load_current("out", lambda form: make(form.shape, len(form.classes)))
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .base import Learner
from .environment import ASKED
from .making import make_again
from .readers import Form, read_form, read_inputs
from .versions import Version, read_current


@dataclass(frozen=True)
class Predictions:
    """Probabilities [N, C] of N rows and the names of the C classes."""

    classes: list[str]
    probabilities: Tensor

    def __len__(self) -> int:
        return len(self.probabilities)

    @cached_property
    def names(self) -> list[str]:
        """The likeliest class of each row."""
        return [self.classes[number] for number in self.probabilities.argmax(1).tolist()]

    @cached_property
    def probability(self) -> list[float]:
        """That of the likeliest class of each row."""
        return self.probabilities.amax(1).tolist()


@dataclass(frozen=True)
class Current:
    """A version that answers."""

    learner: Learner
    form: Form | None  # none: the run read its data in a way that cannot be written down
    card: dict[str, Any]

    def predict(self, rows: Any) -> Predictions:
        """Answer a file (by its path), a table or an array, with or without its targets.

        Without a form it takes a tensor of inputs, as `learner.predict` does.
        """
        if self.form is not None:
            x = read_inputs(self.form, rows)
        elif isinstance(rows, Tensor):
            x = rows
        else:
            raise ValueError(
                "this version has no form to read rows in, because its run read no folder of "
                "tables or .npz; give a tensor of inputs"
            )
        found = self.learner.predict(x)
        if found.dim() != 2:
            raise ValueError("this learner answers tokens, not rows; ask current.learner.predict")
        numbers = map(str, range(found.shape[1]))
        return Predictions(list(numbers) if self.form is None else self.form.classes, found)


def load_current(
    out: str | os.PathLike[str],
    learner: Learner | Callable[[Form], Learner] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Current:
    """Load the version that is current, also while another process trains.

    learner   for a run that was made in Python: made as it was then, or what makes it from the form
    device    of a learner that is made here
    """
    version = read_current(out)
    form = None if version.form is None else read_form(version.form)
    if isinstance(learner, Learner):
        made = learner
    elif form is None:
        raise ValueError(
            f"{out} has no form of its rows (text that was cut has none, nor has a reader of your "
            "own); give load_current the learner itself, and predict inputs"
        )
    else:
        made = _again(out, version, form, device) if learner is None else learner(form)
    try:
        made.load(version.state)
    except RuntimeError as error:  # torch's, which lists all that does not fit
        raise ValueError(
            f"the model that was given does not have the weights of {out}; make it as the run did "
            f"({str(error).splitlines()[0]})"
        ) from None
    return Current(made, form, version.card)


def _again(
    out: str | os.PathLike[str], version: Version, form: Form, device: torch.device | str
) -> Learner:
    """The learner as the command line made it."""
    run = version.card["run"]
    if ASKED not in run:  # which the command line writes
        raise ValueError(
            f"{out} holds a learner that was made in Python; give what makes it: "
            "moiety.anytime.load_current(out, make)"
        )
    return make_again(run, version.state["words"], form.shape, len(form.classes), device)
