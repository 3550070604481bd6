"""What the studies of adaptation will take: every step they ask for, times the time of a step.

    python -m moiety.studies.adapt.projection full cuda 12        # counted, and measured by 12
    python -m moiety.studies.adapt.projection full                # counted alone

Counted from the studies themselves, what they share once: an encoder is trained once for each
seed, a fine-tune for each point of the search, and for each seed and number.

Models as small as these are bound by launches, not by the GPU: a step of some 1 000 kernels takes
30 to 50 µs of host time each. So one process leaves the GPU idle most of the time, and the studies
are run with `--workers 12` on 16 cores, which share it, and encoders are made before them by as
many (`preparing`); nothing is captured. As many processes
measure here, doing the same steps at once: what a step takes is their mean over their number.

By hand, before any measurement: a masked pass of 12 + 4 blocks forward and backward is about 900
kernels, an unmasked one of 12 blocks 650, of text (6 blocks) 400 and 350, AdamW 40, and a kernel of
this size is 4 µs of the GPU. So a step of further pre-training is 38 ms of a process and 4 ms of
the GPU, of self-distillation 64 and 6.5, of fine-tuning 28 and 3; of text 18 and 2.5 (the head over
8 192 words is memory, not launches), 32 and 4.5, 16 and 2; a mixture takes twice as long. Twelve
processes get through no faster than the GPU, which also has to change between them: 5, 8 and 3.5
ms a step, 3, 5 and 2.5 of text; RecAdam 4.5, MARS 6 and R3F 6.5, of text 3.5, 5 and 5.

    images   25k further × 5 + 46k distil × 8 + 15k others × 7.5 ms             = 600 s
             143k tune × 3.5 + 22k × (4.5 + 6 + 6.5) ms                         = 870 s
             sources, five × 30 s                                               = 150 s
    text     18k further × 3 + 18k distil × 5 + 9k others × 5 ms                = 190 s
             110k tune × 2.5 + 27k × (3.5 + 5 + 5) ms                           = 640 s
             mixtures: 9k further × 6 + 18k distil × 10 + 44k tune × 5 ms       = 455 s
             sources, five × 32 s                                               = 160 s

That is 27 and 24 minutes. To fit them were cut, of what the digest has: rounds 4 and 5, 300 labels
of the low-resource study, a second fine-tune of a seed outside images, text and gap, further steps
than 1 200, and adaptation and fine-tuning as long as the paper's. If the measured time is larger,
`adapt/supcon` goes first, then `adapt/low-resource`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from rich.console import Console

from ...adapt import finetune, further_pretrain, self_distill
from ...adapt.encoders import Encoder
from ...adapt.rows import Rows
from ...hf import upcycle
from ...train import find_device
from . import moe, pool, tables
from .contrast import contrast
from .corpora import corpus_of
from .masked_models import build
from .sources import settings_of
from .targets import load_target

BATCHES = {
    "image": ["images", "ablation", "rounds", "gap", "steps", "weight", "low-resource", "supcon"],
    "text": ["text", "ablation", "moe"],
}
MEASURED = {"image": "usps", "text": "scierc"}
STEPS = 20  # of a measurement, after as many that warm up
MIXED = " of a mixture"
Step = str  # "further", "cls", "prediction", …; "tune plain", "tune r3f", …; "… of a mixture"


def count(scale: str, kind: str) -> Counter[Step]:
    """The steps of a batch by what they do, each run once."""
    seen: dict[str, tuple[Step, float]] = {}
    for name in BATCHES[kind]:
        study = import_module(f"{__package__}.{name.replace('-', '_')}").study
        whole = study.scale(scale)
        for arm in study.arms.values():
            if pool.kind_of(arm["target"]) == kind:
                settings = {**whole.settings, **arm, "sets": {}, "lr": 0, "longer": 1}
                for key, asked in _asked(settings, whole.seeds, tables.POINTS[scale]).items():
                    # One study may ask for more fine-tunes of an arm than another.
                    seen[key] = max(seen.get(key, asked), asked)
    found: Counter[Step] = Counter()
    for step, number in seen.values():
        found[step] += round(number)
    return found


def _asked(settings: Mapping[str, Any], seeds: int, points: int) -> dict[str, tuple[Step, float]]:
    """What the trials of an arm run, by all it depends on."""
    case = [settings["target"], pool.labels_of(settings), settings.get("experts")]
    mixed = MIXED if settings.get("experts") else ""
    plan, tune = pool.plan_of(settings), pool.tune_of(settings)
    times = points + seeds * settings["tunes"]
    lengths = 1.5  # of the two that are searched, on the mean
    step = f"tune {tune['method']}{mixed}"
    found = {json.dumps([case, plan, tune["method"]]): (step, lengths * times * tune["steps"])}
    while plan is not None:
        step = plan.get("match", "distil") if plan["stage"] == "distil" else plan["stage"]
        found[json.dumps([case, plan])] = (step + mixed, seeds * plan["steps"])
        plan = plan.get("teacher")
    return found


# -- the time of a step ----------------------------------------------------------------------------


def measure(scale: str, device: str, kind: Any, steps: list[Step]) -> dict[Step, float]:
    """Seconds of each kind of step, on a source that was not trained."""
    made = settings_of(kind, scale)
    target = load_target(MEASURED[kind], made.get("side", 32))
    dense = build(kind, 0, made, corpus_of(kind, made)).to(find_device(device))
    mixed = dense.copy()
    mixed.model = upcycle(mixed.model, **moe.mixture("top-k"))
    rows = target.labelled(0).rows(dense, tables.SCALES[scale].settings[kind].get("length"))
    found = {}
    for step in steps:
        what = step.removesuffix(MIXED)
        encoder = dense if what == step else mixed
        found[step] = _seconds(runner(what, encoder, rows, tables.SCALES[scale].settings[kind]))
    return found


def runner(what: Step, encoder: Encoder, rows: Rows, own: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of `steps` that takes so many."""
    trained = {word: own[f"adapt_{word}"] for word in pool.TRAINED}
    if what.startswith("tune "):
        tuned = {word: own[f"tune_{word}"] for word in pool.TUNED}
        method: Any = what.removeprefix("tune ")
        return partial(finetune, encoder, rows, method=method, lr=1e-5, **tuned)
    if what == "supcon":
        return partial(contrast, encoder, rows, seed=0, **trained)
    if what == "further":
        return partial(further_pretrain, encoder, rows, checks=1, **trained)
    match: Any = None if what == "distil" else what
    teacher = encoder.model.state_dict()
    return partial(self_distill, encoder, rows, teacher=teacher, match=match, checks=1, **trained)


