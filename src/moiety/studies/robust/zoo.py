"""The trained models that the robustness studies share, and the errors of one under attack.

    def run(running):                                   # a trial of a study
        settings, found = running.settings, zoo.trained(running)      # loaded, or trained and kept
        return zoo.errors(found, PGD(steps=settings["steps"]), settings["grid"], running)

A model depends on its arm ("model", "experts", "router", "adversarial"), on the sizes of the scale
and on the seed, not on the study that asks for it. Whoever needs it first trains it, and
`robust/models` trains them all.

    folder()/<key>/model.safetensors, model.json       weights; settings, accuracy, cost, versions
    folder()/<key>/curve.jsonl, state/                 the course of the training; where it is now
    folder()/<key>/attacked-<key>/found.json           what an attack came to at one eps
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ... import cost, io
from ...data.named import cache
from ...lab.checkpoint import Checkpoint
from ...lab.store import Curve
from ...lab.study import Metric, Running, Scale, Settings
from ...robust import Target, run_attack
from ...robust.attack import Attacks
from ...robust.training import attack_batch
from ...train import evaluate
from ...train.loop import Recipe, train
from .vision import Vision, augment, build, flops, pictures, router_of

RECIPE = 1  # of the training; a change of the code that trains otherwise adds one
ATTACK = 1  # and so of the code that attacks
EPS = 8 / 255  # of adversarial fine-tuning
BATCH = 1000  # images that are measured or attacked at once
GRID = [0.5, 1, 2, 4, 8]  # eps that are attacked, in units of 1/255

SMOKE = {
    "data": "digits",
    "train": 128,
    "crop": 0,
    "patch": 2,
    "experts": 8,  # of a V-MoE whose arm does not say
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "batch": 32,
    "lr": 4e-3,
    "epochs": 1,
    "adversarial_epochs": 1,
    "adversarial_batch": 32,
    "adversarial_steps": 2,
    "images": 32,
    "grid": GRID,
    "steps": 3,
}
SMALL = {
    "data": "cifar10",
    "train": 16_000,
    "crop": 2,
    "patch": 8,
    "experts": 8,
    "dim": 48,
    "depth": 4,
    "heads": 4,
    "batch": 128,
    "lr": 2e-3,
    "epochs": 8,
    "adversarial_epochs": 1,
    "adversarial_batch": 128,
    "adversarial_steps": 10,
    "images": 500,
    "grid": GRID,
    "steps": 40,
}
FULL = SMALL | {
    "train": None,  # all
    "crop": 4,
    "patch": 4,
    "experts": 32,
    "dim": 64,
    "depth": 6,
    "batch": 256,
    "epochs": 8,
    "adversarial_epochs": 2,
    "adversarial_batch": 512,
    "images": 2000,
}
SCALES = {
    "smoke": Scale(seeds=2, settings=SMOKE),
    "small": Scale(seeds=5, settings=SMALL),
    "full": Scale(seeds=5, settings=FULL),
}
ALONG = "eps, in tenths of 1/255"  # the curves of attacks; 0 is the clean image
VARIES = ("first weights", "order of the examples", "crops and mirroring", "noise of the router")
DEVIATIONS = (
    "CIFAR-10 instead of JFT-300M and ImageNet, at 32×32 pixels, without pre-training",
    "models of 4 or 6 blocks (paper: 12), of a width of 48 or 64 (paper: 768)",
    "the class is read from the mean of the tokens; the paper's models have a token for it",
    "a capacity is shared by the tokens of one image (paper: of 4 or 8 images), so that no image "
    "changes the answer to another",
    "AdamW, also for fine-tuning (paper: SGD), with the same settings for all models",
    "points are clipped to valid pixels (paper: not)",
)


def scales(**extra: Any) -> dict[str, Scale]:
    """The scales, with settings of a study on top: `scales(steps=100, smoke={"steps": 5})`."""
    own = {name: extra.pop(name, {}) for name in SCALES}
    return {
        name: Scale(seeds=scale.seeds, settings={**scale.settings, **extra, **own[name]})
        for name, scale in SCALES.items()
    }


# -- a trained model -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """A model in eval mode, the test images that are attacked, and what is known of the model."""

    model: Vision
    x: Tensor
    y: Tensor
    clean: float  # accuracy on all test images
    validation: float
    flops: float  # of a forward pass, per image; what an expert drops costs nothing
    parameters: int
    seconds: float  # of its training; of an adversarial one, of the fine-tuning alone
    curve: list[dict[str, Any]]  # of the training: step, loss, at checks validation
    home: Path  # its folder


def folder() -> Path:
    """Where trained models lie: $MOIETY_MODELS, or the user's cache."""
    return Path(os.environ.get("MOIETY_MODELS") or cache() / "robust-models").expanduser()


