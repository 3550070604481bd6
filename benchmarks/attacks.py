"""Attacks of `moiety.robust` beside `torchattacks`, ART and the reference code of AutoAttack.

    python benchmarks/attacks.py --device cuda --data mnist --out results/attacks_gpu.json
    python benchmarks/attacks.py --data digits --images 200 --steps 20 --rounds 1

One run trains a dense and a mixed image transformer (8 experts, hard top-2) and attacks the same
test images, all of which the model gets right, with the same steps, step size, start and restarts.
One function scores what each contender returns; every round times each of them once, in turn. Peers
are looked for in the folder `--peers` as well, and those that are not there are left out.

pgd                steps of eps / 4 from the image itself; the last point is the answer
apgd, apgd-dlr     AutoPGD on cross-entropy and on the difference of logits ratio: in the first
                   restart all start from our random points; the reference and torchattacks keep any
                   point that fools, ART the last one
apgd-dlr-targeted  towards the `--targets` likeliest classes, from our random points for each class

Nobody stops early in what is timed. (In targeted runs peers drop what is fooled between classes, so
that no speed is compared.) "moiety" is a call with a module, which captures its step anew;
"target kept" reuses the capture. What a contender does in a step is `PER_STEP`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import platform
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from moiety import MoE
from moiety.data import load_problem
from moiety.io import write_json
from moiety.models import ImageTransformer, feedforward
from moiety.robust import APGD, PGD, Attack, Noise, Target, named_attacks, run_attack
from moiety.train import fit

MODELS = {"dense": "dense", "mixture": "top-k"}
LOSS = {"apgd": "ce", "apgd-dlr": "dlr", "apgd-dlr-targeted": "dlr-targeted"}
TIMED = ("pgd", "apgd", "apgd-dlr")
ATTACKS = ("pgd", *LOSS)
ROUTER = ["apgd", *(f"apgd + {x}" for x in ("router-margin", "overload", "diversity", "auxiliary"))]
WEAKER, PGD_APART, FASTER = 0.2, 0.5, 2.0  # points of accuracy, points, times
PER_STEP = {
    "moiety": "a forward and a backward to the input; on a GPU one graph, nothing waits",
    "torchattacks": "a forward and a backward to the input; waits for indices and for the losses",
    "autoattack": "a forward and a backward to the input; waits for indices",
    "art": "apgd: two forwards, a backward to input and parameters, points in numpy on the host "
    "(dlr: a Python loop over the examples besides); pgd: a forward and a backward to input and "
    "parameters, waits for a check of NaN",
}
Run = Callable[[Tensor, Tensor], Tensor]  # images and labels to adversarial images


class Unit(nn.Module):
    """An image model that takes [0, 1] and cuts its patches by one copy.

    `unfold` launches a kernel for every image: all would wait for that, and graphs look too good.
    """

    def __init__(self, model: ImageTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        x, p = (x - self.model.mean) / self.model.std, self.model.patch
        cut = x.unflatten(-1, (-1, p)).unflatten(-3, (-1, p))  # [B, C, rows, p, columns, p]
        return self.model.trunk(cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))


def trained(router: str, problem: Any, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    images = problem.train.inputs["images"][: args.train]
    y = problem.train.targets[problem.targets[0].name][: args.train]
    # In fp32 a grouped product waits for the host, for whoever attacks; the dense one does not.
    words = {} if router == "dense" else {"backend": "dense"}
    model = ImageTransformer(
        shape=tuple(images.shape[1:]),
        outputs=len(problem.targets[0].classes),
        mean=problem.mean,
        std=problem.std,
        feedforward=feedforward(router, hidden=192, experts=8, k=2, **words),
    ).to(args.device)
    fit(model, TensorDataset(images, y), epochs=args.epochs, batch=128, seed=args.seed)
    unit, few = Unit(model).eval(), images[:8].to(args.device)
    torch.testing.assert_close(unit(few / 255), model(few), rtol=1e-3, atol=1e-3)
    return unit


def held_out(model: nn.Module, problem: Any, args: argparse.Namespace) -> dict[str, Any]:
    """The accuracy on all test images, and the first ones that the model gets right."""
    x = (problem.test.inputs["images"] / 255).to(args.device)
    y = problem.test.targets[problem.targets[0].name].to(args.device)
    right = correct(model, x, y)
    rows = right.nonzero()[: args.images, 0]
    return {"clean": right.float().mean().item(), "x": x[rows], "y": y[rows]}


# -- contenders ------------------------------------------------------------------------------------


def ours(name: str, model: nn.Module | Target, args: argparse.Namespace, stop: bool = False) -> Run:
    attack: Attack = PGD(steps=args.pgd_steps, rel_stepsize=0.25)
    if name != "pgd":
        words: dict[str, Any] = {"loss": LOSS[name], "targets": args.targets}
        attack = APGD(steps=args.steps, restarts=args.restarts, **words)
    keep: Any = "last" if name == "pgd" else "fooled"

    def run(x: Tensor, y: Tensor) -> Tensor:
        words: dict[str, Any] = {"batch": args.batch, "keep": keep, "early_stop": stop}
        return run_attack(attack, model, x, y, args.eps, seed=args.seed, **words).x

    return run


def torchattacks_(name: str, model: nn.Module, args: argparse.Namespace) -> Run:
    import torchattacks as them

    if name == "pgd":
        attack = them.PGD(model, args.eps, args.eps / 4, args.pgd_steps, random_start=False)
        return batched(attack, args, start=False)
    known = {"steps": args.steps, "n_restarts": args.restarts, "seed": args.seed}
    if name == "apgd-dlr-targeted":
        aimed = them.APGDT(model, "Linf", args.eps, n_classes=args.targets + 1, **known)
        return batched(aimed, args, aimed=aimed)
    return batched(them.APGD(model, "Linf", args.eps, loss=LOSS[name], **known), args)


def autoattack_(name: str, model: nn.Module, args: argparse.Namespace) -> Run:
    from autoattack.autopgd_base import APGDAttack, APGDAttack_targeted

    known: dict[str, Any] = {"n_iter": args.steps, "n_restarts": args.restarts, "seed": args.seed}
    known |= {"eps": args.eps, "device": args.device}
    if name == "apgd-dlr-targeted":
        aimed = APGDAttack_targeted(model, n_target_classes=args.targets, **known)
        return batched(aimed.perturb, args, aimed=aimed)
    return batched(APGDAttack(model, loss=LOSS[name], **known).perturb, args)


def art_(name: str, model: nn.Module, args: argparse.Namespace) -> Run:
    from art.attacks.evasion import AutoProjectedGradientDescent, ProjectedGradientDescentPyTorch
    from art.attacks.evasion import auto_projected_gradient_descent as module
    from art.estimators.classification import PyTorchClassifier

    kind = "gpu" if torch.device(args.device).type == "cuda" else "cpu"
    known: dict[str, Any] = {"nb_classes": args.classes, "clip_values": (0, 1), "device_type": kind}
    classifier = PyTorchClassifier(model, nn.CrossEntropyLoss(), args.shape, **known)
    common: dict[str, Any] = {"eps": args.eps, "batch_size": args.batch, "verbose": False}
    if name == "pgd":
        common |= {"eps_step": args.eps / 4, "max_iter": args.pgd_steps}
        attack = ProjectedGradientDescentPyTorch(classifier, num_random_init=0, **common)
    else:
        common |= {"eps_step": 2 * args.eps, "max_iter": args.steps}
        kinds = {"apgd": "cross_entropy", "apgd-dlr": "difference_logits_ratio"}
        words = {"loss_type": kinds[name], "nb_random_init": args.restarts}
        attack = AutoProjectedGradientDescent(classifier, **words, **common)

    def run(x: Tensor, y: Tensor) -> Tensor:
        away = 2 * draws(x, args).flatten(1) - 1
        edge = (args.eps * away / away.abs().amax(1, keepdim=True)).cpu().numpy()
        real = module.random_sphere

        def sphere(n: int, *rest: Any) -> Any:
            return edge if n == len(edge) else real(n, *rest)

        with mock.patch.object(module, "random_sphere", sphere):
            found = attack.generate(x.cpu().numpy(), y.cpu().numpy())
        return torch.as_tensor(found).to(x)

    return run


def batched(attack: Run, args: argparse.Namespace, start: bool = True, aimed: Any = None) -> Run:
    """An attack batch by batch; with `start` from our random points, `aimed` for each class."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        found, noise = [], [draws(x, args, i) for i in range(args.targets if aimed else 1)]
        for rows in torch.arange(len(x), device=x.device).split(args.batch):
            with contextlib.ExitStack() as patched:
                if aimed:
                    patched.enter_context(same_starts(aimed, x[rows], [n[rows] for n in noise]))
                elif start:
                    patched.enter_context(same_rand(noise[0][rows]))
                found.append(attack(x[rows], y[rows]))
        return torch.cat(found)

    return run


