"""How fast errors fall with n: fits of one n, what may be said of them, and slopes over n.

    point = measure(truth, sizes, gate, n, effort, seed=0, device=device)
    slope([point, ...], "expert, single")      # of log error on log n; None where not solved

A point, the repetitions at one n, is solved if the fits are: where more iterations would lower the
loss by little of the squared function error (median and 90th percentile), and where fits started at
the truth, a diagnostic that the fitter itself never sees, rarely end lower. Points that are not
solved are kept and shown, and enter no slope.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .fitter import AGREE, Box, Fit, fit
from .regression import NOISE, Atoms, Expert, Gate, flat, free_count, inputs, predict
from .voronoi import KINDS, PARTS, Cells, errors, loss_1, loss_2, relabel, settle

MEDIAN, TAIL = 0.05, 0.2  # of the squared function error: most that is left to optimise
LOWER = 0.05  # most fits that may end lower when started at the truth
NEEDED = 3  # solved n's for a slope, which span a factor of ten
SEEN = 0.25  # least share of the repetitions that a median is taken of
PROBE = 4096  # inputs on which functions are compared
WIDER = 10_000  # points on which grown starts are compared
SPREAD = 2.0  # most by which a twin is moved in such a start
NEAR = 0.05  # the same in starts at the truth, so that twins differ
BOX = Box()  # of every fit
SLOPES = ("function", *(f"{part}, {kind}" for part in PARTS for kind in KINDS), "L1", "L2")
FACTS = ("touched", "gradient", "gap", "agreed", "left", "left, tail", "lower", "moved", "empty")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a regression: inputs, true atoms, fitted atoms, and the kind of experts."""

    dim: int
    true: int
    fitted: int
    expert: Expert

    @property
    def name(self) -> str:
        return f"d {self.dim}, {self.fitted} on {self.true}"

    @property
    def parameters(self) -> int:
        return free_count(self.fitted, self.dim, self.expert)

    def samples(self, grid: Sequence[int]) -> list[int]:
        """Those n of a grid that are at least ten times the parameters."""
        return [n for n in grid if n >= 10 * self.parameters]


@dataclass(frozen=True)
class Effort:
    """How hard each fit is worked at, and how many there are."""

    repetitions: int
    restarts: int
    iterations: int
    polish: int = 3
    grown: int = 0  # starts from a fit with one atom less, one of whose atoms is doubled
    search_points: int = 2000


@dataclass(frozen=True)
class Point:
    """What the repetitions at one n gave."""

    n: int
    medians: dict[str, float | None]  # of the errors named in SLOPES
    facts: dict[str, float | None]  # shares of fits and medians, named in FACTS
    solved: bool


def measure(
    truth: Atoms,
    sizes: Sizes,
    gate: Gate,
    n: int,
    effort: Effort,
    *,
    seed: int,
    device: torch.device,
) -> Point:
    """Fit one true mixture on as many samples of n points as there are repetitions."""
    g = torch.Generator().manual_seed(1_000_003 * seed + n)  # the same data for all gates
    x = inputs(n, sizes.dim, g, effort.repetitions).to(device)
    noise = torch.randn(x.shape[:2], generator=g, dtype=x.dtype).to(device)
    probe = inputs(PROBE, sizes.dim, g).to(device)
    start = at_truth(truth, sizes, effort.repetitions, g).to(device)
    truth = truth.each(lambda t: t.to(device))
    y = predict(truth, x, gate, sizes.expert) + NOISE * noise
    work: Callable[..., Fit] = functools.partial(
        fit,
        gate=gate,
        expert=sizes.expert,
        box=BOX,
        iterations=effort.iterations,
        search_points=effort.search_points,
        noise=NOISE,
        generator=g,
    )
    found = search(work, x, y, sizes.fitted, effort, g)
    ahead = work(x, y, sizes.fitted, start=start)
    found, cells, moved = labelled(work, x, y, found, truth, gate, sizes)
    told = judged(found, cells, truth, probe, gate, sizes.expert)
    return conclude(n, told, found, cells, ahead, moved)


def search(
    work: Callable[..., Fit], x: Tensor, y: Tensor, k: int, effort: Effort, g: torch.Generator
) -> Fit:
    """The best fit from random starts, and from fits with an atom less, if so many are grown.

    Fits with an atom more than the truth have many minima, which few points do not rank.
    """
    found = work(x, y, k, restarts=effort.restarts, polish=effort.polish)
    if not effort.grown:
        return found
    less = work(x, y, k - 1, restarts=effort.restarts, polish=effort.polish).atoms
    several = less.each(lambda t: t.cpu()[:, None].expand(-1, effort.grown, *t.shape[1:]))
    wide = SPREAD * torch.rand(len(x), effort.grown, generator=g)
    start = flat(with_twin(several, wide, g)).to(x)
    again = work(x, y, k, start=start, polish=effort.polish, search_points=WIDER)
    return merged(found, again, found.loss > 0)


def at_truth(truth: Atoms, sizes: Sizes, count: int, g: torch.Generator) -> Tensor:
    """Starts `[count, 1, P]` at the truth, with twins of its atoms to make up their number."""
    many = truth.each(lambda t: t.expand(count, 1, *t.shape))
    for _ in range(sizes.fitted - sizes.true):
        many = with_twin(many, torch.full((count, 1), NEAR), g)
    return flat(many)


