"""What the gates of a trained model do: the paper's rule, the experts used, facts for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import cost
from ...lab.study import Running, Settings
from ...modes import at_rest
from ...multitask import MultiGate, Trajectory
from ...multitask.gate_log import mean_active, mean_gate
from ...multitask.similar import cosine_matrix
from ...multitask.together import one_row
from ...routing import Routing

MOST = 4  # experts that a Gumbel gate may expect, in all of the paper's experiments
POINTS, SHOWN, PICTURED = 60, 3, 32  # of a course; tasks whose gates, whose likeness is shown

RULES = {
    "dselect-k-static": "a selector is not binary",
    "dselect-k": "more than k experts an example on average",
    "gumbel-static": f"more than {MOST} experts expected",
}

# The setting "rule" where static selectors need not be binary, if tasks use k experts on average.
AT_MOST_K = "at most k"


def allowed(settings: Settings, routings: Mapping[str, Routing]) -> Tensor:
    """Scalar bool: the paper's rule for solutions that count, on decisions made in eval mode."""
    each, name = list(routings.values()), settings["gate"]
    if name == "dselect-k-static" and settings.get("rule") != AT_MOST_K:
        return share_exact(routings, settings["k"]) == 1
    if name in ("dselect-k", "dselect-k-static"):
        return torch.stack([mean_active(r) for r in each]).mean() <= settings["k"]
    if name == "gumbel-static":
        expected = [r.scores.sigmoid().sum() for r in each if r.scores is not None]
        return torch.stack(expected).mean() <= MOST
    return torch.ones((), dtype=torch.bool)


def _exact(routing: Routing, k: int) -> Tensor:
    """Scalar bool: all selectors of a DSelect-k gate are binary.

    Of an exact selector, and of no other, the entropy is 0; but it counts as 0 in a warm-up, too,
    when all experts are at work.
    """
    return (routing.penalties["entropy"] == 0) & (mean_active(routing) <= k)


def share_exact(routings: Mapping[str, Routing], k: int) -> Tensor:
    """Scalar: the share of the tasks whose DSelect-k gates are binary."""
    return torch.stack([_exact(r, k) for r in routings.values()]).float().mean()


def not_binary(record: Mapping[str, Any]) -> str | None:
    """The rule of a search: why a solution does not count. In a smoke run nothing can be binary."""
    settings = record["settings"]
    if record["extra"].get("allowed", True) or settings["scale"] == "smoke":
        return None
    loose = settings.get("rule") == AT_MOST_K
    return "more than k experts at work on average" if loose else RULES[settings["gate"]]


def experts_used(model: MultiGate, routings: Mapping[str, Routing], k: int) -> list[list[int]]:
    """Of each task the at most k selected experts of largest weight, for recovery and Jaccard.

    The selectors of the ablation gate are never exact: of each the expert that it leans to.
    """
    routers: list[Any] = list(model.routers)
    if routers[0].name == "softmax-selectors-static":
        best_GK = torch.stack([router.weight for router in routers]).argmax(1)
        return [sorted(set(own)) for own in best_GK.tolist()]
    weight_GE, choice_GE = _weights(routings)
    order_GK = weight_GE.where(choice_GE, -1.0).argsort(dim=1, descending=True, stable=True)[:, :k]
    chosen_GK = choice_GE.gather(1, order_GK).tolist()
    pairs = zip(order_GK.tolist(), chosen_GK)
    return [[e for e, chosen in zip(*own) if chosen] for own in pairs]


def _weights(routings: Mapping[str, Routing]) -> tuple[Tensor, Tensor]:
    """`[G, E]`: weights, a mean over the examples, and who is selected for some example."""
    each = list(routings.values())
    choice_GE = torch.stack([one_row(r).choice().any(0) for r in each])
    return torch.stack([mean_gate(r) for r in each]), choice_GE


def on_page(run: Running) -> bool:
    """Whether the page will show more of a run than its metrics."""
    return run.settings.get("stage") != "tune"


@torch.no_grad()
def gate_facts(
    settings: Settings,
    model: Any,
    x: Tensor,
    *,
    page: bool = True,
    course: bool = False,
    routings: Mapping[str, Routing] | None = None,
) -> dict[str, Any]:
    """For `Running.extra`: what the rule of a search reads, and where `page`, what a page shows.

    x: some examples, for gates that decide by example and to count FLOPs. course: also the FLOPs,
    and how the gates moved; give it for one run of a block, since they take time and a page shows
    one. routings: the decisions on x in eval mode, where they are known already.
    """
    facts: dict[str, Any] = {"parameters": cost.parameters(model)} if page else {}
    x = x.to(next(model.parameters()).device)
    if isinstance(model, MultiGate):
        facts |= _of_gates(settings, model, routings or look(model, x), page)
        if page and course and model.log is not None:
            facts["trajectories"] = trajectories(model)
    if page and course:
        facts["flops"] = model.flops(x) / len(x)
    return facts


@torch.no_grad()
def look(model: MultiGate, x: Tensor) -> dict[str, Routing]:
    """What the gates decide on some examples in eval mode."""
    with at_rest(model):
        return model(x).routings


def _of_gates(
    settings: Settings, model: MultiGate, routings: Mapping[str, Routing], page: bool
) -> dict[str, Any]:
    """Experts at work and the rule; for a page the gates of the first tasks, and how alike all are.

    Of many tasks some are evenly chosen for the picture.
    """
    selected = torch.stack([mean_active(r) for r in routings.values()])
    facts: dict[str, Any] = {"selected": float(selected.mean())}
    facts["allowed"] = bool(allowed(settings, routings))
    if not page:
        return facts
    weight_GE, _ = _weights(routings)
    tasks = list(routings)
    steps = model.log.binary_step() if model.log is not None else [None] * len(tasks)
    smooth = settings["gate"] in ("dselect-k", "dselect-k-static")
    gates = {
        task: {
            "selected": round(float(selected[i]), 4),
            "binary": bool(_exact(routings[task], settings["k"])) if smooth else None,
            "binary_step": steps[i],
            "weights": _rounded(weight_GE[i].tolist()),
        }
        for i, task in enumerate(tasks[:SHOWN])
    }
    facts["gates"] = gates
    if len(tasks) > 1:
        some = slice(None, None, math.ceil(len(tasks) / PICTURED))
        alike = [_rounded(row, 3) for row in cosine_matrix(weight_GE[some])]
        facts["similarity"] = {"tasks": tasks[some], "values": alike}
    return facts


def trajectories(model: MultiGate) -> dict[str, Any]:
    """How the gates of the first tasks moved, at some sixty steps."""
    found = {}
    for task, course in list(Trajectory.of(model).values().items())[:SHOWN]:
        every = math.ceil(len(course["step"]) / POINTS)
        values = [_rounded(row) for row in course["values"][::every]]
        found[task] = {"step": course["step"][::every], "values": values}
    return found


def _rounded(values: Sequence[float], digits: int = 4) -> list[float]:
    return [round(value, digits) for value in values]
