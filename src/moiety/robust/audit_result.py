"""The result of an audit (schema 1) from what its processes measured: plain values for JSON."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import pstdev
from typing import Any

import torch
from torch import Tensor

from ..cost import forward_flops, parameters
from ..report.audit_routes import eps_text
from .audit_work import Answers, Doors, Plan, Work
from .masking import judge

SCHEMA = 1
Z = 1.959963984540054  # of a normal distribution: 95 %


def wilson(wrong: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    p, z2 = wrong / of, Z * Z
    middle = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = Z / (1 + z2 / of) * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    return max(0.0, min(middle - half, p)), min(1.0, max(middle + half, p))


def make_result(plan: Plan, work: Work, model: str, data: str, command: str) -> dict[str, Any]:
    """Everything by name."""
    return {
        "schema": SCHEMA,
        "kind": "audit",
        "command": command,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(plan),
        "versions": {
            "moiety": sys.modules["moiety"].__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "model": {
            "name": model,
            "parameters": parameters(plan.target.model),
            "flops": _flops(plan),
            "layers": plan.layers,
        },
        "data": {"name": data, "examples": len(work.clean.wrong), "classes": work.classes},
        "threat": {
            "norm": plan.norm,
            "bounds": None if plan.bounds is None else list(plan.bounds),
            "group": plan.group,
            "label": "per example" if plan.group == 1 else "batch threat model",
            "coupled": plan.why,
        },
        "eps": plan.eps,
        "seed": plan.seed,
        "clean": {"error": _mean(work.clean.wrong), "loss": _mean(work.clean.loss)},
        "attacks": {name: _attack(plan, work, name) for name in plan.attacks},
        "union": _union(work),
        "routing": _routing(work),
        "noise": _noise(work),
        "attribution": _attribution(plan, work.doors),
        "masking": judge(work.evidence, max(plan.eps)),
        "lipschitz": work.lipschitz,
    }


def _machine(plan: Plan) -> dict[str, Any]:
    device = plan.target.device or torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "cores": os.cpu_count() or 1, "threads": torch.get_num_threads()}


def _flops(plan: Plan) -> float | None:
    """FLOPs of a forward pass of one example."""
    x = plan.there(plan.first[:1])
    with plan.target.at_rest():
        return forward_flops(lambda: plan.target(x), plan.target.model) or None


def _mean(values: Tensor) -> float | None:
    found = float(values.double().nanmean()) if len(values) else math.nan
    return found if math.isfinite(found) else None


def _errors(wrong: Sequence[Tensor]) -> dict[str, list[float]]:
    ends = [wilson(int(each.sum()), len(each)) for each in wrong]
    return {
        "error": [float(each.double().mean()) for each in wrong],
        "low": [low for low, _ in ends],
        "high": [high for _, high in ends],
    }


def _attack(plan: Plan, work: Work, name: str) -> dict[str, Any]:
    found, attack = work.attacked[name], plan.attacks[name]
    return {
        "settings": attack.settings() if hasattr(attack, "settings") else {},
        **_errors([each.wrong for each in found]),
        "loss": [_mean(each.loss) for each in found],
        "changed": [_mean(each.top != work.clean.top) for each in found],
        "seconds": work.seconds[name],
    }


def _union(work: Work) -> dict[str, Any]:
    """Examples that at least one attack fools."""
    by_eps = zip(*work.attacked.values())
    wrong = [torch.stack([each.wrong for each in found]).any(0) for found in by_eps]
    return {**_errors(wrong), "of": list(work.attacked)}


def _routing(work: Work) -> dict[str, Any] | None:
    if not work.clean.use:
        return None
    return {
        name: {
            "experts": len(used.load_E),
            "clean": used.as_dict(),
            "attacks": {a: _layer(found, name) for a, found in work.attacked.items()},
        }
        for name, used in work.clean.use.items()
    }


def _layer(found: Sequence[Answers], name: str) -> dict[str, Any]:
    used = [each.use[name].as_dict() for each in found]
    change = [_mean(each.change[name]) for each in found]
    return {"change": change, **{key: [u[key] for u in used] for key in used[0]}}


def _noise(work: Work) -> dict[str, Any]:
    """How far a clean run is from the next."""
    errors = [float(each.wrong.double().mean()) for each in (work.clean, *work.again)]
    change = {
        name: _mean(torch.stack([each.change[name] for each in work.again]).flatten())
        for name in (work.clean.change if work.again else ())
    }
    return {"error": pstdev(errors), "change": change}


def _attribution(plan: Plan, doors: Sequence[Doors]) -> dict[str, Any] | None:
    if not doors:
        return None

    def parts(kind: str) -> dict[str, list[float | None]]:
        found = [getattr(each, kind) for each in doors]
        return {word: [_mean(getattr(p, word)) for p in found] for word in ("input", "routes")}

    frozen = {
        kind: {"error": [_mean(getattr(each, f"wrong_{kind}")) for each in doors], **parts(kind)}
        for kind in ("choices", "weights")
    }
    total = [_mean(each.choices.total) for each in doors]
    return {
        "attack": plan.main,
        "eps": plan.eps,
        "total": total,
        **parts("choices"),
        "frozen": frozen,
    }


def table(result: dict[str, Any]) -> str:
    """A few lines for a terminal: error by attack and eps, routing change, doors, warnings."""
    threat, data = result["threat"], result["data"]
    head = [f"eps {eps_text(e)}" for e in result["eps"]]
    rows = {name: each["error"] for name, each in result["attacks"].items()}
    if len(rows) > 1:
        rows["union"] = result["union"]["error"]
    lines = [
        f"Audit of {result['model']['name']} on {data['examples']} examples of {data['name']} "
        f"({threat['norm']}, {threat['label']})",
        *_grid("error", head, rows),
    ]
    if result["routing"]:
        last = list(result["attacks"])[-1]
        changes = {n: r["attacks"][last]["change"] for n, r in result["routing"].items()}
        lines += ["", *_grid(f"routing change, {last}", head, changes)]
    if result["attribution"]:
        found = result["attribution"]
        last_ones = (found[key][-1] for key in ("total", "input", "routes"))
        total, inside, routes = ("–" if v is None else f"{v:+.3f}" for v in last_ones)
        where = f"{found['attack']}, {head[-1]}"
        lines += ["", f"loss {total} = input {inside} + routes {routes} ({where})"]
    reasons = result["masking"]["reasons"]
    lines += ["", *("Gradient masking: " + r for r in reasons)] if reasons else []
    return "\n".join(lines)


def _grid(title: str, head: list[str], rows: dict[str, list[float | None]]) -> list[str]:
    first = max(len(word) for word in (title, *rows))
    cells = {n: ["–" if v is None else f"{v:.1%}" for v in values] for n, values in rows.items()}
    widths = [max(len(h), *(len(c[i]) for c in cells.values())) for i, h in enumerate(head)]

    def line(name: str, words: list[str]) -> str:
        return "  ".join([name.ljust(first), *(w.rjust(n) for w, n in zip(words, widths))])

    return [line(title, head), *(line(name, words) for name, words in cells.items())]
