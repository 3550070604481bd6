"""An ensemble of ALMA in one program beside a plain loop over its members, in one interleaved run.

    python benchmarks/ensembles.py --device cuda --out results/ensembles_gpu.json

mlp     784 -> 64 -> 64 -> 10 (Adadelta, batches of 128)
vgg19   the narrow VGG19 with 16 channels (SGD with momentum, batches of 128, images shifted and
        mirrored)

on random numbers, since only time is measured. A step is one update of every member: by a plain
loop (data on the device, foreach optimizer, no logging) and by the program of
`learner("ensemble", …, together=True)`. A phase is all that is done with a mega-batch, set-up and
checks on validation included: by that learner, by the one with together=False, and by
`train.Phased`, which is set up once for all phases and which the studies use. Every round times
each contender once, in turn; a figure is the median over rounds of (time of the loop / time of the
program) in the same round. On a GPU 4 is asked of a step of the MLP and 2 of one of VGG19.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from many_seeds import EXAMPLES, WARM, synchronize, timed
from torch import Tensor, nn
from torch.nn import functional as F

from moiety.anytime.backbones import MLP, VGG19, crop_flip
from moiety.anytime.base import Phase
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Fit, Training
from moiety.anytime.learners import learner
from moiety.anytime.together import fit_together, numbers_of
from moiety.io import write_json
from moiety.train.phased import Phased, Rules


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an image
    training: Training
    asked: float  # of a step on a GPU

    @property
    def batch(self) -> int:
        return self.training.batch


MOMENTUM = {"momentum": 0.9, "weight_decay": 1e-4}
CASES = {
    "mlp": Case(lambda: MLP(64), (1, 28, 28), Training(), 4),
    "vgg19": Case(
        lambda: VGG19(16),
        (3, 32, 32),
        Training(method="sgd", options=MOMENTUM, augment=crop_flip),
        2,
    ),
}


# -- a step: seconds for all members --------------------------------------------------------------


def loop(case: Case, data: Examples, members: int, steps: int) -> float:
    """The plain loop; its members have their steps one after the other."""
    return sum(timed(_member(case, data), case, data.x.device, steps) for _ in range(members))


def _member(case: Case, data: Examples) -> Callable[[Tensor], None]:
    model, augment = case.make().to(data.x.device), case.training.augment
    training = dataclasses.replace(
        case.training, options={**case.training.options, "foreach": True}
    )
    optimizer = training.optimizer(model.parameters())

    def step(rows: Tensor) -> None:
        x = data.x[rows] if augment is None else augment(data.x[rows])
        loss = F.cross_entropy(model(x), data.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def together(case: Case, data: Examples, members: int, steps: int) -> float:
    """One program, as the learner calls it."""
    training, marks = dataclasses.replace(case.training, steps=WARM + steps), []
    models = [case.make().to(data.x.device) for _ in range(members)]
    fits = [Fit(model, training, data, data.take([]), i) for i, model in enumerate(models)]

    def mark(share: float) -> None:
        if round(share * (WARM + steps)) in (WARM, WARM + steps):
            synchronize(data.x.device)
            marks.append(time.perf_counter())

    fit_together(fits, mark)
    times = [end - start for start, end in zip(marks[::2], marks[1::2])]  # of each block
    return sum(times) / steps


# -- a phase: seconds from its data to its end ----------------------------------------------------


def phases(training: Training, case: Case, data: Examples, members: int) -> dict[str, Any]:
    """What trains a phase, by name; called with its number."""
    held = len(data) // 10
    parts = {"train": data.take(range(held, len(data))), "validation": data.take(range(held))}

    def learns(in_one: bool) -> Callable[[int], Any]:
        words = {"members": members, "together": in_one, "training": training}
        made = learner("ensemble", lambda _: case.make(), device=data.x.device, **words)
        return lambda number: made.train(Phase(**parts, number=number))

    rows = torch.arange(len(data)).expand(members, -1)
    rules = Rules(
        optimizer=training.method,
        epochs=training.epochs,
        augment=training.augment,
        **numbers_of(training),
    )
    models = [case.make().to(data.x.device) for _ in range(members)]
    phased = Phased(models, data.x, data.y, rules)
    return {
        "loop": learns(False),
        "together": learns(True),
        "phased": lambda number: phased.phase(
            rows[:, held:], rows[:, :held], range(number, number + members)
        ),
    }


def seconds_of(act: Callable[[int], Any], number: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    act(number)
    synchronize(device)
    return time.perf_counter() - start


# -- the comparison -------------------------------------------------------------------------------


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    case, device = CASES[name], torch.device(args.device)
    x, y = torch.randn(EXAMPLES, *case.shape), torch.randint(10, (EXAMPLES,))
    data = Examples(x.to(device), y.to(device))
    short = dataclasses.replace(case.training, epochs=args.epochs)
    acts = phases(short, case, data.take(range(args.rows)), args.members)
    for act in acts.values():
        act(0)  # FLOPs are counted and kernels compiled in a first phase, once
    steps, whole = [], []
    for number in range(1, args.rounds + 1):
        steps.append(
            {f.__name__: f(case, data, args.members, args.steps) for f in (loop, together)}
        )
        whole.append({who: seconds_of(act, number, device) for who, act in acts.items()})
    found = {"step": summed_up(steps), "phase": summed_up(whole), "asked of a step": case.asked}
    for word in ("step", "phase"):
        for who, t in found[word]["times faster than the loop"].items():
            print(f"{name}, {word}: {who} {t['median']:.2f}×", flush=True)
    return found


def summed_up(rounds: list[dict[str, float]]) -> dict[str, Any]:
    times = {who: [r["loop"] / r[who] for r in rounds] for who in rounds[0] if who != "loop"}
    return {
        "milliseconds": {who: 1e3 * statistics.median(r[who] for r in rounds) for who in rounds[0]},
        "times faster than the loop": {
            who: {"median": statistics.median(t), "least": min(t), "most": max(t)}
            for who, t in times.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50, help="that are timed in a round")
    parser.add_argument("--rows", type=int, default=EXAMPLES, help="of a phase")
    parser.add_argument("--epochs", type=int, default=5, help="of a phase")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", choices=CASES, help="only this one")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", message="fit_many trains")  # said in the result instead
    result = {name: compare(name, args) for name in args.case or CASES}
    if args.out:
        gpu = torch.device(args.device).type == "cuda"
        facts = {
            "command": " ".join(["python benchmarks/ensembles.py", *sys.argv[1:]]),
            "machine": torch.cuda.get_device_name() if gpu else f"CPU, {args.threads} threads",
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        words = ("members", "steps", "rows", "epochs", "rounds")
        write_json(args.out, {**facts, **{w: vars(args)[w] for w in words}, "cases": result})


if __name__ == "__main__":
    main()
