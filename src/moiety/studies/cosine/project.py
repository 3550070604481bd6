"""How long fits will take: their steps are counted, two of them are timed.

    found = speed(settings, device)
    (100 * work_of(settings, sizes)).seconds(found, workers=8)

A step of all descents of a stage costs a time for its launches, on one core of the host, and a time
that grows with descents, points and parameters, on the device, which the workers share.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...lab.study import Settings
from .course import effort_of
from .fitter import Box, Descents, Problem, advance, begin, starts
from .regression import Gate, free_count, inputs
from .slopes import WIDER, Sizes

# Shares of the steps after which most fits have ended, counted on a CPU at n = 3 000: of two atoms
# on two, and of others, whose last ones take all steps.
SOON, LATE = 0.25, 0.75


@dataclass(frozen=True)
class Speed:
    """Of a step."""

    launches: float  # seconds, whatever its size
    value: float  # seconds for a derivative: of one point, by one parameter, in one descent

    def __str__(self) -> str:
        return f"a step takes {1e3 * self.launches:.2f} ms and {1e12 * self.value:.2f} ps a value"


@dataclass(frozen=True)
class Work:
    """Steps, and the derivatives that they need."""

    steps: float = 0.0
    values: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.steps + other.steps, self.values + other.values)

    def __rmul__(self, times: float) -> Work:
        return Work(times * self.steps, times * self.values)

    def seconds(self, speed: Speed, workers: int) -> float:
        """Launches are shared out among the workers, the device is not."""
        return self.steps * speed.launches / workers + self.values * speed.value


def work_of(settings: Settings, sizes: Sizes) -> Work:
    """That of a trial: about what `slopes.measure` asks for at all n."""
    effort, total = effort_of(settings, sizes), Work()
    k, share = sizes.fitted, SOON if sizes.fitted == sizes.true == 2 else LATE
    once, twice = share * effort.iterations, 2 * share * effort.iterations
    for n in sizes.samples(settings["grid"]):
        few = min(n, effort.search_points)
        # steps, atoms, descents a repetition, points: random starts, polish, truth, relabelled
        stages = [(once, k, effort.restarts, few), (twice, k, effort.polish, n)]
        stages += [(twice, k, 1, n)] * 2
        if effort.grown:
            stages += [(once, k - 1, effort.restarts, few), (twice, k - 1, effort.polish, n)]
            stages += [(once, k, effort.grown, min(n, WIDER)), (twice, k, effort.polish, n)]
        for steps, atoms, rows, points in stages:
            each = effort.repetitions * rows * points
            values = steps * each * free_count(atoms, sizes.dim, sizes.expert)
            total += Work(steps, values)
    return total


def speed(settings: Settings, device: torch.device) -> Speed:
    """Time a step of few descents on few points, and one as large as any of the settings."""
    count, n = settings["repetitions"], max(settings["grid"])
    few, many = _time(2, min(n, 300), device), _time(3 * count, n, device)
    size = 3 * count * n * free_count(3, 2, "tanh")
    return Speed(few, max(many - few, 0.0) / size)


def _time(descents: int, n: int, device: torch.device) -> float:
    """Seconds of a step; of a few, after others that warm up."""
    g, gate = torch.Generator().manual_seed(0), Gate("perturbed", 0.5, 0.5)
    x = inputs(n, 2, g, descents).to(device)
    ends = Box().ends(3, 2, "tanh").to(x)
    problem = Problem(x, x.sum(-1), 3, gate, "tanh", ends)
    now, floor = begin(problem, starts(descents, 1, 3, 2, "tanh", g).to(x))
    _steps(problem, now, floor)
    start = time.perf_counter()
    count = _steps(problem, now, floor)
    return (time.perf_counter() - start) / count


def _steps(problem: Problem, now: Descents, floor: torch.Tensor, count: int = 3) -> int:
    for _ in range(count):
        advance(problem, now, floor)
    float(now.loss[0])  # a GPU has ended then
    return count


def seeds_within(seconds: float, work: Sequence[Work], found: Speed, workers: int) -> int:
    """How many seeds, of which each has its work, fit into a time."""
    total, count = Work(), 0
    for mine in work:
        total += mine
        if total.seconds(found, workers) > seconds:
            break
        count += 1
    return count
