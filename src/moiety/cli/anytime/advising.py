"""`moiety anytime --advise`: which wait, and to grow or not, tried on what arrived first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .asked import Model, build

if TYPE_CHECKING:
    from ...anytime.advise import Maker, Trial
    from ...anytime.base import Learner
    from ...anytime.policies import Replay
    from ...anytime.stream import Seen, Stream

GROWS = "growing-ensemble"  # where the learner that was asked for does not grow
ASIDE = ("wait", "watch", "test")
BUDGET, MARGIN = "10m", 0.01


def makers(
    model: Model, width: int, learner: str, options: dict[str, Any], source: Stream
) -> dict[str, Maker]:
    """The learner that was asked for and one that grows; or a single one and that which grows."""
    from ...anytime.metering import Meter

    common = {"device": options["device"], "training": options["training"], "meter": Meter()}
    own = {word: value for word, value in options.items() if word not in (*common, "seed")}
    first = cache(lambda: source[1])

    def maker(name: str, words: dict[str, Any]) -> Maker:
        def make(seed: int) -> Learner:
            return build(
                model, width, name, {**words, **common, "seed": seed}, first(), source.classes
            )

        return make

    if learner.startswith("growing"):
        return {"single": maker("single", {}), learner: maker(learner, own)}
    return {learner: maker(learner, own), GROWS: maker(GROWS, {})}


def tell_aside(asked: list[str]) -> None:
    """Say which of the options that were given have no part in advice."""
    aside = [f"--{name}" for name in ASIDE if name in asked]
    if aside:
        typer.echo(
            f"--advise leaves {' and '.join(aside)} aside: it tries waits of its own on what has "
            "arrived, and scores what arrives next",
            err=True,
        )


def refuse(**given: object) -> None:
    """Raise for an option that a run would ignore."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name} goes with --advise")


def run(
    source: Stream,
    arms: dict[str, Maker],
    out: Path,
    replay: Replay,
    on_seen: Callable[[list[Seen]], None],
    *,
    first: int | None,
    seeds: int | None,
    budget: str | None,
    margin: float | None,
) -> None:
    """Try all arms, print the recommendation and write it to OUT/advice.json."""
    from ... import io
    from ...anytime.advise import SEEDS, advise
    from ...lab.advice import recommend
    from ...lab.claims import check_margin
    from ...lab.plan import parse_time

    seconds, smallest = parse_time(budget or BUDGET), MARGIN if margin is None else margin
    check_margin(smallest)
    with io.lease(out):
        on_seen(source.poll())
        if not source.known():
            raise ValueError("nothing has arrived yet that can be tried")
        trials = advise(
            source,
            arms,
            first=first,
            seeds=SEEDS if seeds is None else seeds,
            replay=replay,
            out=out,
            budget=seconds,
            on_trial=Progress(),
        )
        advice = recommend(trials, smallest)
        path = io.write_json(out / "advice.json", advice.plain())
    typer.echo(f"\n{advice}\nThis is {path}, too; no test set was looked at.")


class Progress:
    """Says each trial as it ends, and about how long the rest takes."""

    def __init__(self) -> None:
        self.spent = 0.0

    def __call__(self, trial: Trial, number: int, of: int) -> None:
        from ...lab.progress import duration

        self.spent += trial.seconds
        left = duration(self.spent / number * (of - number))
        what = f"  {number}/{of}  wait {trial.wait}, {trial.learner}, seed {trial.seed}"
        typer.echo(f"{what}: {duration(trial.seconds)}; about {left} left", err=True)
