"""Routers on handwritten digits: does any beat a dense model at equal active FLOPs?

The models of `moiety demo`, over many seeds. One learning rate for all, that of the demo, which was
chosen for the dense model by its accuracy on the test images, the same 450 as here: what routers
gain here, they gain without a search of their own, against a dense model that has seen the test.
Each trial keeps the weights of its best check on validation images.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ... import cost
from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Metric, Metrics, Running, Scale, Settings, Speed, Study
from ...train import evaluate
from ...train.loop import Recipe, train
from .on_digits import ARMS, BATCH, TRAIN, active_flops, build, measure_routing, splits

EPOCH = TRAIN // BATCH  # steps
MODELS = {arm.name: arm for arm in ARMS if arm.name not in ("perturbed-cosine", "tree", "hash")}
VALIDATION = "validation accuracy"


def run(running: Running) -> Metrics:
    """Train the model of one arm from one seed, and measure it on the test images."""
    _, validation, test = splits()
    model = build(MODELS[running.settings["router"]], running.seed).to(running.device)
    best = train(
        model,
        recipe(running.settings),
        examples=TRAIN,
        seed=running.seed,
        loss=task_loss(model, running.device),
        score=lambda: evaluate(model, validation),
        curve=running.curve,
        checkpoint=running.checkpoint,
        tick=running.tick,
        save_every=0.0,  # after every check
    )
    loads, found = measure_routing(model, test)
    running.extra["flops"] = active_flops(model, test)
    running.extra["parameters"] = cost.parameters(model)
    running.extra["loads"] = loads
    return {
        "accuracy": found["accuracy"],
        VALIDATION: best.score,
        "balance": found.get("balance"),
        "dead experts": found.get("dead"),
    }


def recipe(settings: Settings) -> Recipe:
    """How a trial trains: as long as the scale says, or as a time budget allows."""
    steps = max(settings["examples"] // BATCH, 1) if "examples" in settings else settings["steps"]
    checks = max(steps // EPOCH, 2)
    return Recipe(steps=steps, batch=BATCH, lr=settings["lr"], points=checks, checks=checks)


def task_loss(model: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The loss of the images with these numbers."""
    x, y = (t.to(device) for t in splits()[0].tensors)
    return lambda rows: F.cross_entropy(model(x[rows]), y[rows])


def speed(settings: Settings, device: torch.device) -> Speed:
    """Time a short training, and what comes before and after one."""
    began, steps = time.perf_counter(), 20
    _, validation, test = splits()
    model = build(MODELS[settings["router"]], seed=0).to(device)
    loss = task_loss(model, device)
    flops = active_flops(model, test)
    measure_routing(model, test)
    tested = time.perf_counter()
    for some in (3, steps):  # the first steps also warm up
        start = time.perf_counter()
        train(
            model,
            Recipe(steps=some, batch=BATCH, points=1, checks=1),
            examples=TRAIN,
            seed=0,
            loss=loss,
            score=lambda: evaluate(model, validation),
        )
    seconds = (time.perf_counter() - start) / (steps * BATCH)
    return Speed(seconds=seconds, flops=flops, start=tested - began)


def beats_dense(router: str) -> Claim:
    return greater(
        router,
        "dense",
        margin=0.01,
        metric="accuracy",
        quote=f"{router} beats a dense model of the same active FLOPs",
        reason="a point of accuracy, 4 to 5 of the 450 test images, is the least that pays for "
        "several times the parameters",
        tier="our own",
    )


study = Study(
    name="lab/routers",
    title="Routers on handwritten digits, at equal active FLOPs",
    question="Does any router beat a dense model at equal active FLOPs?",
    run=run,
    arms={name: {"router": name} for name in MODELS},
    metrics={
        "accuracy": Metric("Accuracy", format=".1%"),
        VALIDATION: Metric("Validation accuracy", format=".1%", split="validation"),
        "balance": Metric("Balance of the load", better="", format=".2f"),
        "dead experts": Metric("Dead experts", better="", format=".1f"),
    },
    scales={
        "smoke": Scale(seeds=2, settings={"steps": 6, "lr": 4e-3}),
        "small": Scale(seeds=10, settings={"steps": 12 * EPOCH, "lr": 4e-3}),
        "full": Scale(seeds=50, settings={"steps": 60 * EPOCH, "lr": 4e-3}),
    },
    claims=[
        *(beats_dense(router) for router in MODELS if router != "dense"),
        equivalent(
            "dselect-k",
            "top-k",
            margin=0.01,
            metric="accuracy",
            quote="a smooth gate is as good as a hard choice of two",
            reason="the same point of accuracy as for the routers against dense",
            tier="our own",
        ),
    ],
    varies=("first weights", "order of the examples", "noise of the router"),
    speed=speed,
)
