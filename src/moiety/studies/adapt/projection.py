"""What the studies of adaptation will take: every step they ask for, times the time of a step.

    python -m moiety.studies.adapt.projection full cuda 12        # counted, and measured by 12
    python -m moiety.studies.adapt.projection full                # counted alone

Counted from the studies themselves, what they share once: an encoder is trained once for each
seed, a fine-tune for each point of the search and for each seed. (A set that one study has alone
and another with others may be fine-tuned with two settings: some 10k steps more.)

Models as small as these are bound by launches, not by the GPU: a step is 600 to 1 500 kernels of
some 3 µs, whoever launches them. So eight seeds, or the eight points of a search, take their steps
together (`adapt.together`), and these are captured as a CUDA graph. SupCon is alone. Several
processes share the GPU all the same, since a step has its host's part.

By hand, for one of eight: reckoned from steps that were timed alone on an H200 (docs/log.md) less
what was mended since, which was not timed:

    images   57k distil × 3.3 + 32k further × 1.6 + 15k others × 3 ms           = 285 s
             214k tune × 1.3 + 90k of RecAdam, MARS and R3F × 2 ms              = 460 s
             sources, eight side by side                                        = 165 s
    text     18k further × 3 + 18k distil × 5 + 9k others × 5 ms                = 190 s
             88k tune × 1.2 + 59k of RecAdam, MARS and R3F × 2 ms               = 225 s
             mixtures: 9k further × 5 + 12k distil × 10 + 34k tune × 2.3 ms     = 245 s
             sources, five side by side, and byte pairs                         = 220 s

Measured, in two runs of one H200: adapt/images and adapt/rounds 15 minutes, beside the encoders of
all others. Texts, with their head at the hidden places alone and byte pairs there already, 943 s,
with the other studies of images behind them all the while (`CUDA_MPS_CLIENT_PRIORITY=1`): sources
181 s, 90 encoders 492, what was left of the studies 270. The sources of these others were trained
at 930 s, their 100 encoders at 1 140, and all but adapt/supcon, which was begun last, had ended at
1 370. To fit were cut: all but five seeds, except in the first two studies; and, of what the digest
has, rounds 4 and 5, 300 labels of the low-resource study, a second fine-tune of a seed, further
steps than 1 200, and adaptation and fine-tuning as long as the paper's.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

from rich.console import Console

from ...adapt import finetune, further_pretrain, self_distill
from ...adapt.encoders import Encoder
from ...adapt.rows import Rows
from ...adapt.together import Member, together
from ...hf import upcycle
from ...train import find_device
from . import moe, pool, scales, tables, tunes
from .contrast import contrast
from .corpora import corpus_of
from .masked_models import build
from .sources import settings_of
from .targets import load_target

BATCHES = {
    "image": ["images", "ablation", "rounds", "gap", "steps", "weight", "low-resource", "supcon"],
    "text": ["text", "ablation-text", "moe"],
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
            for one in pool.each_of(arm):
                # Where it is searched, one of two lengths, on the mean.
                settings = {**whole.settings, "lr": 0, "longer": 1.5, **one, "sets": {}}
                points = scales.POINTS[scale] if study.search else 0
                for key, asked in _asked(settings, whole.seeds, points).items():
                    seen[key] = max(asked, seen.get(key, asked))  # of the study with most seeds
    found: Counter[Step] = Counter()
    for step, number in seen.values():
        found[step] += round(number)
    return found


def _asked(settings: Mapping[str, Any], seeds: int, points: int) -> dict[str, tuple[Step, float]]:
    """What the trials of an arm run, by all it depends on."""
    case = [settings["target"], pool.labels_of(settings), settings.get("experts")]
    mixed = MIXED if settings.get("experts") else ""
    plan, tune = pool.plan_of(settings), tunes.tune_of(settings)
    number = (points + seeds * settings["tunes"]) * tune["steps"]
    found = {json.dumps([case, plan, tune]): (f"tune {tune['method']}{mixed}", number)}
    while plan is not None:
        step = plan.get("match", "distil") if plan["stage"] == "distil" else plan["stage"]
        found[json.dumps([case, plan])] = (step + mixed, seeds * plan["steps"])
        plan = plan.get("teacher")
    return found


# -- the time of a step ----------------------------------------------------------------------------


def measure(scale: str, device: str, kind: Any, steps: list[Step]) -> dict[Step, float]:
    """Seconds of each kind of step, on a source that was not trained."""
    made, sets = settings_of(kind, scale), scales.SCALES[scale].settings["sets"]
    target = load_target(sets.get(MEASURED[kind], MEASURED[kind]), made.get("side", 32))
    dense = build(kind, 0, made, corpus_of(kind, made)).to(find_device(device))
    mixed = dense.copy()
    mixed.model = upcycle(mixed.model, **moe.mixture("top-k"))
    rows = target.labelled(0).rows(dense, scales.SCALES[scale].settings[kind].get("length"))
    found, crew = {}, scales.SCALES[scale].settings.get("crew", True)
    for step in steps:
        what = step.removesuffix(MIXED)
        encoder = dense if what == step else mixed
        run = runner(what, encoder, rows, scales.SCALES[scale].settings[kind])
        if what != "supcon":
            run = partial(run, capture=pool.CAPTURE)
        found[step] = _seconds(run, crew and what != "supcon")
    return found


def runner(what: Step, encoder: Encoder, rows: Rows, own: Mapping[str, Any]) -> Callable[..., Any]:
    """A function of `steps` that takes so many."""
    trained = {word: own[f"adapt_{word}"] for word in pool.TRAINED}
    if what.startswith("tune "):
        tuned = {word: own[f"tune_{word}"] for word in tunes.TUNED}
        method: Any = what.removeprefix("tune ")
        return partial(finetune, encoder, rows, method=method, lr=1e-5, **tuned)
    if what == "supcon":
        return partial(contrast, encoder, rows, seed=0, **trained)
    if what == "further":
        return partial(further_pretrain, encoder, rows, checks=1, **trained)
    match: Any = None if what == "distil" else what
    teacher = encoder.model.state_dict()
    return partial(self_distill, encoder, rows, teacher=teacher, match=match, checks=1, **trained)


def _seconds(run: Callable[..., Any], alike: bool) -> float:
    """Of a step: what a run has besides its steps is in both of two runs, and drops out.

    alike    run as many as the studies do together, and tell the time of one of them
    """
    times, many = [], tables.BLOCK if alike else 1
    for steps in (1, STEPS, 2 * STEPS):  # the first one warms up
        began = time.perf_counter()
        if alike:
            together([partial(_with, run, steps)] * many)
        else:
            run(steps=steps)
        times.append(time.perf_counter() - began)
    return max(times[2] - times[1], 0.0) / STEPS / many


def _with(run: Callable[..., Any], steps: int, crew: Member) -> None:
    run(steps=steps, crew=crew)


def _measured(asked: tuple[str, str, str, list[Step]]) -> dict[Step, float]:
    scale, device, kind, _ = asked
    precision = scales.SCALES[scale].settings[kind]["tune_precision"]
    with pool.quick(find_device(device), precision):
        return measure(*asked)


def main(scale: str = "full", device: str | None = None, workers: str = "1") -> None:
    """Say how many steps each batch has and, where there is a device, what they take."""
    say, many = Console(highlight=False).print, int(workers)
    for kind in BATCHES:
        steps, took = count(scale, kind), {}
        if device is not None:
            asked = [(scale, device, kind, list(steps))] * many
            with ProcessPoolExecutor(many, multiprocessing.get_context("spawn")) as crew:
                each = list(crew.map(_measured, asked))
            took = {step: sum(one[step] for one in each) / many**2 for step in steps}
        for step, number in steps.most_common():
            time_of = f" × {1000 * took[step]:.1f} ms = {number * took[step]:.0f} s" if took else ""
            say(f"{kind}: {number:7d} {step}{time_of}")
        whole = sum(number * took.get(step, 0.0) for step, number in steps.items())
        say(f"{kind}: {sum(steps.values())} steps{f' = {whole:.0f} s' if took else ''}")


if __name__ == "__main__":
    main(*sys.argv[1:])
