"""Does the router change what growth brings? Soft tree, DSelect-k and cosine, on streams of digits.

An MLP whose hidden layers are mixtures of four experts meets a stream of mega-batches. It is run
twice from the same first weights, in the same order: as it is, and with one more expert a layer
before each phase but the first, a copy of the one with the largest loss. What growth brings is the
difference of the errors, averaged over the stream. The arm "plain", an MLP without experts, has
nothing to grow: its gain of zero is what the others are compared with.

A soft tree splits the leaf; for the sparse routers the copy joins the family of its parent. Both
leave the function as it was. A tree runs all its experts for each image, a sparse router two.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...anytime.backbones import MLP
from ...anytime.base import Learner
from ...anytime.data import Batch, Examples, problem_examples
from ...anytime.fitting import Training
from ...anytime.learners import learner
from ...anytime.ledger import Line, summary
from ...anytime.stream import cut
from ...data import load_problem
from ...experts import ModuleExperts
from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Study
from ...moe import MoE
from .language import plain
from .walk import Under, largest_gap, part_of, walk

PLAIN = "plain"
GAIN, END_GAIN = "gain", "gain at the end"
EVEN = {"importance": 0.01}
ROUTERS: dict[str, dict[str, Any]] = {
    "tree": {},
    "dselect-k": {"k": 2, "slots": 2, "balance": EVEN},
    "cosine": {"k": 2, "balance": EVEN},
}


# -- a trial ---------------------------------------------------------------------------------------


def model(settings: Settings, inputs: int, classes: int) -> nn.Module:
    """ALMA's MLP, with a router a mixture of Linear + ReLU in the place of each hidden layer."""
    width, router = settings["width"], settings.get("router")
    usual = MLP(width, inputs=inputs, classes=classes)
    if router is None:
        return usual
    sizes, experts = pairwise((inputs, width, width)), settings["experts"]
    return nn.Sequential(usual[0], *(mixture(router, n, m, experts) for n, m in sizes), usual[-1])


def mixture(router: str, inputs: int, outputs: int, experts: int) -> MoE:
    """Experts of one hidden layer."""
    made = [nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()) for _ in range(experts)]
    return MoE(router, ModuleExperts(made, dim=inputs, out_dim=outputs), **ROUTERS[router])


@lru_cache(maxsize=2)  # of each seed another order
def stream_of(
    name: str, batches: int, seed: int, device: torch.device
) -> tuple[list[Batch], Examples]:
    """The mega-batches of a data set, and its test set, on a device."""
    problem = load_problem(name)
    stream = cut(problem, batches, seed=seed)
    parts = [Batch(b.number, b.name, b.train.to(device), b.validation.to(device)) for b in stream]
    return parts, problem_examples(problem, problem.test).to(device)


def make(settings: Settings, grows: bool, test: Examples, seed: int) -> Learner:
    """A learner of the arm's router, growing or not."""
    inputs, classes = test.x[0].numel(), int(test.y.max()) + 1
    growing = "growing-moe" if settings.get("router") == "tree" else "growing-switch"
    return learner(
        growing if grows else "single",
        lambda seed: model(settings, inputs, classes),
        seed=seed,
        device=test.x.device,
        training=Training(**settings["training"]),
        **({"count": 1} if grows else {}),
    )


def run(running: Running) -> Metrics:
    """Walk over the stream without and with growth, from one seed."""
    settings, seed = running.settings, running.seed
    running.curve.rewind(-1)
    batches, test = stream_of(settings["data"], settings["batches"], seed, running.device)
    saved = running.checkpoint.load()
    found: dict[str, list[Line]] = dict(saved["before"]) if saved else {}
    ways = ("as it is", "grown") if "router" in settings else ("as it is",)
    for number, name in enumerate(ways):
        if name not in found:
            found[name] = walk(
                make(settings, name == "grown", test, seed),
                batches,
                test,
                seed=seed,
                metric="error",
                checkpoint=Under(running.checkpoint, dict(found)),
                tick=part_of(running.tick, number, len(ways)),
            )
    fixed, grown = found[ways[0]], found[ways[-1]]
    for line, other in zip(grown, fixed):
        running.curve.append(
            line["t"], loss=line["loss"], error=line["error"], not_grown=other["error"]
        )
    running.extra["parameters"] = grown[-1]["parameters"]
    return metrics_of(fixed, grown)