def draws(x: Tensor, args: argparse.Namespace, number: int = 0) -> Tensor:
    """The random numbers behind our starts in the first restart, for the class of that number."""
    noise = Noise(args.seed, torch.arange(len(x), device=x.device)).stream(0).stream(number)
    return noise.uniform(x.shape[1:], x.dtype)


@contextlib.contextmanager
def same_starts(aimed: Any, x: Tensor, numbers: list[Tensor]) -> Iterator[None]:
    """Run for run, a class each, a targeted attack starts from these, also with fewer examples."""
    real, runs = aimed.attack_single_run, iter(numbers)

    def single(left: Tensor, *rest: Any, **words: Any) -> Any:
        rows = (left.flatten(1)[:, None] == x.flatten(1)[None]).all(-1).float().argmax(1)
        with same_rand(next(runs)[rows]):
            return real(left, *rest, **words)

    with mock.patch.object(aimed, "attack_single_run", single):
        yield


@contextlib.contextmanager
def same_rand(numbers: Tensor) -> Iterator[None]:
    """`torch.rand` gives these, once; examples that were left out, or a restart, get their own."""
    real, given = torch.rand, [numbers]

    def rand(*shape: Any, **words: Any) -> Tensor:
        fits = given and len(shape) == 1 and tuple(shape[0]) == given[0].shape
        return given.pop() if fits else real(*shape, **words)

    with mock.patch.object(torch, "rand", rand):
        yield


