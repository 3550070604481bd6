"""What the studies of image streams share: data, models, cells by settings, and their metrics.

    course = course_of(settings, seeds=(0, 1), device)          # computed once in a process
    metrics_of(course.lines["ensemble"][0], settings)

An arm names its learner, waiting time and width as at full scale; smaller scales have fewer
mega-batches ("batches" instead of "of") and narrower models ("narrow"), and scale waiting times
with them. Single models, ensembles and growing ensembles of one cell are one program, so that the
first arm of a cell that runs pays for the others. At full scale ("kept") what came of a program
stays on disk, for the other arms, studies and workers; `courses` makes all of it beforehand.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...anytime.backbones import MLP, VGG19, TreeMLP, TreeVGG19, crop_flip
from ...anytime.data import Examples, problem_examples
from ...anytime.fitting import Training
from ...anytime.ledger import Line, Summary, summary
from ...anytime.metering import Meter
from ...data.load import load_problem
from ...lab.checkpoint import Checkpoint
from ...lab.study import Metric, Metrics, Running, Settings
from .engine import STACKED, Cell, Course, run_cell
from .firefly import WIDEST
from .kept import kept, place

CLASSES, POINTS = 10, 20  # of all sets; of a curve, each of which is synced to disk
BEYOND = 1.1  # times the cost of a single model: about equal
TRAININGS: dict[str, dict[str, Any]] = {  # digest 4, section 4.3
    "mlp": {},
    "vgg": {"method": "sgd", "options": {"momentum": 0.9, "weight_decay": 1e-4}},
}
PERIODS = {"vgg": {10: 2, 50: 5}}  # phases between growths in the paper's code, by all phases
TRAINED = ("epochs", "patience", "batch")
SHAPED = ("data", "rows", "batches", "model", "width", "members", "candidates")
CELL = ("wait", "replay", "capped", "every", "kept", *SHAPED, *TRAINED)  # what decides a cell
MACHINE = (  # notes of the studies
    "seeds: as many as fit the time, set beforehand; a pilot of as many would cost as much again",
    "precision: float32; on a GPU convolutions multiply in TF32, torch's default",
    "time: at full scale the cells are trained once, by several processes that share the device "
    "(moiety.studies.anytime.courses), and kept for all studies; the seconds of an arm are its "
    "share of those of its cell, whose programs slow each other down",
)


# -- cells by settings -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def images(name: str, rows: int | None, device: torch.device) -> tuple[Examples, Examples]:
    """Images to train on, and to test on, standardised; "digits-32" are 32 pixels wide.

    rows   take so many to train on, and as many to test on
    """
    problem = load_problem(name.removesuffix("-32"))
    parts = [problem_examples(problem, part) for part in problem.splits.values()]
    train, test = Examples.join(parts[:2]), parts[2]
    if rows:
        train, test = (one.take(_some(len(one), rows)) for one in (train, test))
    if name.endswith("-32"):
        train, test = (Examples(F.interpolate(one.x, 32), one.y) for one in (train, test))
    return train.to(device), test.to(device)


def _some(whole: int, rows: int) -> Tensor:
    return torch.randperm(whole, generator=torch.Generator().manual_seed(0))[:rows]


def wait_of(settings: Settings) -> str:
    """The waiting time at this scale: the same share of the stream; policies as they are."""
    wait = settings["wait"]
    if isinstance(wait, str):
        return wait
    return str(max(1, round(wait * settings["batches"] / settings["of"])))


def width_of(settings: Settings) -> int:
    """The width of a model at this scale."""
    return max(1, settings["width"] // settings.get("narrow", 1))


def period_of(settings: Settings) -> int:
    """Phases between growths: as the paper's code has it, and else ten growths in a stream."""
    if settings.get("every") or isinstance(settings["wait"], str):
        return settings.get("every") or 1
    phases = math.ceil(settings["batches"] / int(wait_of(settings)))
    return PERIODS.get(settings["model"], {}).get(phases, max(1, phases // 10))


def cell_of(settings: Settings, device: torch.device) -> Cell:
    """What the settings of an arm say about stream, model and training."""
    train, test = images(settings["data"], settings.get("rows"), device)
    model, learner = settings["model"], settings["learner"]
    words = {word: settings[word] for word in TRAINED if word in settings}
    if model == "vgg":
        words["augment"] = crop_flip
    options: dict[str, Any] = {"every": period_of(settings)}
    if learner == "mixture":
        options = {"members": settings["members"]}
    if learner == "firefly":
        options |= {"widest": WIDEST} if model == "vgg" else {}
        options |= {word: settings[word] for word in ("candidates",) if word in settings}
    width = width_of(settings)
    shape: Any = tuple(train.x.shape[1:])

    def make(seed: int) -> nn.Module:
        tree = learner == "growing-moe"
        if model == "vgg":
            return (TreeVGG19 if tree else VGG19)(width, shape=shape)
        return (TreeMLP if tree else MLP)(width, inputs=math.prod(shape))

    return Cell(
        train=train,
        test=test,
        batches=settings["batches"],
        make=make,
        training=Training(**TRAININGS[model], **words, eval_batch=1024),
        wait=wait_of(settings),
        replay=settings.get("replay", "none"),
        classes=CLASSES,
        members=settings["members"],
        every=period_of(settings),
        options=options,
        meter=_meter(),
    )


@functools.cache
def _meter() -> Meter:
    return Meter()  # counting takes longer than training at the smallest scale


def course_of(settings: Settings, seeds: tuple[int, ...], device: torch.device) -> Course:
    """The course of the learner of an arm, and of those that are one program with it."""
    return _course(*program_of(settings), seeds, device)


def program_of(settings: Settings) -> tuple[str, tuple[str, ...]]:
    """All that decides the program of an arm, in one form for each, and its learners."""
    own = {word: settings[word] for word in CELL if settings.get(word) not in (None, False, "none")}
    own |= {"wait": wait_of(settings), "width": width_of(settings), "every": period_of(settings)}
    if own["wait"] == str(settings["batches"]):  # one phase: there is nothing to replay
        own = {word: value for word, value in own.items() if word not in ("replay", "capped")}
    names: Sequence[str] = [settings["learner"]]
    alone = settings.get("alone") or settings["width"] not in settings["widths"]
    if settings["learner"] in STACKED and not alone:
        names = STACKED[:2] if "capped" in own else STACKED  # of equal steps, gEns has no arm
    own["learner"] = names[0]
    return json.dumps(own, sort_keys=True), tuple(names)


@functools.cache
def _course(
    words: str, names: tuple[str, ...], seeds: tuple[int, ...], device: torch.device
) -> Course:
    settings = json.loads(words)
    if not settings["wait"].isdigit() and len(seeds) > 1:
        # A policy that sees results decides for each alone.
        return _joined([_course(words, names, (seed,), device) for seed in seeds], names)
    if not settings.get("kept"):
        return _run(settings, names, seeds, device)
    asked = {**settings, "names": names, "seeds": seeds, "device": device.type}
    checkpoint = Checkpoint(place("course", asked).parent / "state")
    made = kept("course", asked, lambda: vars(_run(settings, names, seeds, device, checkpoint)))
    checkpoint.remove()
    return Course(**made)


def _run(
    settings: Settings,
    names: tuple[str, ...],
    seeds: tuple[int, ...],
    device: torch.device,
    checkpoint: Checkpoint | None = None,
) -> Course:
    like = None
    if settings.get("capped"):
        free = {word: v for word, v in settings.items() if word not in ("capped", "replay")}
        like = _course(json.dumps(free, sort_keys=True), STACKED, seeds, device)
    cell = cell_of({"of": settings["batches"], **settings}, device)
    return run_cell(cell, seeds, names, like=like, checkpoint=checkpoint)


def _joined(courses: Sequence[Course], names: Sequence[str]) -> Course:
    lines = {name: [one.lines[name][0] for one in courses] for name in names}
    return Course(lines)


# -- what is measured ------------------------------------------------------------------------------

LOWER: dict[str, Any] = {"better": "lower", "format": ".2%"}
PLAIN: dict[str, Any] = {"better": "", "split": ""}
METRICS = {
    "average error": Metric("Average error over the stream (CER / B)", **LOWER),
    "final error": Metric("Error at the end", **LOWER),
    "early error": Metric("Average error over the first tenth", **LOWER),
    "error after a tenth": Metric("Error after a tenth of the stream", **LOWER),
    "tenth or end": Metric(
        "Error after a tenth of the stream if large, at the end if small", **LOWER
    ),
    "compute": Metric("Comp: TFLOPs of training and growing, both ways", format=".3g", **PLAIN),
    "compute, forward": Metric("Comp as in the paper: forward TFLOPs", format=".3g", **PLAIN),
    "relative compute": Metric("Comp, as a multiple of the single model's", better="lower"),
    "memory": Metric("Mem: million parameters, summed over the stream", format=".3g", **PLAIN),
    "gain at equal compute": Metric(
        "Average error that is saved against a single model of equal Comp", format=".2%"
    ),
    "gain at equal memory": Metric(
        "Average error that is saved against a single model of equal Mem", format=".2%"
    ),
    "steps": Metric("Training steps", format="d", **PLAIN),
    "seconds": Metric("Seconds, its share of its program's", format=".3g", **PLAIN),
}


def metrics_of(lines: Sequence[Line], settings: Settings) -> dict[str, float | None]:
    """The metrics of one learner with one seed, but those beside others."""
    found, errors = summary(lines), [line["error"] for line in lines]
    tenth = math.ceil(len(errors) / 10)
    large = settings["width"] == max(settings["widths"])
    return {
        **dict.fromkeys(METRICS),
        "average error": found.average,
        "final error": found.final,
        "early error": math.fsum(errors[:tenth]) / tenth,
        "error after a tenth": errors[tenth - 1],
        "tenth or end": errors[tenth - 1] if large else found.final,
        "compute": spent(found) / 1e12,
        "compute, forward": found.comp_forward / 1e12,
        "memory": found.mem / 1e6,
        "steps": sum(line["steps"] for line in lines),
        "seconds": math.fsum(sum(line["seconds"].values()) for line in lines),
    }


def run_block(runs: Sequence[Running]) -> list[Metrics]:
    """All seeds of one arm; those past "copies", which nobody asked for, are not trained."""
    settings, device = runs[0].settings, runs[0].device
    asked = runs[: settings.get("copies")]
    seeds = tuple(run.seed for run in asked)
    course = course_of(settings, seeds, device)
    ladder = ladder_of(settings, seeds, device)
    metrics: list[Metrics] = []
    for i, run in enumerate(asked):
        lines = course.lines[settings["learner"]][i]
        draw(run, lines)
        metrics.append({**metrics_of(lines, settings), **beside(lines, settings, ladder, i)})
    return metrics + [dict.fromkeys(METRICS) for _ in runs[len(asked) :]]


def draw(run: Running, lines: Sequence[Line]) -> None:
    """The learning curve, thinned; and what the page says of the model."""
    run.curve.rewind(-1)
    every = math.ceil(len(lines) / POINTS)
    for line in lines:
        if line["t"] in (1, len(lines)) or line["t"] % every == 0:
            run.curve.append(line["t"], loss=line["loss"], error=line["error"])
    run.extra["parameters"] = lines[-1]["parameters"]
    run.extra["seconds"] = math.fsum(sum(line["seconds"].values()) for line in lines)
    run.tick(1.0)


# -- beside single models --------------------------------------------------------------------------


def ladder_of(settings: Settings, seeds: tuple[int, ...], device: torch.device) -> list[Course]:
    """Single models of several widths with the same waiting time, where an arm asks for them."""
    widths = settings["ladder"] if settings.get("beside") else []
    if not widths and settings["width"] in settings["widths"]:
        widths = [settings["width"]]
    plain = {**settings, "learner": "single", "replay": None, "capped": None, "every": None}
    return [course_of({**plain, "width": width}, seeds, device) for width in widths]


def beside(
    lines: Sequence[Line], settings: Settings, ladder: Sequence[Course], i: int
) -> dict[str, float | None]:
    """What is saved against single models of equal cost, and the cost beside that of one."""
    steps = [summary(course.lines["single"][i]) for course in ladder]
    mine, found = summary(lines), dict[str, float | None]()
    if len(steps) > 1:
        for word, cost in (("compute", spent), ("memory", lambda one: one.mem)):
            equal = interpolate([(cost(one), one.average) for one in steps], cost(mine))
            found[f"gain at equal {word}"] = None if equal is None else equal - mine.average
    widths = settings["ladder"] if len(steps) > 1 else [settings["width"]]
    own = [one for width, one in zip(widths, steps) if width == settings["width"]]
    if own:
        found["relative compute"] = spent(mine) / spent(own[0])
    return found


def spent(one: Summary) -> float:
    """FLOPs of training, and of growing, which for Firefly is training, too."""
    return one.comp + one.comp_growth


def interpolate(points: Sequence[tuple[float, float]], cost: float) -> float | None:
    """An error at some cost: linear in the logarithm between neighbours.

    As at an end up to a tenth beyond it, and none further out: costs would not be equal.
    """
    points = sorted(points)
    (least, first), (most, last) = points[0], points[-1]
    if not least / BEYOND <= cost <= most * BEYOND:
        return None
    if cost <= least or cost >= most:
        return first if cost <= least else last
    (low, a), (high, b) = next(pair for pair in pairwise(points) if cost <= pair[1][0])
    return a + (b - a) * math.log(cost / low) / math.log(high / low)
