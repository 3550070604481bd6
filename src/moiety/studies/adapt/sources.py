"""The source models of the adaptation studies: made by one command, kept, never committed.

    python -m moiety.studies.adapt.sources full cuda              # projected time, then all of them
    python -m moiety.studies.adapt.sources full cuda --project    # the projected time alone

    found = source("image", seed=0, scale="full", device=device)     # made now, or found
    encoder = Encoder.load(found.path)                            # or: moiety adapt --model PATH

A ViT-MAE on CIFAR-10 images and a RoBERTa on film reviews, a model for every seed. A source depends
on its kind, the settings of the scale and the seed; whoever needs it first trains it.

    folder()/<key>/config.json, model.safetensors, …       as `save_pretrained` writes them
    folder()/<key>/source.json                             what is known of it; with it all is there
    folder()/<key>/curve.jsonl, state/                     the training; where it is now

Why the steps of `full` are what they are: all sources of a kind shall take two to four minutes of
one H200. FLOPs of a step, counted (`cost`), forward and backward:

    256 images         0.22 T    17 tokens through 12 blocks of 192, 65 through 4 of 128
    64 rows of text    0.29 T    8 192 tokens through 6 blocks of 256; the head reads the masked 30 %

That is a millisecond of products in bf16. But blocks as narrow as these wait for memory: one moves
about 180 numbers of 4 bytes a token and unit of width, forward and backward, so that 256 images
move 13 GB and 64 rows 9 GB. Measured, eight of images side by side took 7 ms a step each; after
5 000 steps their loss on training images was 0.46, after 3 000 it had been 0.475. The images are
seen 26 times, the reviews 3.8 times.

A masked language model as narrow as these says the commonest words and does not find out by itself
where their neighbours are. So it begins by looking there (`masked_models.look_near`), and twice as
many words are hidden as usual (docs/log.md has what each brings). And no dropout: what is seen so
seldom needs none, and it cost 0.06 nats at a small size.
"""  # noqa: E501

from __future__ import annotations

import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from ... import cost, io
from ...adapt.encoders import Encoder
from ...lab.checkpoint import Checkpoint
from ...lab.store import Curve
from ...train import find_device, seeded
from ...train.loop import Recipe, train
from .corpora import Corpus, Kind, checksums, corpus_of, folder, named_by
from .masked_models import Settings, build, masked_loss

# Of the training; a change of the code that trains otherwise adds one.
RECIPE: dict[Kind, int] = {"image": 2, "text": 3}
SEEDS = 8
CHECK = 1  # the seed of the masks that sources are checked with
SAVE = 30.0  # seconds between checkpoints
__all__ = ["SCALES", "SEEDS", "Source", "folder", "make_all", "project", "settings_of", "source"]