PEERS = {"torchattacks": torchattacks_, "art": art_, "autoattack": autoattack_}


def contenders(name: str, model: nn.Module, args: argparse.Namespace) -> dict[str, Run]:
    found = {
        "moiety": ours(name, model, args),
        "moiety, target kept": ours(name, Target(model), args),
        "moiety, early stopping": ours(name, model, args, stop=True),
    }
    lacks = {("pgd", "autoattack"), ("apgd-dlr-targeted", "art")}
    for who in args.found:
        if (name, who) not in lacks:
            found[who] = PEERS[who](name, model, args)
    return found


# -- the comparison --------------------------------------------------------------------------------


@torch.no_grad()
def correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([model(a).argmax(-1) == b for a, b in zip(x.split(500), y.split(500))])


def timed(run: Run, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    gc.collect()  # what the last one left is not this one's work
    wait(x)
    start = time.perf_counter()
    found = run(x, y)
    wait(x)
    return time.perf_counter() - start, found.detach()


def wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def compare(
    name: str, model: nn.Module, x: Tensor, y: Tensor, args: argparse.Namespace
) -> dict[str, Any]:
    """Accuracy from a first round, which also does what is done once; then the timed rounds.

    Whoever took longer than `--patience` in the first round is not asked again.
    """
    runs = contenders(name, model, args)
    first = {who: timed(run, x, y) for who, run in runs.items()}
    again = {who: run for who, run in runs.items() if first[who][0] <= args.patience}
    rounds: list[dict[str, float]] = []
    while name in TIMED and len(rounds) < args.rounds and not late(args, bool(rounds)):
        rounds.append({who: timed(run, x, y)[0] for who, run in again.items()})
    rows: dict[str, Any] = {}
    for who, (seconds, x_adv) in first.items():
        each = [r[who] for r in rounds if who in r]
        base = [r["moiety"] for r in rounds if "moiety" in r] or [first["moiety"][0]]
        slower = [a / b for a, b in zip(each, base)] or [seconds / statistics.median(base)]
        rows[who] = {
            "robust accuracy": correct(model, x_adv, y).float().mean().item(),
            "farthest": (x_adv - x).abs().max().item(),
            "seconds": statistics.median(each or [seconds]),
            "rounds": len(each),  # 0: the first one only
            "times slower": statistics.median(slower) if name in TIMED else None,
        }
        show(name, who, rows[who])
    return rows


def late(args: argparse.Namespace, begun: bool) -> bool:
    return begun and time.perf_counter() - args.began > args.budget


def show(name: str, who: str, row: dict[str, Any]) -> None:
    slower = "" if row["times slower"] is None else f"{row['times slower']:7.2f}×"
    accuracy = f"robust accuracy {row['robust accuracy']:.4f}"
    print(f"  {name:18} {who:23} {accuracy} {row['seconds']:8.3f} s {slower}", flush=True)


def router_aware(
    model: nn.Module, x: Tensor, y: Tensor, args: argparse.Namespace
) -> dict[str, float]:
    """Robust accuracy of AutoPGD, of attacks that see the router too, and of their union."""
    fooled = {}
    for name, attack in named_attacks(ROUTER, steps=args.steps).items():
        words: dict[str, Any] = {"batch": args.batch, "seed": args.seed, "early_stop": False}
        fooled[name] = run_attack(attack, model, x, y, args.eps, **words).fooled
    fooled["union"] = torch.stack(list(fooled.values())).any(0)
    found = {name: 1 - f.float().mean().item() for name, f in fooled.items()}
    print(f"  seeing the router  {', '.join(f'{n} {a:.4f}' for n, a in found.items())}", flush=True)
    return found


def as_built(model: nn.Module, x: Tensor, y: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """AutoPGD on one batch, with the experts run as a layer does by itself; not checked."""
    layers = [m for m in model.modules() if isinstance(m, MoE)]
    for layer in layers:
        layer.backend = "auto"
    print("  experts as a layer runs them by itself, one batch:", flush=True)
    rows = compare("apgd", model, x[: args.batch], y[: args.batch], args)
    for layer in layers:
        layer.backend = "dense"
    return rows


# -- what must hold --------------------------------------------------------------------------------


def checks(models: dict[str, Any], gpu: bool) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []

    def add(what: str, found: float, limit: float, ok: bool) -> None:
        out.append({"what": what, "found": round(found, 4), "limit": limit, "pass": ok})

    for which, result in models.items():
        for name, rows in result["attacks"].items():
            own = rows["moiety"]
            for who in (w for w in rows if not w.startswith("moiety")):
                points = 100 * (own["robust accuracy"] - rows[who]["robust accuracy"])
                title = f"{which}, {name}, {who}"
                if name == "pgd" and who == "art":
                    add(f"{title}: points apart", abs(points), PGD_APART, abs(points) <= PGD_APART)
                elif name != "pgd":
                    add(f"{title}: points weaker", points, WEAKER, points <= WEAKER)
                slower = rows[who]["times slower"]
                if gpu and slower is not None:
                    add(f"{title}: times slower", slower, FASTER, slower >= FASTER)
        if "router" in result:
            points = 100 * (result["router"]["union"] - result["router"]["apgd"])
            add(f"{which}, union against apgd alone: points weaker", points, 0.0, points <= 0)
    return out


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", default="digits", help="any image set of `moiety data list`")
    parser.add_argument("--data-dir")
    parser.add_argument("--peers", help="a folder with the packages of the peers")
    parser.add_argument("--eps", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=50, help="of AutoPGD")
    parser.add_argument("--pgd-steps", type=int, default=40)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--targets", type=int, default=3)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--train", type=int, default=20000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=3.0, help="seconds; see `compare`")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; then one round each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="only this one")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--out")
    return parser.parse_args()


