"""The census-income tasks of the MMoE paper (Ma et al., KDD 2018), with weights for the examples.

    problem = census(("income", "never_married"), seed=0)    # its first pair of tasks
    problem = census(("college", "never_married"), seed=0)   # its second
    problem.weights["train"]                     # [N]: how many people each row stands for

| task | yes, where | never an input |
|---|---|---|
| income | income is over 50000 | income |
| never_married | marital status is never married | marital status |
| college | education is some college or more | education |

Some columns say "never married" in other words: the place in the household ("Child 18+ never marr")
and joint taxes. They are left out where never_married is a task; leaks="keep" keeps them, as the
public version of the tasks does (github.com/drawbridge/keras-mmoe). A column whose task is not
asked for stays an input. What "at least college" means is our reading: a third of the people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from .formats import uci
from .frame import _table, finish
from .named import MissingData, find, how_to_get
from .problem import Problem
from .published import CENSUS_CODES, CENSUS_COLUMNS
from .splits import choose
from .targets import near, settle_kinds, strata

if TYPE_CHECKING:
    import pandas

NAME = "census-income"
MADE_OF = {"income": "income", "never_married": "marital_status", "college": "education"}
TELLING = {"never_married": ("household_detail", "household_summary", "tax_filer")}
COLLEGE = (
    "Some college but no degree",
    "Associates degree-academic program",
    "Associates degree-occup /vocational",
    "Bachelors degree(BA AB BS)",
    "Masters degree(MA MS MEng MEd MSW MBA)",
    "Prof school degree (MD DDS DVM LLB JD)",
    "Doctorate degree(PhD EdD)",
)


@dataclass
class Census(Problem):
    """A problem whose examples stand for different numbers of people."""

    weights: dict[str, Tensor] = field(default_factory=dict)  # by split, [N] float32


def census(
    tasks: Sequence[str] = ("income", "never_married"),
    seed: int = 0,
    *,
    max_examples: int | None = None,
    leaks: Literal["drop", "keep"] = "drop",
    data_dir: str | Path | None = None,
) -> Census:
    """Load the set with two or more of its tasks; `seed` halves its test file into two splits.

    The halves are validation and test, as in the paper. The weights are no input: a row's weight
    says how many people of the country it stands for, not what they are like.
    """
    _check(tasks, leaks)
    frame, given = _read(data_dir)
    weights = torch.from_numpy(frame.pop("instance_weight").to_numpy(np.float32))
    out = [MADE_OF[task] for task in tasks]
    if leaks == "drop":
        out += [column for task in tasks for column in TELLING.get(task, ())]
    notes = [f"tasks: {', '.join(tasks)}; not among the inputs: {', '.join(out)}"]
    labels, kinds = settle_kinds(
        _labels(frame, tasks), dict.fromkeys(tasks, "classes"), NAME, notes
    )
    inputs = frame.drop(columns=list({*out, "never_married"}))  # which the reader has made
    given = _halve(given, seed, notes)
    rows = choose(strata(labels, kinds), given, seed=seed, limit=max_examples, notes=notes)
    splits, found = _table(NAME, inputs, labels, kinds, rows, leaks, notes)
    problem = finish(NAME, "table", labels, kinds, splits, rows, notes, found, order=("no", "yes"))
    return Census(**vars(problem), weights={split: weights[these] for split, these in rows.items()})


def _check(tasks: Sequence[str], leaks: str) -> None:
    if isinstance(tasks, str) or not tasks or len(set(tasks)) < len(tasks):
        raise ValueError(f"tasks are a list of different names, of {', '.join(MADE_OF)}")
    for task in tasks:
        if task not in MADE_OF:
            hint = near(task, list(MADE_OF))
            raise ValueError(f"there is no task {task!r}; there are {', '.join(MADE_OF)}{hint}")
    if leaks not in ("drop", "keep"):
        raise ValueError(f"leaks must be drop or keep, got {leaks!r}")


def _read(data_dir: str | Path | None) -> tuple[pandas.DataFrame, np.ndarray]:
    """The rows of the built-in set, here with their weights, and the file of each."""
    found = find(NAME, data_dir)
    if found is None:
        raise MissingData(f"{NAME} is not here; {how_to_get(NAME, data_dir)}")
    files = {"train": f"{NAME}.data", "test": f"{NAME}.test"}
    read = uci(CENSUS_COLUMNS, files, (), married="marital_status", codes=CENSUS_CODES)
    table = read(found.content)
    assert table.given is not None  # two files
    return table.frame, table.given


def _labels(frame: pandas.DataFrame, tasks: Sequence[str]) -> pandas.DataFrame:
    """A column of yes and no for each task."""
    import pandas

    yes = {
        "income": frame["income"] == "50000+",
        "never_married": frame["never_married"] == "yes",
        "college": frame["education"].isin(COLLEGE),
    }
    return pandas.DataFrame({task: yes[task].map({True: "yes", False: "no"}) for task in tasks})


def _halve(given: np.ndarray, seed: int, notes: list[str]) -> np.ndarray:
    """Make half of the test rows those of validation."""
    rows = np.flatnonzero(given == "test")
    half = np.random.default_rng([seed, 1]).permutation(rows)[: len(rows) // 2]
    given = given.astype(object)
    given[half] = "validation"
    notes.append(f"split: the test file is halved into validation and test by seed {seed}")
    return given