SCALES: dict[str, dict[Kind, Settings]] = {
    "smoke": {
        "image": {
            "data": "digits", "train": 256, "side": 8, "patch": 2, "crop": 0,
            "dim": 16, "depth": 2, "heads": 2, "decoder_dim": 16, "decoder_depth": 1,
            "decoder_heads": 2, "mask_ratio": 0.75,
            "steps": 8, "batch": 32, "lr": 2e-3, "weight_decay": 0.05, "precision": "float32",
        },
        "text": {
            "data": "made up", "train": None, "vocabulary": 300, "length": 16,
            "dim": 16, "depth": 2, "heads": 2, "dropout": 0.1,
            "steps": 8, "batch": 32, "lr": 2e-3, "weight_decay": 0.01, "precision": "float32",
        },
    },
    "small": {
        "image": {
            "data": "cifar10", "train": None, "side": 32, "patch": 8, "crop": 4,
            "dim": 64, "depth": 4, "heads": 2, "decoder_dim": 32, "decoder_depth": 2,
            "decoder_heads": 2, "mask_ratio": 0.75,
            "steps": 2500, "batch": 64, "lr": 2e-3, "weight_decay": 0.05, "precision": "float32",
        },
        "text": {
            "data": "imdb-text", "train": None, "vocabulary": 4096, "length": 64,
            "dim": 128, "depth": 4, "heads": 4, "dropout": 0.0,
            "steps": 8000, "batch": 32, "lr": 1e-3, "weight_decay": 0.01, "precision": "bfloat16",
        },
    },
    "full": {
        "image": {
            "data": "cifar10", "train": None, "side": 32, "patch": 4, "crop": 4,
            "dim": 192, "depth": 12, "heads": 3, "decoder_dim": 128, "decoder_depth": 4,
            "decoder_heads": 4, "mask_ratio": 0.75,
            "steps": 3000, "batch": 256, "lr": 1e-3, "weight_decay": 0.05, "precision": "bfloat16",
        },
        "text": {
            "data": "imdb-text", "train": None, "vocabulary": 8192, "length": 128,
            "dim": 256, "depth": 6, "heads": 4, "dropout": 0.0,
            "steps": 6000, "batch": 64, "lr": 1e-3, "weight_decay": 0.01, "precision": "bfloat16",
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A source model that is there: a folder for `Encoder.load`, and what is known of it."""

    path: Path
    kind: Kind
    seed: int
    loss: float  # masked, on what is held out
    steps: int  # at which it was best, and was kept
    parameters: int
    seconds: float  # of its training

    @property
    def curve(self) -> list[dict[str, Any]]:
        """The course of the training: step, loss, at checks validation (the loss, negative)."""
        return Curve(self.path / "curve.jsonl").rows()


def settings_of(kind: Kind, scale: str = "full", **changes: Any) -> Settings:
    """The settings of a scale, some of them changed."""
    if scale not in SCALES or kind not in get_args(Kind):
        known = f"{', '.join(SCALES)} for {', '.join(get_args(Kind))}"
        raise ValueError(f"there are no sources {scale} for {kind}; there are {known}")
    settings = SCALES[scale][kind]
    unknown = [name for name in changes if name not in settings]
    if unknown:
        raise ValueError(f"sources have no setting {unknown[0]!r}; they have {', '.join(settings)}")
    return {**settings, **changes}


def place(kind: Kind, seed: int, settings: Settings) -> Path:
    """The folder of a source."""
    data = {"files": checksums(settings["data"]), "recipe": RECIPE[kind]}
    return named_by(f"{kind}-s{seed}", {"kind": kind, "seed": seed, **settings, **data})


def source(
    kind: Kind,
    seed: int,
    scale: str = "full",
    *,
    device: torch.device | str = "cpu",
    tick: Callable[[float], None] | None = None,
    **changes: Any,
) -> Source:
    """The source of a seed: found, or trained and kept. A kill loses seconds.

    Who wants the same one at the same time waits, however long that is, and then finds it.
    """
    settings = settings_of(kind, scale, **changes)
    home = place(kind, seed, settings)
    if not (home / "source.json").exists():
        with io.lease(home, wait=math.inf):
            if not (home / "source.json").exists():
                _make(home, kind, seed, settings, torch.device(device), tick)
    about = io.read_json(home / "source.json")
    return Source(home, kind, seed, **{w: about[w] for w in Source.__annotations__ if w in about})


def _make(
    home: Path,
    kind: Kind,
    seed: int,
    settings: Settings,
    device: torch.device,
    tick: Callable[[float], None] | None,
) -> None:
    """Train a source and write it; the description is last, so that with it all is there."""
    began = time.perf_counter()
    corpus, state = corpus_of(kind, settings), Checkpoint(home / "state")
    encoder = build(kind, seed, settings, corpus).to(device)
    best = _train(
        encoder,
        settings,
        seed,
        corpus,
        curve=Curve(home / "curve.jsonl"),
        checkpoint=state,
        tick=tick,
    )
    encoder.to("cpu").save(home)
    about = {
        "settings": settings,
        "loss": -best.score,
        "steps": best.step,
        "parameters": cost.parameters(encoder.model),
        "seconds": round(time.perf_counter() - began, 3),
        "versions": {"torch": torch.__version__, "device": device.type},
    }
    io.write_json(home / "source.json", about)
    state.remove()


def _train(encoder: Encoder, settings: Settings, seed: int, corpus: Corpus, **words: Any) -> Any:
    """Train an encoder that was built; a larger score is a smaller loss on held-out data."""
    loss = masked_loss(encoder, corpus.train, settings)
    check = masked_loss(encoder, corpus.held, {**settings, "crop": 0})
    held = torch.arange(len(corpus.held), device=encoder.device).split(settings["batch"])

    @torch.no_grad()
    def score() -> float:
        with seeded(CHECK, encoder.device):  # the same masks at every check
            losses = [check(rows).double() * len(rows) for rows in held]
        return -float(torch.stack(losses).sum()) / len(corpus.held)

    recipe = Recipe(
        **{word: settings[word] for word in ("steps", "batch", "lr", "weight_decay")},
        points=words.pop("points", 40),
        checks=words.pop("checks", 2),
    )
    return train(
        encoder.model,
        recipe,
        examples=len(corpus.train),
        seed=seed,
        loss=loss,
        score=score,
        save_every=SAVE,
        capture=True,
        **words,
    )


# -- all of them -----------------------------------------------------------------------------------


def project(
    kind: Kind, scale: str = "full", *, device: torch.device | str = "cpu", steps: int = 40
) -> float:
    """Seconds of a step, measured on a model that is thrown away."""
    settings = {**settings_of(kind, scale), "steps": steps}
    corpus = corpus_of(kind, settings)
    encoder = build(kind, 0, settings, corpus).to(device)
    times: list[float] = []
    # Points at a quarter each: the first has what is set up once, the last has the check.
    _train(
        encoder,
        settings,
        0,
        corpus,
        tick=lambda share: times.append(time.perf_counter()),
        points=4,
        checks=1,
    )
    return (times[2] - times[0]) / (steps // 2)


def make_all(scale: str, device: str, kind: Kind, seeds: int = SEEDS) -> None:
    """Make the sources of a kind, one after the other, and say how each came out."""
    for seed in range(seeds):
        found = source(kind, seed, scale, device=find_device(device))
        said = f"loss {found.loss:.4f} after {found.steps} steps, {found.seconds:.0f} s"
        Console().print(f"{kind} {seed}: {said}, {found.path}", soft_wrap=True, highlight=False)


def main(scale: str = "small", device: str = "cpu", *more: str) -> None:
    """Say what the sources of a scale will take, and make them, both kinds side by side."""
    say, kinds, whole = Console(highlight=False).print, get_args(Kind), 0.0
    for kind in kinds:
        each, steps = project(kind, scale, device=find_device(device)), settings_of(kind, scale)
        seconds = SEEDS * steps["steps"] * each
        told = f"{SEEDS} × {steps['steps']} steps × {1000 * each:.1f} ms = {seconds:.0f} s"
        say(f"{kind}: {told}")
        whole += seconds
    say(f"projected: {whole:.0f} s if none is there yet, in {folder()}", soft_wrap=True)
    if "--project" in more:
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    workers = [context.Process(target=make_all, args=(scale, device, kind)) for kind in kinds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("not all sources were made; the same command goes on where it stopped")


if __name__ == "__main__":
    main(*sys.argv[1:])