def labelled(
    work: Callable[..., Fit],
    x: Tensor,
    y: Tensor,
    found: Fit,
    truth: Atoms,
    gate: Gate,
    sizes: Sizes,
) -> tuple[Fit, Cells, Tensor]:
    """Fits and their cells, polished again where they took another atom as reference, and where."""
    limit = BOX.b1 * sizes.dim**0.5
    cells = settle(found.atoms, truth, gate, sizes.expert, limit)
    moved = cells.moved & ~cells.empty
    if not moved.any():
        return found, cells, moved
    start = flat(relabel(found.atoms, cells, gate, limit))[moved, None]
    found = merged(found, work(x[moved], y[moved], sizes.fitted, start=start), moved)
    return found, settle(found.atoms, truth, gate, sizes.expert, limit), moved


def merged(found: Fit, again: Fit, rows: Tensor) -> Fit:
    """Fits of these rows in place of those before, where they are as good.

    A fit from one start knows no gap between restarts: that of before stays.
    """
    where = rows.nonzero().squeeze(-1)
    good = again.loss <= found.loss[where] + AGREE * again.loss
    where = where[good]

    def take(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy(0, where, new[good])

    values = {f.name: getattr(found, f.name) for f in dataclasses.fields(Fit)}
    kept = ("atoms",) if again.gap.isfinite().all() else ("atoms", "gap", "solved")
    changed = {n: take(v, getattr(again, n)) for n, v in values.items() if n not in kept}
    pairs = zip(*((some.b1, some.b0, some.eta) for some in (found.atoms, again.atoms)))
    return Fit(**values | changed | {"atoms": Atoms(*(take(*pair) for pair in pairs))})


def judged(
    found: Fit, cells: Cells, truth: Atoms, probe: Tensor, gate: Gate, expert: Expert
) -> dict[str, Tensor]:
    """All errors of the fits, one value each."""
    off = predict(found.atoms, probe, gate, expert) - predict(truth, probe, gate, expert)
    told = {"function": off.square().mean(-1).sqrt(), **errors(cells, truth, gate, expert)}
    losses = {"L1": loss_1(cells, truth, expert), "L2": loss_2(cells, truth, expert)}
    return told | {name: loss.masked_fill(cells.empty, torch.nan) for name, loss in losses.items()}


def conclude(
    n: int, told: Mapping[str, Tensor], found: Fit, cells: Cells, ahead: Fit, moved: Tensor
) -> Point:
    """Medians over the repetitions, and whether they are solved."""
    square = told["function"].square()
    left = found.optimisation_error / square
    lower = (found.loss - ahead.loss) / square > MEDIAN
    facts = {
        "touched": found.touched.double().mean(),
        "gradient": found.projected_gradient.median(),
        "gap": (found.gap / square).median(),
        "agreed": found.solved.double().mean(),
        "left": left.median(),
        "left, tail": left.quantile(0.9),
        "lower": lower.double().mean(),
        "moved": moved.double().mean(),
        "empty": cells.empty.double().mean(),
    }
    small = facts["left"] <= MEDIAN and facts["left, tail"] <= TAIL
    plain = {name: v.item() if v.isfinite() else None for name, v in facts.items()}
    medians = {name: median(value) for name, value in told.items()}
    return Point(n, medians, plain, bool(small and facts["lower"] <= LOWER))


def median(values: Tensor) -> float | None:
    """The median of those that are numbers; None where these are few."""
    kept = values[values.isfinite()]
    return kept.median().item() if len(kept) >= max(SEEN * len(values), 1) else None


def with_twin(atoms: Atoms, spread: Tensor, generator: torch.Generator) -> Atoms:
    """Atoms `[B, r, ...]` with one more each: an atom's twin, which takes part of its mass.

    spread `[B, r]`: the standard deviation by which the twin is moved.
    """
    which = torch.randint(atoms.k, (*spread.shape, 1, 1), generator=generator)
    share = torch.rand(*spread.shape, 1, generator=generator).double().clamp(0.01, 0.99)
    table, b0 = atoms.table(), atoms.dim
    twin = table.take_along_dim(which, -2)
    noise = torch.randn(twin.shape, generator=generator, dtype=twin.dtype)
    twin = twin + spread[..., None, None] * noise
    twin[..., b0] += share.log()
    rest = table[..., b0].scatter_add(-1, which[..., 0], (1 - share).log())
    table = torch.cat([twin, table], -2)  # the reference stays last
    table[..., 1:, b0] = rest
    table[..., b0] -= rest[..., -1:]
    return Atoms.of_table(table, atoms.dim)


def slope(points: Sequence[Point], name: str) -> float | None:
    """Of log median error on log n, over the solved n's; None where there are too few."""
    medians = {point.n: point.medians[name] for point in points if point.solved}
    pairs = [(math.log(n), math.log(value)) for n, value in medians.items() if value]
    if len(pairs) < NEEDED or pairs[-1][0] - pairs[0][0] < math.log(10) - 1e-9:
        return None
    at, value = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    at = at - at.mean()
    return (at @ value / (at @ at)).item()