def spec(settings: Settings, seed: int) -> dict[str, Any]:
    """All that a trained model depends on, in one form for each: plain JSON."""
    words = ["data", "train", "crop", "patch", "dim", "depth", "heads", "batch", "lr", "epochs"]
    adversarial = bool(settings.get("adversarial"))
    if adversarial:
        words += ["adversarial_epochs", "adversarial_batch", "adversarial_steps"]
    found = {word: settings[word] for word in ("model", *words)}
    if found["model"] == "v-moe":
        found |= {"experts": settings["experts"], "router": router_of(settings)}
    return {**found, "adversarial": adversarial, "seed": seed, "recipe": RECIPE}


def place(asked: Mapping[str, Any]) -> Path:
    """The folder of a model: some words to read, and a hash of its spec to be sure."""
    text = json.dumps(asked, sort_keys=True)
    model = asked["model"].replace("++", "-plus-plus")
    parts = [model, *(str(asked[w]) for w in ("experts", "router") if w in asked)]
    parts += ["adversarial"] * asked["adversarial"] + [f"s{asked['seed']}"]
    return folder() / "-".join([*parts, hashlib.sha256(text.encode()).hexdigest()[:12]])


def trained(run: Running) -> Trained:
    """The model of a trial: loaded where it is, else trained and kept. A kill loses seconds."""
    found = _trained(spec(run.settings, run.seed), run.device, run.tick)
    run.extra["flops"], run.extra["parameters"] = found.flops, found.parameters
    x, y = pictures(run.settings, run.device).attacked(run.settings["images"])
    return Trained(**{**vars(found), "x": x, "y": y})


def _trained(asked: dict[str, Any], device: torch.device, tick: Callable[[float], None]) -> Trained:
    home = place(asked)
    if not (home / "model.json").exists():
        start = None
        if asked["adversarial"]:
            start = _trained(_standard(asked), device, tick).model
        # Who wants it at the same time waits, however long that is, and then finds it.
        with io.lease(home, wait=math.inf):
            if not (home / "model.json").exists():
                _make(home, asked, start, device, tick)
    return _load(home, asked, device)