def metrics_of(fixed: list[Line], grown: list[Line]) -> dict[str, float | None]:
    """The numbers of two ledgers."""
    before, after = summary(fixed), summary(grown)
    return {
        GAIN: before.average - after.average,
        END_GAIN: before.final - after.final,
        "error": after.average,
        "error, no growth": before.average,
        "last error": after.final,
        "training": after.comp / 1e12,
        "training, no growth": before.comp / 1e12,
        "memory": after.mem / 1e3,
        "memory, no growth": before.mem / 1e3,
        "gap": largest_gap(grown),
    }


# -- claims ----------------------------------------------------------------------------------------


def brings(router: str) -> Claim:
    return greater(
        router,
        PLAIN,
        margin=0.005,
        metric=GAIN,
        quote=f"growth lowers the error over the stream with the {router} router",
        reason="half a point of error, for which one may well pay with more parameters",
        tier="our own",
    )


def alike(a: str, b: str) -> Claim:
    return equivalent(
        a,
        b,
        margin=0.01,
        metric=GAIN,
        quote=f"growth brings as much with {a} as with {b}",
        reason="one point of error: for less nobody chooses another router to grow with",
        tier="our own",
    )


# -- the study -------------------------------------------------------------------------------------

METRICS = {
    GAIN: Metric("Error that growth saves, average", "higher", ".2%"),
    END_GAIN: Metric("Error that growth saves at the end", "higher", ".2%"),
    "error": Metric("Average error, grown", "lower", ".1%"),
    "error, no growth": Metric("Average error, not grown", "lower", ".1%"),
    "last error": Metric("Last error, grown", "lower", ".1%"),
    "training": plain("Training TFLOPs, grown", ".3g"),
    "training, no growth": plain("Training TFLOPs, not grown", ".3g"),
    "memory": plain("Mem, thousand parameters, grown", ".4g"),
    "memory, no growth": plain("Mem, thousand parameters, not grown", ".4g"),
    "gap": Metric("Largest change by growth", "lower", ".2g", "validation"),
}
SMOKE: dict[str, Any] = {
    "data": "digits",
    "batches": 2,
    "width": 8,
    "experts": 4,
    "training": {"epochs": 1, "batch": 64, "eval_batch": 1024},
}
SMALL = SMOKE | {
    "batches": 8,
    "training": {"epochs": 15, "patience": 5, "batch": 32, "eval_batch": 1024},
}
FULL = SMALL | {
    "data": "mnist",
    "batches": 10,
    "training": {"epochs": 10, "patience": 3, "batch": 128, "eval_batch": 2000},
}

study = Study(
    name="anytime/routers",
    title="What growth brings, router by router",
    question="Does the router (soft tree, DSelect-k, cosine) change what growth brings?",
    run=run,
    arms={PLAIN: {}, **{name: {"router": name} for name in ROUTERS}},
    metrics=METRICS,
    scales={
        "smoke": Scale(seeds=2, settings=SMOKE),
        "small": Scale(seeds=5, settings=SMALL),
        "full": Scale(seeds=10, settings=FULL),
    },
    claims=[
        *(brings(router) for router in ROUTERS),
        *(alike(a, b) for a, b in (("dselect-k", "tree"), ("cosine", "tree"))),
        alike("cosine", "dselect-k"),
    ],
    varies=("cut of the stream", "first weights", "order of the images", "new gates"),
    along="Mega-batches",
    notes=(
        "model: 784 → 8 → 8 → 10, of whose hidden layers each has 4 experts at the start and 13 "
        "after 10 mega-batches",
        "training: Adadelta as in the paper; at most 10 passes over a mega-batch, or 3 without a "
        "gain on validation, at full scale",
        "settings: the options of the library for each router, and one weight of its balance loss "
        "for the sparse ones; none was searched for",
        "width: 4 at first, made 8 after one run at the small scale, all of whose claims were "
        "undecided, with gains from −3 to +7 points; margins and claims stayed as they were",
        "smaller scales: the digits of scikit-learn",
    ),
)
