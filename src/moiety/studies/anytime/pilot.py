"""What to know before the language studies are run: at which rates, and how long they take.

python -m moiety.studies.anytime.pilot full cuda

The rates are those that the studies then take: what is chosen here is kept for them.
"""

from __future__ import annotations

import sys
import time

import torch
from rich.console import Console

from ...lab.study import Settings, Study
from . import language, sequential
from .language import KINDS
from .language_models import make, phase_steps, scores_of, settled
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
    corpus, settings = corpus_of(settings, device), settled(settings, device)
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
    """For each size with several rates, what validation of the first mega-batch says of them."""
    settings, lines = language.study.scale(scale).settings, []
    for size, words in settings["sizes"].items():
        if "rates" in words:
            arm = {**settings, **KINDS["SM4"], "size": size}
            scores, best = scores_of(arm, torch.device(device)), settled(arm, torch.device(device))
            lines += [f"{size}, lr {lr}: {score} on validation" for lr, score in scores.items()]
            lines.append(f"{size}: {best['sizes'][size]['lr']:g} is taken")
    return "\n".join(lines)


if __name__ == "__main__":
    scale, device = sys.argv[1:]
    start, say = time.perf_counter(), Console(highlight=False).print
    say(tell_rates(scale, device))
    batches = language.study.scale(scale).settings["batches"]
    say(tell_projected(language.study, batches, scale, device))
    say(tell_projected(sequential.study, sequential.PHASES, scale, device))
    say(f"This took {time.perf_counter() - start:.0f} s.")