def _seconds(run: Callable[..., Any]) -> float:
    """Of a step: what a run has besides its steps is in both of two runs, and drops out."""
    times = []
    for steps in (1, STEPS, 2 * STEPS):  # the first one warms up
        began = time.perf_counter()
        run(steps=steps)
        times.append(time.perf_counter() - began)
    return max(times[2] - times[1], 0.0) / STEPS


def _measured(asked: tuple[str, str, str, list[Step]]) -> dict[Step, float]:
    return measure(*asked)


def main(scale: str = "full", device: str | None = None, workers: str = "1") -> None:
    """Say how many steps each batch has and, where there is a device, what they take."""
    say, many = Console(highlight=False).print, int(workers)
    for kind in BATCHES:
        steps, took = count(scale, kind), {}
        if device is not None:
            asked = [(scale, device, kind, list(steps))] * many
            with multiprocessing.get_context("spawn").Pool(many) as pool_of_workers:
                each = pool_of_workers.map(_measured, asked, chunksize=1)
            took = {step: sum(one[step] for one in each) / many**2 for step in steps}
        for step, number in steps.most_common():
            time_of = f" × {1000 * took[step]:.1f} ms = {number * took[step]:.0f} s" if took else ""
            say(f"{kind}: {number:7d} {step}{time_of}")
        whole = sum(number * took.get(step, 0.0) for step, number in steps.items())
        say(f"{kind}: {sum(steps.values())} steps{f' = {whole:.0f} s' if took else ''}")


if __name__ == "__main__":
    main(*sys.argv[1:])