def _standard(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of the model that adversarial fine-tuning starts from."""
    return spec({**asked, "adversarial": False}, asked["seed"])


def _make(
    home: Path,
    asked: dict[str, Any],
    start: Vision | None,
    device: torch.device,
    tick: Callable[[float], None],
) -> None:
    """Train a model and write it; the description is last, so that with it all is there."""
    began = time.perf_counter()
    data, state = pictures(asked, device), Checkpoint(home / "state")
    model = start or build(asked, seed=asked["seed"], **data.facts).to(device)
    target = Target(model)
    best = train(
        model,
        recipe(asked, len(data.train)),
        examples=len(data.train),
        seed=asked["seed"],
        loss=loss_of(target, asked, data.train),
        score=lambda: evaluate(model, data.validation, batch=BATCH),
        curve=Curve(home / "curve.jsonl"),
        checkpoint=state,
        tick=tick,
        capture=not asked["adversarial"],  # there the steps of the attack are
    )
    target.forget()
    weights = {name: t.cpu().contiguous() for name, t in model.state_dict().items()}
    about = {
        "spec": asked,
        "clean": evaluate(model, data.test, batch=BATCH),
        "validation": best.score,
        "flops": flops(model, data.test),
        "parameters": cost.parameters(model),
        "seconds": round(time.perf_counter() - began, 3),
        "versions": {"torch": torch.__version__, "device": device.type},
    }
    io.write_atomic(home / "model.safetensors", save(weights))
    io.write_json(home / "model.json", about)
    state.remove()


def _load(home: Path, asked: Mapping[str, Any], device: torch.device) -> Trained:
    about, data = io.read_json(home / "model.json"), pictures(asked, device)
    model = build(asked, seed=0, **data.facts)
    try:
        model.load_state_dict(load((home / "model.safetensors").read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{home} holds no whole model ({error}); delete it, and it is trained again"
        ) from error
    x, y = data.test.tensors
    known = ("clean", "validation", "flops", "parameters", "seconds")
    return Trained(
        model=model.to(device).eval(),
        x=x,
        y=y,
        curve=Curve(home / "curve.jsonl").rows(),
        home=home,
        **{word: about[word] for word in known},
    )


def recipe(asked: Mapping[str, Any], examples: int) -> Recipe:
    """How a model trains. Fine-tuning has one check, its end: an early one is less robust."""
    adversarial = asked["adversarial"]
    epochs, batch = (asked[f"{'adversarial_' * adversarial}{w}"] for w in ("epochs", "batch"))
    return Recipe(
        steps=max(examples // batch, 1) * epochs,
        batch=batch,
        lr=asked["lr"] / 2 if adversarial else asked["lr"],
        points=20,
        checks=1 if adversarial else 2,
    )


def loss_of(
    target: Target, asked: Mapping[str, Any], data: TensorDataset
) -> Callable[[Tensor], Tensor]:
    """The loss of the images with these numbers, attacked first where that is asked for."""
    x, y = data.tensors

    def loss(rows: Tensor) -> Tensor:
        images, classes = augment(x[rows], asked["crop"]), y[rows]
        if asked["adversarial"]:
            steps = asked["adversarial_steps"]
            images = attack_batch(target, images, classes, eps=EPS, steps=steps)
        return F.cross_entropy(target.model(images), classes)

    return loss


# -- errors under attack ---------------------------------------------------------------------------


def error_at(eps: float) -> str:
    """The metric of an eps, in units of 1/255."""
    return f"error at {eps:g}/255" if eps else "clean error"


def EPS_METRICS(grid: Sequence[float] = GRID) -> dict[str, Metric]:
    """The metrics that `errors` gives."""
    named = {
        "mean error": "Error under attack, mean over eps",
        "clean error": "Error without attack",
        **{error_at(eps): f"Error at eps {eps:g}/255" for eps in grid if eps},
    }
    return {name: Metric(label, better="lower", format=".1%") for name, label in named.items()}


def errors(
    found: Trained, attack: Attacks, grid: Sequence[float], run: Running
) -> dict[str, float]:
    """The error of a model under one attack at each eps (in 1/255) of a grid, and without it.

    The curve of the trial becomes error and loss by eps; see `ALONG`.
    """
    grid = [0, *(eps for eps in grid if eps)]
    # One by one: on a GPU what an attack captures for an eps is then freed before the next.
    course = [attacked(found, attack, eps) for eps in grid]
    run.curve.rewind(-1)
    for eps, values in zip(grid, course):
        run.curve.append(round(10 * eps), **values)
    wrong = [values["error"] for values in course]
    named = {error_at(eps): error for eps, error in zip(grid, wrong)}
    return {**named, "mean error": math.fsum(wrong[1:]) / len(wrong[1:])}


def attacked(found: Trained, attack: Attacks, eps: float) -> dict[str, float]:
    """Error and loss of a model under attack. Studies share models, so it is kept beside them."""
    asked = json.dumps([repr(attack), eps, len(found.x), BATCH, ATTACK])
    home = found.home / f"attacked-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
    path = home / "found.json"
    with io.lease(home, wait=math.inf):
        if not path.exists():
            one = run_attack(attack, found.model, found.x, found.y, eps / 255, batch=BATCH)
            values = {"error": one.fooled, "loss": one.loss}
            means = {name: value.double().mean().item() for name, value in values.items()}
            io.write_json(path, {"attack": repr(attack), "eps": eps, **means})
    kept = io.read_json(path)
    return {name: kept[name] for name in ("loss", "error")}
