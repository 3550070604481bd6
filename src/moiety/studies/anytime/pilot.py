"""What to know before the language studies are run: how long they take, and at which rates.

python -m moiety.studies.anytime.pilot full cuda
"""

from __future__ import annotations

import sys
import time

import torch
from rich.console import Console

from ...anytime.base import Phase
from ...lab.study import Settings, Study
from . import language, sequential
from .language import KINDS, make, phase_steps
from .text import corpus_of


def tell_projected(which: Study, phases: int, scale: str, device: str) -> str:
    """The time of a scale in words: the steps of all trials, one after the other.

    phases: of the models of an arm, with training as long as that of one mega-batch. Workers that
    share a GPU make it shorter.
    """
    chosen, lines, whole = which.scale(scale), [], 0.0
    sized = [{**chosen.settings, **arm} for arm in which.arms.values() if "size" in arm]
    for size in dict.fromkeys(arm["size"] for arm in sized):
        arms = [arm for arm in sized if arm["size"] == size]
        seconds = step_seconds({**arms[0], "experts": 8}, torch.device(device))
        steps = phases * sum(phase_steps(arm) for arm in arms)
        whole += chosen.seeds * steps * seconds
        lines.append(f"{size}: {1000 * seconds:.1f} ms a step, {steps} steps a seed")
    return "\n".join([*lines, f"{which.name}, {chosen.seeds} seeds: {whole / 60:.1f} min"])


def step_seconds(settings: Settings, device: torch.device, steps: int = 20) -> float:
    """Seconds of a training step of one model, after those in which it is captured."""
    corpus = corpus_of(settings, device)
    batch = corpus.batches[0]
    made = make({**settings, "learner": "single", "options": {}}, corpus, 0, device)
    fit = made.training.begin(made.models[0], batch.train, batch.validation, 0)
    rows = torch.arange(settings["batch"])

    def some(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            fit._advance(rows)
        float(fit.losses[-1])  # waits for the device
        return time.perf_counter() - start

    some(5)
    return some(steps) / steps


def tell_rates(scale: str, device: str) -> str:
    """For each size, what validation of the first mega-batch says of learning rates around its own.

    A look that costs a minute, before the arms are run: it never sees the test.
    """
    settings, lines = language.study.scale(scale).settings, []
    corpus = corpus_of(settings, torch.device(device))
    batch = corpus.batches[0]
    for size, words in settings["sizes"].items():
        for lr in (words["lr"] / 2, words["lr"], words["lr"] * 2):
            sizes = {size: {**words, "lr": lr}}
            arm = {**settings, **KINDS["SM4"], "size": size, "sizes": sizes}
            made = make(arm, corpus, 0, torch.device(device))
            phase = Phase(train=batch.train, validation=batch.validation, number=1)
            lines.append(f"{size}, lr {lr:g}: {made.train(phase).validation:.3f} on validation")
    return "\n".join(lines)


if __name__ == "__main__":
    scale, device = sys.argv[1:]
    batches = language.study.scale(scale).settings["batches"]
    Console().print(tell_projected(language.study, batches, scale, device))
    Console().print(tell_projected(sequential.study, sequential.PHASES, scale, device))
    Console().print(tell_rates(scale, device))