def find_peers(args: argparse.Namespace) -> list[str]:
    if args.peers:
        sys.path.append(args.peers)
    found = [who for who in PEERS if importlib.util.find_spec(who) is not None]
    for who in PEERS:
        if who not in found:
            print(f"{who} is not here and left out: install it, or give its folder by --peers")
    return found


def main() -> None:
    args = options()
    args.began, args.found = time.perf_counter(), find_peers(args)
    gpu = torch.device(args.device).type == "cuda"
    if not gpu:
        torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore", module="art|torchattacks|autoattack")
    problem = load_problem(args.data, data_dir=args.data_dir)
    args.shape = tuple(problem.test.inputs["images"].shape[1:])
    args.classes = len(problem.targets[0].classes)
    models: dict[str, Any] = {}
    for which in args.model or MODELS:
        model = trained(MODELS[which], problem, args)
        clean, x, y = held_out(model, problem, args).values()
        spent = time.perf_counter() - args.began
        print(f"{which}: clean accuracy {clean:.4f}, {len(x)} images, {spent:.0f} s", flush=True)
        found = {name: compare(name, model, x, y, args) for name in args.attack or ATTACKS}
        models[which] = {"clean accuracy": clean, "images": len(x), "attacks": found}
        if which == "mixture":
            models[which]["router"] = router_aware(model, x, y, args)
            models[which]["apgd, experts as built, one batch"] = as_built(model, x, y, args)
    held = checks(models, gpu)
    for check in held:
        word = "pass" if check["pass"] else "FAIL"
        print(f"{word}  {check['what']} {check['found']} (limit {check['limit']})")
    spent = time.perf_counter() - args.began
    print(f"{sum(c['pass'] for c in held)} of {len(held)} hold, {spent:.0f} s")
    if args.out:
        store(args, gpu, {"seconds": spent, "checks": held, "per step": PER_STEP, "models": models})


def store(args: argparse.Namespace, gpu: bool, result: dict[str, Any]) -> None:
    typed = [f"results/{Path(a).name}" if a == args.out else a for a in sys.argv[1:]]
    facts = {
        "command": f"python benchmarks/attacks.py {shlex.join(typed)}",
        "machine": torch.cuda.get_device_name() if gpu else f"CPU, {args.threads} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "peers": args.found,
    }
    names = ("data", "eps", "steps", "pgd_steps", "restarts", "targets", "batch", "rounds", "seed")
    write_json(args.out, {**facts, **{key: vars(args)[key] for key in names}, **result})


if __name__ == "__main__":
    main()
