"""What `moiety anytime` was asked for: the stream, its test set, and the learner."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from ... import io
from .telling import mega_batches

if TYPE_CHECKING:
    from ...anytime.base import Learner
    from ...anytime.data import Batch, Examples
    from ...anytime.readers import Form
    from ...anytime.stream import Stream

Model = Literal["mlp", "vgg19"]
JOURNAL = "journal.jsonl"
PYTHON_ONLY = "growing-switch"  # which the command line has no model for
NO_TEXT = "the command line has no language model; give one to moiety.anytime.run_stream"


def given(context: typer.Context) -> list[str]:
    """The options that the command line names, not those that have their default."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    named = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return [name.replace("_", "-") for name in named]


def check_learner(name: str, options: dict[str, Any]) -> None:
    """Raise for a learner, or options of it, that there are not: before a file takes a number."""
    from ...anytime.learners import check_name, learners
    from ...anytime.making import make_learner

    if name == PYTHON_ONLY:
        raise ValueError(
            f"--learner {PYTHON_ONLY} is Python only: it grows a sparse transformer of yours, "
            "which moiety.anytime.learner takes; here, take growing-moe"
        )
    check_name(name, learners().keys() - {PYTHON_ONLY})
    make_learner(name, options, model="mlp", width=1, shape=(1,), classes=2)


def check_form(model: Model, form: Form) -> None:
    """Raise for files that the model cannot learn from: before one of them takes a number."""
    from ...anytime.making import make_learner

    if form.kind == "text":
        raise ValueError(NO_TEXT)
    make_learner("single", {}, model=model, width=1, shape=form.shape, classes=len(form.classes))


def read_options(given: list[str]) -> dict[str, Any]:
    """`["members=3", "start=scratch"]` as words and values."""
    options: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option takes name=value, got {each!r}")
        if name in ("seed", "device", "training", "meter"):
            raise ValueError(f"--option {name} is none of the learner: see moiety anytime --help")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def refuse_of_folders(**given: object) -> None:
    """Raise for an option that a data set would ignore."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"--{name} is for a folder that fills; a data set that is cut (--batches) has its "
                "own classes, end and test set"
            )


def refuse_arrivals(name: str) -> None:
    """Raise for a folder that fills, which is no data set to cut."""
    from ...anytime.arrivals import candidates
    from ...data.named import NAMED
    from ...data.splits import split_of
    from ...tables import table_kind

    path = Path(name).expanduser()
    inside = candidates(path) if name not in NAMED and path.is_dir() else []
    arrived = [each for each in inside if table_kind(each) or each.suffix.lower() == ".npz"]
    splits = any(split_of(each.name.split(".")[0]) for each in arrived)
    if arrived and not splits and not any(each.is_dir() for each in inside):
        raise ValueError(
            f"--batches cuts a data set, and {name} holds files that arrive, such as "
            f"{arrived[0].name}; leave --batches out, or give one file"
        )


def own_journal(of_run: Path, own: Path) -> Path:
    """The journal of a trial, which begins with the mega-batches of the run where there is one."""
    if of_run.exists() and not own.exists():
        io.write_atomic(own, of_run.read_bytes())
    return own


def folder(
    path: str,
    journal: Path,
    model: Model,
    target: str | None,
    classes: list[str] | None,
    test: Path | None,
    settle: float | None,
    overlap: float,
    seed: int,
) -> tuple[Stream, Callable[[Batch], Examples] | None]:
    """A folder that fills, and what reads the test file in the form of its first file."""
    from ...anytime.readers import Reader
    from ...anytime.stream import Folder

    if not Path(path).is_dir():
        raise ValueError(
            f"--stream {path} is no folder; give the folder that fills, or --batches to cut a "
            "data set"
        )
    if test is not None and not test.is_file():
        raise ValueError(f"--test {test} is no file")
    read = Reader(target=target, classes=classes, fits=partial(check_form, model))
    with warnings.catch_warnings(record=True) as warned:  # without a line of source
        warnings.simplefilter("always")
        stream = Folder(path, journal, read, settle=settle, test=test, overlap=overlap, seed=seed)
    for each in warned:
        typer.echo(f"  {each.message}", err=True)
    return stream, None if test is None else (lambda first: stream.test())


def data_set(
    name: str, batches: int, target: str | None, data_dir: Path | None, seed: int
) -> tuple[Stream, Examples]:
    """A data set cut into mega-batches, and its test split."""
    from ...anytime.data import problem_examples
    from ...anytime.stream import cut
    from ...data import load_problem

    refuse_arrivals(name)
    problem = load_problem(name, targets=target, data_dir=data_dir, seed=seed)
    typer.echo(problem.name)
    for note in [*problem.notes, *(f"leak: {leak}" for leak in problem.leaks)]:
        typer.echo(f"  {note}")
    stream = cut(problem, batches, seed=seed)
    rows = len(problem.train) + len(problem.validation)
    typer.echo(
        f"  stream: {rows} examples, train and validation together, in {mega_batches(batches)}, "
        "which have validation rows of their own; test stays apart"
    )
    return stream, problem_examples(problem, problem.test)


def build(
    model: Model, width: int, learner: str, options: dict[str, Any], first: Batch, classes: int
) -> Learner:
    """The learner for data like the first mega-batch."""
    from ...anytime.making import make_learner

    if not first.train.x.is_floating_point():
        raise ValueError(NO_TEXT)
    shape = tuple(first.train.x.shape[1:])
    return make_learner(learner, options, model=model, width=width, shape=shape, classes=classes)
