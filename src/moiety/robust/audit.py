"""`audit`: what an attacker can do to a model, and through which door.

    found = audit(model, (x, y), eps=[0, 1 / 255, 8 / 255], attacks=["pgd", "apgd"])
    print(found)                        # error by attack and eps
    found.result["union"]["error"]      # JSON-able; `check_audit` says what it must hold
    found.to_html("audit.html")

Models with MoE layers, ours or those of transformers, are seen with their routes; a dense model has
none. A text model is attacked in the space of its embeddings: give token ids `[N, L]` (or the
embeddings) and, as labels, the token that follows; eps is then in units of the embeddings, and
there are no bounds. In several processes each takes a part of the examples (see `parallel`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..io import write_atomic, write_json
from ..report import audit_page
from .attack import Attacks
from .audit_attacks import check_router_attacks, named_attacks
from .audit_check import check_audit
from .audit_inputs import Auto, read_inputs
from .audit_result import make_result, table
from .audit_work import Plan, Tick, couples, do, layers_of
from .ball import Ball, Norm
from .base import check_counts
from .noise import check_seed
from .parallel import here, join, my_rows, together
from .target import Bounds, Normalize, Target, check_inputs, plain_inputs

EPS = (0.0, 1 / 255, 2 / 255, 4 / 255, 8 / 255)
STEPS, FEW = 100, 20  # of the search for masking: with fewer an honest model looks masked


@dataclass(frozen=True)
class Audit:
    """The result of an audit, as plain values, and ways to show it."""

    result: dict[str, Any]

    def __str__(self) -> str:
        return table(self.result)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, whole or not at all."""
        return write_atomic(path, audit_page(self.result))

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the result."""
        return write_json(path, self.result)


def audit(
    model: nn.Module | Target,
    data: Any,
    eps: float | Iterable[float] = EPS,
    attacks: Sequence[str | Attacks] | Mapping[str, str | Attacks] | str = ("pgd", "apgd"),
    *,
    steps: int | None = None,
    norm: Norm = "linf",
    bounds: Bounds | Auto = "auto",
    normalize: Normalize = None,
    batch: int = 256,
    group: int = 1,
    seed: int = 0,
    source: nn.Module | Target | None = None,
    attribution: bool = True,
    masking: int = 64,
    lipschitz: int = 8,
    repeats: int = 2,
    name: str | None = None,
    data_name: str | None = None,
    command: str = "",
    progress: bool = True,
) -> Audit:
    """Attack a model at every eps by every attack, and find out what the attacks did.

    data         (x, y), a TensorDataset of the two, batches of them (a DataLoader), a dict with
                 "labels" as models of transformers take it (texts without padding), or a
                 `Problem` (its test examples)
    attacks      names (see `audit_attacks`), objects, or objects by name
    steps        of the attacks by name and of those that look for masking; None: their own
    bounds       of x; "auto": (0, 1), and none for embeddings and tables
    normalize    (mean, std) or a function, applied inside the model
    group        examples that share a call and are attacked together; above 1 the result is
                 labelled a batch threat model
    source       another model, from which attacks are transferred in the search for masking
    attribution  whether the doors are told apart: three more attacks for each eps
    masking      examples, the first ones, on which masked gradients are looked for
    lipschitz    examples whose local Lipschitz constants are estimated; 0: none
    repeats      clean runs, which tell noise from attack
    """
    known = named_attacks(attacks, steps)
    sizes = _eps(eps, norm, None if bounds == "auto" else bounds)
    check_counts(batch=batch, group=group, masking=masking, repeats=repeats)
    check_counts(least=0, lipschitz=lipschitz)
    check_seed(seed)
    target = model if isinstance(model, Target) else Target(model)
    inputs = read_inputs(data, target.model, bounds, normalize, data_name)
    if inputs.normalize is not None and isinstance(model, Target):
        raise ValueError("a Target has its own normalize: leave it out here")
    if not isinstance(model, Target):
        target = replace(target, normalize=inputs.normalize)
    check_inputs(inputs.x, inputs.y, inputs.bounds)
    x, y = plain_inputs(inputs.x, inputs.y)
    target.warn_training()

    rows = my_rows(len(x), group)
    check_router_attacks(known, target, x[:1].to(target.device or x.device))
    plan = Plan(
        target=target,
        x=x[rows.start : rows.stop],
        y=y[rows.start : rows.stop],
        ids=torch.arange(rows.start, rows.stop),
        eps=sizes,
        attacks=known,
        norm=norm,
        bounds=inputs.bounds,
        batch=batch,
        group=group,
        seed=seed,
        steps=max(steps or STEPS, FEW),
        source=_source(source, target, x, y),
        main=_main(known) if attribution else None,
        masking=-(-masking // group) * group,
        lipschitz=lipschitz,
        first=x[: max(lipschitz, 1)],
        repeats=repeats,
        layers=layers_of(target),
        why=couples(target, x),
    )
    with _bar(plan, progress) as tick:
        parts = together(lambda: do(plan, tick))
    named = name or type(target.model).__name__
    result = make_result(plan, join(parts), named, inputs.name, command)
    check_audit(result)
    return Audit(result)


def _eps(eps: float | Iterable[float], norm: Norm, bounds: Bounds) -> list[float]:
    """In order, each once."""
    sizes = list(eps) if isinstance(eps, Iterable) else [eps]
    sizes = [e.item() if isinstance(e, Tensor) and e.numel() == 1 else e for e in sizes]
    for size in sizes:
        Ball(size, norm, bounds)
    if not any(sizes):
        raise ValueError(f"eps must hold at least one number above 0, got {sizes}")
    return sorted({float(size) for size in sizes})


def _source(
    source: nn.Module | Target | None, target: Target, x: Tensor, y: Tensor
) -> Target | None:
    """Checked here, since it is needed last."""
    if source is None:
        return None
    if not isinstance(source, Target):
        source = Target(source, normalize=target.normalize)
    with source.at_rest(), torch.no_grad():
        source.check_logits(source(x[:1].to(source.device or x.device)).logits, y)
    return source


def _main(attacks: Mapping[str, Attacks]) -> str:
    """The attack whose doors are looked at."""
    return "apgd" if "apgd" in attacks else next(iter(attacks))


@contextlib.contextmanager
def _bar(plan: Plan, shown: bool) -> Iterator[Tick]:
    """A bar in a terminal, in the first process; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    hidden = not shown or here()[0] > 0 or not console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task, begun = bar.add_task("audit", total=plan.parts()), iter([0])

        def tick(what: str) -> None:
            # Called when a part begins, so that the first call completes none.
            bar.update(task, description=what, advance=next(begun, 1))

        yield tick
