"""How often verdicts err, in simulated studies whose truth is known.

    python benchmarks/calibration.py --out results/calibration.json

Each figure is a share of 5 000 simulated studies at the seed counts that studies use, with δ = 0.01
and a spread over seeds of δ unless said otherwise. docs/statistics.md shows the file as tables.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np
import scipy
from numpy.typing import NDArray

from moiety.io import write_json
from moiety.lab.statistics import Evidence, seeds_needed, t_interval, verdicts

DELTA = 0.01
SEEDS = (5, 8, 10, 20, 50)
IMAGES = 450  # of a test set: accuracies come in steps of 1/450
Draws = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...]], Draws]


def accuracies(draws: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Differences of two accuracies on 450 images, of mean 0."""
    rates = 0.9 + draws.normal(0, 0.005, (2, *size))
    first, second = draws.binomial(IMAGES, np.clip(rates, 0, 1)) / IMAGES
    return first - second


# Differences of mean 0, around the truth.
SHAPES: dict[str, Draw] = {
    "normal": lambda draws, size: draws.normal(0, DELTA, size),
    "accuracy of 450 images": accuracies,
    "heavy tails (t, 3 degrees)": lambda draws, size: DELTA * draws.standard_t(3, size),
    "some skew (gamma 8)": lambda draws, size: DELTA * (draws.gamma(8, 1, size) - 8) / math.sqrt(8),
    "strong skew (exponential)": lambda draws, size: DELTA * (draws.exponential(1, size) - 1),
    "two values": lambda draws, size: DELTA * draws.choice([-1.0, 1.0], size),
}


def word(differences: Draws, look: int = 1) -> str:
    return verdicts([Evidence("greater", differences, DELTA, look)])[0].word


def errors(shape: str, seeds: int, repeats: int) -> dict[str, float]:
    """Rates of false words where the difference is δ to the digit, and of intervals that cover it.

    Of a shape and its mirror image the worse one counts. A claim of "the same" holds falsely as
    often as a difference is falsely negligible.
    """
    noise = SHAPES[shape](np.random.default_rng(seeds), (repeats, seeds))
    both = [[word(DELTA + row) for row in side] for side in (noise, -noise)]
    spans = [t_interval(row) for row in noise]
    return {
        "seeds": seeds,
        "false holds": max(words.count("holds") for words in both) / repeats,
        "false same": max(words.count("negligible") for words in both) / repeats,
        "coverage": sum(low <= 0 <= high for low, high in spans) / repeats,
    }


def family(claims: int, seeds: int, repeats: int) -> float:
    """How often any of several claims, all false by a hair, holds."""
    x = np.random.default_rng(1).normal(DELTA, DELTA, (repeats, claims, seeds))
    return _share(
        any(v.word == "holds" for v in verdicts([Evidence("greater", y, DELTA) for y in rows]))
        for rows in x
    )


def looking(looks: tuple[int, ...], repeats: int) -> float:
    """How often a false claim holds at any look, when one stops as soon as it does."""
    x = np.random.default_rng(2).normal(DELTA, DELTA, (repeats, looks[-1]))
    return _share(
        any(word(row[:n], look) == "holds" for look, n in enumerate(looks, start=1)) for row in x
    )


def looking_for_free(looks: tuple[int, ...], repeats: int) -> float:
    """The same without paying, to show what the price is for."""
    x = np.random.default_rng(2).normal(DELTA, DELTA, (repeats, looks[-1]))
    return _share(any(word(row[:n]) == "holds" for n in looks) for row in x)


def decided(truth: float, spread: float, repeats: int, claims: int = 1) -> dict[str, float]:
    """How often the seeds that a pilot of five asks for decide a family of claims, each counted."""
    draws, right, planned = np.random.default_rng(3), 0, []
    for _ in range(repeats):
        pilot = draws.normal(0, spread, 5)
        planned.append(seeds_needed(pilot, DELTA, claims))
        x = draws.normal(truth, spread, (claims, planned[-1]))
        said = verdicts([Evidence("greater", y, DELTA) for y in x])
        right += sum(v.word == ("holds" if truth else "negligible") for v in said)
    return {
        "truth / δ": truth / DELTA,
        "spread / δ": spread / DELTA,
        "claims": claims,
        "median seeds": float(np.median(planned)),
        "decided": right / (repeats * claims),
    }


def _share(said: Iterator[bool]) -> float:
    every = list(said)
    return sum(every) / len(every)


def measure(repeats: int) -> dict[str, object]:
    looks = (5, 10, 15, 20, 25)
    return {
        "repeats": repeats,
        "one claim": {
            shape: [errors(shape, seeds, repeats) for seeds in SEEDS] for shape in SHAPES
        },
        "family": [
            {"claims": n, "seeds": 5, "any false holds": family(n, 5, repeats)} for n in (2, 8)
        ],
        "looks": {
            "at seeds": list(looks),
            "false holds": looking(looks, repeats),
            "false holds without paying": looking_for_free(looks, repeats),
        },
        "planned": [
            decided(truth, spread, repeats // claims, claims)
            for spread in (0.5 * DELTA, DELTA)
            for truth in (0.0, 2 * DELTA)
            for claims in (1, 5)
        ],
    }


def table(measured: dict) -> str:
    """The figures as the Markdown of docs/statistics.md."""
    lines = ["| differences | seeds | false *holds* | false *the same* | coverage |"]
    lines += ["|---|---|---|---|---|"]
    for shape, rows in measured["one claim"].items():
        for row in rows:
            rates = (row[name] for name in ("false holds", "false same", "coverage"))
            lines.append(f"| {shape} | {row['seeds']} | {' | '.join(map(percent, rates))} |")
    lines += ["", "| several claims or looks | false *holds* |", "|---|---|"]
    for row in measured["family"]:
        said = f"any of {row['claims']} claims, {row['seeds']} seeds"
        lines.append(f"| {said} | {percent(row['any false holds'])} |")
    looks = measured["looks"]
    at = f"looks at {', '.join(map(str, looks['at seeds']))} seeds, until it holds"
    lines.append(f"| {at} | {percent(looks['false holds'])} |")
    lines.append(
        f"| the same, if looks were free | {percent(looks['false holds without paying'])} |"
    )
    lines += ["", "| truth | spread | claims | planned seeds (median) | decided rightly |"]
    lines += ["|---|---|---|---|---|"]
    for row in measured["planned"]:
        cells = [f"{row['truth / δ']:g} δ", f"{row['spread / δ']:g} δ", f"{row['claims']}"]
        cells += [f"{row['median seeds']:g}", percent(row["decided"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5000)
    parser.add_argument("--out", default="results/calibration.json")
    options = parser.parse_args()
    command = f"python benchmarks/calibration.py --repeats {options.repeats}"
    machine = {"numpy": np.__version__, "scipy": scipy.__version__}
    measured = {"command": command, "machine": machine, **measure(options.repeats)}
    write_json(options.out, measured)
    print(table(measured))


if __name__ == "__main__":
    main()
