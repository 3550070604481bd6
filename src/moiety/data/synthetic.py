"""The two synthetic problems of DSelect-k (arXiv 2106.03760, appendix C.1 and C.2), with their truth.

    problem = multitask_regression(128, seed=0)  # 8 groups of 16 tasks, made by 4 experts each
    problem.train.inputs["numbers"]              # [100000, 10]
    problem.train.targets["task-5"]              # [100000]
    problem.groups, problem.weights              # which tasks belong together, and their mixtures

    problem = expert_recovery(seed=0, placement="shuffled")
    problem.modules()                            # 16 frozen experts; those at `places` made the labels

Where the paper leaves something open, the docstrings say what was chosen. Parts are drawn from
streams of their own: more tasks add groups to the same first ones, fewer examples are the first of
the many, and the two placements hold the same experts.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .problem import Problem, Split, Target

WIDTH = 10  # numbers of an example
UNITS = 4  # ReLU units of an expert
GROUP_EXPERTS, GROUP_TASKS = 4, 16
CORRELATION = 0.8  # of the weight vectors of two tasks of a group
BALANCED = (0.4, 0.6)  # share of positive labels that a generator of labels must have
X, EXPERTS, HEAD, ORDER = range(4)  # streams of random numbers, besides those of the groups


def _none() -> Tensor:
    return torch.empty(0)


@dataclass
class Regression(Problem):
    """Regression tasks in groups, and how they were made."""

    groups: Tensor = field(default_factory=_none)  # [tasks], the group of each
    weights: Tensor = field(default_factory=_none)  # [tasks, 4], of the experts of its group
    experts: Tensor = field(default_factory=_none)  # [4 · groups, 10, 4], of their ReLU units


@dataclass
class Recovery(Problem):
    """Labels made by a few experts, and the many among which they are to be found."""

    experts: Tensor = field(default_factory=_none)  # [16, 10, 4]
    head: Tensor = field(default_factory=_none)  # [4], of the logistic unit
    places: list[int] = field(default_factory=list)  # of the experts that made the labels

    def modules(self) -> nn.ModuleList:
        """The experts, frozen: Dense(4, ReLU) without bias each."""
        return nn.ModuleList(map(_frozen, self.experts))


def multitask_regression(
    tasks: int = 128,
    seed: int = 0,
    *,
    counts: Sequence[int] = (100_000, 20_000, 20_000),
    combine: Literal["gaussian", "convex"] = "gaussian",
) -> Regression:
    """Draw appendix C.1: `tasks` in groups of 16, each a mixture of the 4 experts of its group.

    An expert is the sum of 4 ReLU units. The paper calls the mixture convex and then draws Gaussian
    weights. "gaussian" takes them as drawn: that is the recipe as printed, but a gate, whose
    weights are positive and sum to 1, reaches it only with a tower for each task. "convex" takes
    their softmax, which a gate can be equal to. Nothing is standardised, and there is no noise.
    """
    if combine not in ("gaussian", "convex"):
        raise ValueError(f"combine must be gaussian or convex, got {combine!r}")
    if tasks < GROUP_TASKS or tasks % GROUP_TASKS:
        raise ValueError(f"tasks come in groups of {GROUP_TASKS}; got {tasks} of them")
    x = _inputs(seed, counts)
    experts, weights, targets = [], [], []
    for group in range(tasks // GROUP_TASKS):
        draw = np.random.default_rng([seed, ORDER + 1 + group])
        made = draw.standard_normal((GROUP_EXPERTS, WIDTH, UNITS), np.float32)
        mixture = _correlated(draw)
        if combine == "convex":
            mixture = np.exp(mixture) / np.exp(mixture).sum(1, keepdims=True)
        targets.append(_relu(x, made).sum(-1) @ mixture.T)
        experts.append(made)
        weights.append(mixture)
    names = [f"task-{task}" for task in range(tasks)]
    y = torch.from_numpy(np.concatenate(targets, 1))
    return Regression(
        f"multitask-regression-{tasks}",
        "table",
        [Target(name, "number") for name in names],
        *_splits(torch.from_numpy(x), dict(zip(names, y.unbind(1))), counts),
        **_described(f"{tasks} tasks in groups of {GROUP_TASKS}, {combine} weights", seed),
        groups=torch.arange(tasks) // GROUP_TASKS,
        weights=torch.from_numpy(np.concatenate(weights)),
        experts=torch.from_numpy(np.concatenate(experts)),
    )


def expert_recovery(
    seed: int = 0,
    *,
    placement: Literal["first", "shuffled"] = "first",
    counts: Sequence[int] = (10_000, 10_000, 10_000),
    experts: int = 16,
    true: int = 4,
) -> Recovery:
    """Draw appendix C.2: labels of `true` experts, which are hidden among `experts` of their kind.

    The label is whether the logistic unit on the mean of the true experts is positive. All weights
    are standard normal, without biases. Since the experts are never negative, a logistic unit whose
    weights have one sign gives one class: it is drawn anew until both classes have about 40 % or
    more. The true experts are the first ones, whose codes share bits, or anywhere: the paper does
    not say where. It has no test split: ours is drawn after its two.
    """
    if placement not in ("first", "shuffled"):
        raise ValueError(f"placement must be first or shuffled, got {placement!r}")
    if not 1 <= true <= experts:
        raise ValueError(f"{true} true experts among {experts}: 1 to {experts} can be true")
    x = _inputs(seed, counts)
    draw = np.random.default_rng([seed, EXPERTS])
    made = draw.standard_normal((experts, WIDTH, UNITS), np.float32)
    head, labels = _label(x, made[:true], seed)
    order = np.arange(experts)
    if placement == "shuffled":
        order = np.random.default_rng([seed, ORDER]).permutation(experts)
    return Recovery(
        f"expert-recovery-{placement}",
        "table",
        [Target("label", "classes", ["no", "yes"])],
        *_splits(torch.from_numpy(x), {"label": torch.from_numpy(labels)}, counts),
        **_described(f"{true} of {experts} experts made the labels, {labels.mean():.1%} yes", seed),
        experts=torch.from_numpy(made[order]),
        head=torch.from_numpy(head),
        places=sorted(np.flatnonzero(order < true).tolist()),
    )


def _inputs(seed: int, counts: Sequence[int]) -> np.ndarray:
    if len(counts) != 3 or min(counts) < 1:
        raise ValueError(f"counts are of train, validation and test, 1 or more; got {counts}")
    draw = np.random.default_rng([seed, X])
    return draw.standard_normal((sum(counts), WIDTH), np.float32)


def _relu(x: np.ndarray, experts: np.ndarray) -> np.ndarray:
    """The units of each expert: [N, experts, 4]."""
    flat = x @ experts.transpose(1, 0, 2).reshape(WIDTH, -1)
    return np.maximum(flat, 0).reshape(len(x), len(experts), UNITS)


def _correlated(draw: np.random.Generator) -> np.ndarray:
    """Standard normal weights [16, 4]: a part that the tasks share and a part of their own."""
    shared = draw.standard_normal((1, GROUP_EXPERTS), np.float32)
    own = draw.standard_normal((GROUP_TASKS, GROUP_EXPERTS), np.float32)
    return np.float32(CORRELATION**0.5) * shared + np.float32((1 - CORRELATION) ** 0.5) * own


def _label(x: np.ndarray, experts: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A logistic unit with which both classes are common, and the class of every example."""
    # Judged by examples of its own, so that the unit does not depend on how many are asked for.
    draw = np.random.default_rng([seed, HEAD])
    probe = _relu(draw.standard_normal((10_000, WIDTH), np.float32), experts).mean(1)
    while True:
        head = draw.standard_normal(UNITS, np.float32)
        if BALANCED[0] <= (probe @ head > 0).mean() <= BALANCED[1]:
            return head, (_relu(x, experts).mean(1) @ head > 0).astype(np.int64)


def _splits(
    x: Tensor, targets: dict[str, Tensor], counts: Sequence[int]
) -> tuple[Split, Split, Split]:
    """Train, validation and test, in the order of the examples."""
    parts = zip(x.split(list(counts)), *(y.split(list(counts)) for y in targets.values()))
    none = [torch.empty(count, 0, dtype=torch.int64) for count in counts]
    # Cloned: a view would take the numbers of all tasks and splits along when it is pickled.
    train, validation, test = (
        Split(
            {"numbers": rows.clone(), "categories": empty},
            {name: y.clone() for name, y in zip(targets, ys)},
        )
        for (rows, *ys), empty in zip(parts, none)
    )
    return train, validation, test


def _described(note: str, seed: int) -> dict[str, Any]:
    """The fields of a problem that is a table of drawn numbers."""
    return {
        "numbers": [f"x{column}" for column in range(WIDTH)],
        "notes": [f"drawn by seed {seed}: {note}"],
    }


def _frozen(weight: Tensor) -> nn.Module:
    layer = nn.Linear(WIDTH, UNITS, bias=False)
    layer.weight = nn.Parameter(weight.T.clone(), requires_grad=False)
    return nn.Sequential(layer, nn.ReLU())
