"""Attacks of `moiety.robust` beside `torchattacks`, ART and the reference code of AutoAttack.

    python benchmarks/attacks.py --device cuda --data mnist --out results/attacks_gpu.json
    python benchmarks/attacks.py --data digits --examples 300 --rounds 1

One run trains a dense and a mixed image transformer, attacks the same test images with the same
steps, step size, kind of start and number of restarts, and reports robust accuracy (scored by one
function on what each contender returns) and seconds. Every round times each contender once, in
turn. `moiety` runs without early stopping; what it saves is shown apart. Contenders that are not
installed are left out.

pgd       random start in the ball, steps of eps / 4
apgd      cross-entropy
apgd-dlr  difference of logits ratio
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from moiety.data import load_problem
from moiety.io import write_json
from moiety.models import ImageTransformer, feedforward
from moiety.robust import APGD, PGD, run_attack
from moiety.robust.base import Attack
from moiety.train import fit

MODELS = {"dense": "dense", "mixture": "top-k"}
ATTACKS = ("pgd", "apgd", "apgd-dlr")
Run = Callable[[Tensor, Tensor], Tensor]  # images and labels to adversarial images


class Unit(nn.Module):
    """The image models take bytes; attacks speak of [0, 1]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * 255)


def trained(router: str, problem: Any, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    images = problem.train.inputs["images"][: args.train]
    y = problem.train.targets[problem.targets[0].name][: args.train]
    model = ImageTransformer(
        shape=tuple(images.shape[1:]),
        outputs=len(problem.targets[0].classes),
        mean=problem.mean,
        std=problem.std,
        feedforward=feedforward(router, hidden=192, experts=8, k=2),
    ).to(args.device)
    fit(model, TensorDataset(images, y), epochs=args.epochs, batch=128, seed=args.seed)
    return Unit(model).eval()


# -- contenders ------------------------------------------------------------------------------------


def ours(name: str, model: nn.Module, eps: float, args: argparse.Namespace, stop: bool) -> Run:
    attack: Attack = APGD(
        steps=args.steps,
        restarts=args.restarts,
        loss="dlr" if name == "apgd-dlr" else "ce",
    )
    if name == "pgd":
        attack = PGD(steps=args.steps, rel_stepsize=0.25, random_start=True, restarts=args.restarts)
    # A point that fools is what all of them look for; PGD of the others gives its last point.
    keep = "last" if name == "pgd" and not stop else "fooled"

    def run(x: Tensor, y: Tensor) -> Tensor:
        words: dict[str, Any] = {"batch": args.batch, "keep": keep, "early_stop": stop}
        return run_attack(attack, model, x, y, eps, seed=args.seed, **words).x

    return run


def torchattacks_(name: str, model: nn.Module, eps: float, args: argparse.Namespace) -> Run:
    import torchattacks

    if name == "pgd":
        attack = torchattacks.PGD(model, eps, eps / 4, args.steps, random_start=True)
    else:
        loss = "dlr" if name == "apgd-dlr" else "ce"
        words = {"steps": args.steps, "n_restarts": args.restarts, "loss": loss}
        attack = torchattacks.APGD(model, "Linf", eps, seed=args.seed, **words)
    return batched(attack, args.batch)


def art_(name: str, model: nn.Module, eps: float, args: argparse.Namespace) -> Run:
    from art.attacks.evasion import (
        AutoProjectedGradientDescent,
        ProjectedGradientDescentPyTorch,
    )
    from art.estimators.classification import PyTorchClassifier

    loss = nn.CrossEntropyLoss()
    kind = "gpu" if torch.device(args.device).type == "cuda" else "cpu"
    known: dict[str, Any] = {"nb_classes": args.classes, "clip_values": (0, 1), "device_type": kind}
    classifier = PyTorchClassifier(model, loss, args.shape, **known)
    common: dict[str, Any] = {"max_iter": args.steps, "batch_size": args.batch, "verbose": False}
    if name == "pgd":
        make, step = ProjectedGradientDescentPyTorch, eps / 4
        common["num_random_init"] = args.restarts
    else:
        make, step = AutoProjectedGradientDescent, 2 * eps
        ratio, entropy = "difference_logits_ratio", "cross_entropy"
        common["loss_type"] = ratio if name == "apgd-dlr" else entropy
        common["nb_random_init"] = args.restarts
    attack = make(classifier, eps=eps, eps_step=step, **common)
    return lambda x, y: torch.as_tensor(attack.generate(x.cpu().numpy(), y.cpu().numpy())).to(x)


def reference(name: str, model: nn.Module, eps: float, args: argparse.Namespace) -> Run:
    from autoattack.autopgd_base import APGDAttack

    loss = "dlr" if name == "apgd-dlr" else "ce"
    words: dict[str, Any] = {"n_iter": args.steps, "n_restarts": args.restarts, "loss": loss}
    attack = APGDAttack(model, eps=eps, seed=args.seed, device=args.device, **words)
    return batched(attack.perturb, args.batch)


def batched(attack: Callable[[Tensor, Tensor], Tensor], size: int) -> Run:
    def run(x: Tensor, y: Tensor) -> Tensor:
        parts = zip(x.split(size), y.split(size))
        return torch.cat([attack(images, labels) for images, labels in parts])

    return run


def contenders(name: str, model: nn.Module, eps: float, args: argparse.Namespace) -> dict[str, Run]:
    found = {
        "moiety": ours(name, model, eps, args, stop=False),
        "moiety, early stopping": ours(name, model, eps, args, stop=True),
    }
    others = {"torchattacks": torchattacks_, "art": art_, "autoattack": reference}
    for who, make in others.items():
        if importlib.util.find_spec(who) is None or (who == "autoattack" and name == "pgd"):
            continue
        if who == "torchattacks" and name == "pgd" and args.restarts > 1:
            continue  # it knows no restarts
        found[who] = make(name, model, eps, args)
    return found


# -- the comparison --------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    hits = [(model(a).argmax(-1) == b).float() for a, b in zip(x.split(256), y.split(256))]
    return float(torch.cat(hits).mean())


def timed(run: Run, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    wait(x)
    start = time.perf_counter()
    found = run(x, y)
    wait(x)
    return time.perf_counter() - start, found


def wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def compare(
    name: str, model: nn.Module, x: Tensor, y: Tensor, eps: float, args: argparse.Namespace
) -> dict[str, Any]:
    runs = contenders(name, model, eps, args)
    for run in runs.values():  # what is done once: kernels are chosen and memory is taken
        run(x[: args.batch], y[: args.batch])
    rounds, found = [], {}
    for _ in range(args.rounds):
        seconds = {}
        for who, run in runs.items():
            seconds[who], found[who] = timed(run, x, y)
        rounds.append(seconds)
    rows = {
        who: {
            "robust accuracy": accuracy(model, x_adv, y),
            "farthest": (x_adv.detach() - x).abs().max().item(),
            "seconds": statistics.median(r[who] for r in rounds),
            "times slower": statistics.median(r[who] / r["moiety"] for r in rounds),
        }
        for who, x_adv in found.items()
    }
    for who, row in rows.items():
        print(
            f"  {name:9} eps {eps:.4f}  {who:23} robust accuracy {row['robust accuracy']:.4f}  "
            f"{row['seconds']:8.3f} s  {row['times slower']:6.2f}×",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default="digits", help="any image set of `moiety data list`")
    parser.add_argument("--data-dir")
    parser.add_argument("--eps", default="0.02,0.05")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--train", type=int, default=20000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="only this one")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="art|torchattacks")
    problem = load_problem(args.data, data_dir=args.data_dir)
    x = (problem.test.inputs["images"][: args.examples] / 255).to(args.device)
    y = problem.test.targets[problem.targets[0].name][: args.examples].to(args.device)
    args.shape, args.classes = tuple(x.shape[1:]), len(problem.targets[0].classes)
    result: dict[str, Any] = {}
    for which in args.model or MODELS:
        model = trained(MODELS[which], problem, args)
        clean = accuracy(model, x, y)
        print(f"{which}: clean accuracy {clean:.4f}, {len(x)} images of {args.data}", flush=True)
        result[which] = {"clean accuracy": clean, "attacks": {}}
        for name in args.attack or ATTACKS:
            by_eps = {e: compare(name, model, x, y, float(e), args) for e in args.eps.split(",")}
            result[which]["attacks"][name] = by_eps
    if args.out:
        gpu = torch.device(args.device).type == "cuda"
        facts = {
            "machine": torch.cuda.get_device_name() if gpu else f"CPU, {args.threads} threads",
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        names = ("data", "steps", "restarts", "examples", "batch", "rounds", "seed")
        settings = {key: vars(args)[key] for key in names}
        command = "python benchmarks/attacks.py " + " ".join(sys.argv[1:])
        write_json(args.out, {"command": command, **facts, **settings, "models": result})


if __name__ == "__main__":
    main()
