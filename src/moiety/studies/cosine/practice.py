"""What the two studies in practice share: routers from settings, and how steady a routing is.

    course = Course(model, probe, recipe.steps)           # probe: inputs that never change
    kept = Kept(running.checkpoint, course)               # a killed trial keeps its course
    train(model, recipe, loss=course.heard(loss), score=course.checked(score), checkpoint=kept, …)
    course.metrics()                                      # the names of STABILITY

The measures, defined before any run:

switch rate         share of probe tokens whose first expert is another one than at the checkpoint
                    before; mean over layers and over the checkpoints of the last half of training
early switch rate   the same over the first half
spikes              times per 1000 steps that the training loss rises above the median of the 50
                    steps before by more than 5 robust standard deviations of these (1.4826 times
                    the median distance from the median); steps in a row count once
load                exp(entropy of the load) / experts: 1 is even, 1/E is one expert for all
entropy             of a token's gate over all experts, mean, divided by log E
effective rank      exp(entropy of the singular values of the centred outputs of an MoE layer,
                    summing to one) (Roy and Vetterli 2007), mean over layers

The last three are taken on the probe at the end. The spread over seeds is no number of one trial:
`spread` takes it from a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...lab.study import Metric, Metrics, Settings
from ...moe import MoE
from ...routing.cosine import GAIN
from ...train.loop import Checkpoint, Recipe
from ...watch import moe_layers, watch

BALANCE = {"switch": 0.01}  # for every arm: alone, a few experts soon take every token
TEMPERATURE = 0.3  # cosines of 16 dimensions then spread about as the scores of a linear router
SEARCHED = 2  # a run of the search for a learning rate is so many times shorter
SWITCH = 0.01  # of the switch rate, the smallest difference that matters
WINDOW, HEIGHT = 50, 5.0  # of a spike
STABILITY = {
    "switch rate": Metric("Switch rate", better="lower", format=".2%", split="validation"),
    "early switch rate": Metric("Switch rate, early", better="", format=".1%", split="validation"),
    "spikes": Metric("Loss spikes in 1000 steps", better="lower", format=".1f", split="train"),
    "load": Metric("Evenness of the load", better="higher", format=".2f", split="validation"),
    "entropy": Metric("Entropy of the gate", better="", format=".2f", split="validation"),
    "effective rank": Metric("Effective rank", better="higher", format=".1f", split="validation"),
}


# -- routers ---------------------------------------------------------------------------------------


def layer(settings: Settings, dim: int) -> MoE:
    """The MoE layer of an arm: "router", and of a cosine one "ratio" (tau/‖e‖) or "matched"."""
    k = settings["k"]
    return MoE(
        settings["router"],
        settings["experts"],
        dim=dim,
        hidden=settings["hidden"],
        activation=F.gelu,
        balance=BALANCE,
        k=k,
        renormalise=k > 1,  # the weight of a single expert would always be 1, without a gradient
        **cosine_words(settings),
    )


def cosine_words(settings: Settings) -> dict[str, Any]:
    """The options of a cosine router; both taus are the ratio times the first norm of an expert.

    "matched" divides the scores by what a perturbation of that ratio would, on the average and at
    the start, where a token of a layer norm has the norm √D, and its projection √(width).
    """
    if settings["router"] == "top-k":
        return {}
    width = settings["project"]
    words: dict[str, Any] = {"project": width, "temperature": TEMPERATURE, "b0": False}
    tau = GAIN * settings.get("ratio", settings.get("matched", 0.0))
    if "ratio" in settings:
        words |= {"tau_1": tau, "tau_2": tau}
    if "matched" in settings:
        words["temperature"] *= (1 + tau / GAIN) * (1 + tau / width**0.5)
    return words


def recipe(settings: Settings) -> Recipe:
    """How a model of a trial trains."""
    steps, checks = settings["steps"], settings["checks"]
    if settings["stage"] == "tune":
        steps = max(steps // SEARCHED, 1)
    return Recipe(
        steps=steps, batch=settings["batch"], lr=settings["lr"], points=checks, checks=checks
    )


# -- the course of a training ----------------------------------------------------------------------


class Course:
    """What a training tells besides its loss: the loss of every step, and routes at every check."""

    def __init__(self, model: nn.Module, probe: Tensor, steps: int) -> None:
        self.model, self.probe = model, probe
        self.losses = torch.zeros(steps, device=probe.device)
        self.taken = torch.zeros(1, dtype=torch.long, device=probe.device)  # steps
        self.first: Tensor | None = None  # [layers, tokens]: the first expert at the last check
        self.switched: list[float] = []  # from check to check

    def heard(self, loss: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """A loss that is written down at every step.

        By the device alone, which also counts: a step that is captured writes at every replay.
        """

        def hear(rows: Tensor) -> Tensor:
            value = loss(rows)
            self.losses.index_copy_(0, self.taken, value.detach().float()[None])
            self.taken += 1
            return value

        return hear

    def checked(self, score: Callable[[], float]) -> Callable[[], float]:
        """A score that also looks at the routes of the probe."""

        def check() -> float:
            first = first_experts(self.model, self.probe)
            if self.first is not None:
                changed = first != self.first.to(first.device)
                self.switched.append(changed.double().mean().item())
            self.first = first
            return score()

        return check

    def state(self) -> dict[str, Any]:
        """All of it, for a checkpoint."""
        losses = self.losses[: int(self.taken)].tolist()
        return {"losses": losses, "first": self.first, "switched": list(self.switched)}

    def restore(self, state: Mapping[str, Any]) -> None:
        losses = torch.tensor(state["losses"])
        self.losses[: len(losses)] = losses.to(self.losses)
        self.taken.fill_(len(losses))
        self.first, self.switched = state["first"], list(state["switched"])

    def metrics(self) -> Metrics:
        """The measures of STABILITY, of the model as it is now."""
        half = len(self.switched) // 2
        return {
            "switch rate": fmean(self.switched[half:]) if self.switched else None,
            "early switch rate": fmean(self.switched[:half]) if half else None,
            "spikes": spikes(self.losses[: int(self.taken)].cpu()),
            **routes(self.model, self.probe),
        }


class Kept:
    """A checkpoint that holds the course of the training as well."""

    def __init__(self, checkpoint: Checkpoint, course: Course) -> None:
        self.checkpoint, self.course = checkpoint, course

    def save(self, state: Mapping[str, Any]) -> None:
        self.checkpoint.save({**state, "course": self.course.state()})

    def load(self) -> dict[str, Any] | None:
        state = self.checkpoint.load()
        if state is not None:
            self.course.restore(state.pop("course"))
        return state


# -- measures --------------------------------------------------------------------------------------


@torch.no_grad()
def first_experts(model: nn.Module, probe: Tensor) -> Tensor:
    """`[layers, tokens]`: the expert with the largest score."""
    with watch(model, keep="choice") as seen:
        model(probe)
    return torch.stack([seen[name][0].index[:, 0] for name in seen.layers]).to(torch.int16)


def spikes(losses: Tensor, window: int = WINDOW, height: float = HEIGHT) -> float | None:
    """Rises of the loss above what the window before lets expect, per 1000 steps."""
    if len(losses) <= window:
        return None
    before = losses.double().unfold(0, window, 1)[:-1]
    median = before.median(1, keepdim=True).values
    spread = 1.4826 * (before - median).abs().median(1).values
    high = losses[window:] > median[:, 0] + height * spread
    begins = high & ~F.pad(high, (1, 0))[:-1]
    return 1000 * begins.sum().item() / len(high)


@torch.no_grad()
def routes(model: nn.Module, probe: Tensor) -> dict[str, float]:
    """Load, entropy of the gate and effective rank of the outputs, mean over the MoE layers."""
    outputs: list[Tensor] = []
    layers = moe_layers(model).values()
    with ExitStack() as stack, watch(model) as seen:
        for part in layers:
            hook = part.register_forward_hook(lambda _, __, y: outputs.append(y.flatten(0, -2)))
            stack.callback(hook.remove)
        model(probe)
    found = list(seen.summary().values())
    return {
        "load": fmean(one.effective / len(one.load) for one in found),
        "entropy": fmean((one.entropy or 0.0) / math.log(len(one.load)) for one in found),
        "effective rank": fmean(effective_rank(y) for y in outputs),
    }


def effective_rank(rows: Tensor) -> float:
    """Of rows `[T, D]`: as many equally strong directions around their mean."""
    rows = rows.double()
    values = torch.linalg.svdvals(rows - rows.mean(0))
    share = values / values.sum().clamp(min=torch.finfo(values.dtype).tiny)
    return math.exp(torch.special.entr(share).sum().item())


def loads(model: nn.Module, probe: Tensor) -> dict[str, list[float]]:
    """The share of the work of each expert, by layer, for the page."""
    with torch.no_grad(), watch(model) as seen:
        model(probe)
    return {f"MoE layer {i}": one.load for i, one in enumerate(seen.summary().values(), start=1)}


def spread(result: Mapping[str, Any], metric: str) -> dict[str, float | None]:
    """The standard deviation over seeds of a metric, by arm, from a result of the lab."""
    values = {arm["name"]: arm["metrics"][metric]["values"].values() for arm in result["arms"]}
    return {arm: stdev(found) if len(found) > 1 else None for arm, found in values.items()}
