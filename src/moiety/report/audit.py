"""The page of an audit: what an attacker can do to a model, and through which door.

html = audit_page(json.loads(Path("out/audit/audit.json").read_text()))

The result is that of `moiety.robust.audit` (schema 1). A model without routing has fewer sections.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .audit_routes import cell, eps_axis, eps_text, routing_view, table
from .chart import Series, bars, lines
from .page import render
from .routing import SHADES
from .words import THOUSANDS, duration, interval, number, plain, quantity, when, where

Result = Mapping[str, Any]
UNION = "union"
SPLIT = ["ε", "Rise in loss", "Input", "Routes", "Routes and weights", "Error"]
SPLIT += ["Error, choices frozen", "Error, weights too"]
PARTS = ("total", "input", "routes")
MOVES = {
    "linf": "Every value of an attacked example moves by at most ε (l∞)",
    "l2": "An attacked example moves by a length of at most ε (l2)",
}


def audit_page(result: Result) -> str:
    """Return a self-contained page of an audit, from the values of its result."""
    return render(
        "audit.html",
        title=f"Audit of {result['model']['name']}",
        summary=_summary(result),
        threat=threat(result),
        answers=answers(result),
        error=error_view(result),
        union=UNION if _several(result) else "",
        routing=routing_view(result, last(result["eps"])),
        legend=[name for _, name in SHADES],
        attribution=_attribution(result),
        masking=_masking(result["masking"]),
        lipschitz=_lipschitz(result["lipschitz"]),
        command=result["command"],
        settings=_settings(result),
    )


@dataclass(frozen=True)
class AuditPart:
    """What a page of other results shows of an audit: the answers, and error against ε."""

    title: str
    summary: str
    result: Result

    def view(self) -> dict[str, Any]:
        """As the template shows it."""
        view = {"title": self.title, "summary": self.summary, "answers": answers(self.result)}
        return view | {"chart": error_view(self.result)["chart"], "threat": threat(self.result)}


# -- words -----------------------------------------------------------------------------------------


def last(values: Sequence[float]) -> int:
    """The place of the largest."""
    return max(range(len(values)), key=lambda i: values[i])


def strongest(result: Result) -> str:
    """The attack with the largest error at the largest ε."""
    at = last(result["eps"])
    return max(result["attacks"], key=lambda name: result["attacks"][name]["error"][at])


def _several(result: Result) -> bool:
    return len(result["attacks"]) > 1


def _summary(result: Result) -> str:
    data, threat, model = result["data"], result["threat"], result["model"]
    size = quantity(model["parameters"], THOUSANDS)
    flops = f", {quantity(model['flops'], THOUSANDS)}FLOPs an example" if model["flops"] else ""
    bounds = threat["bounds"]
    inside = f" and stays between {bounds[0]:g} and {bounds[1]:g}" if bounds else ""
    return (
        f"{data['examples']:,} examples of {data['name']} with {data['classes']} classes; a model "
        f"of {size} parameters{flops}. {MOVES[threat['norm']]}{inside}."
    )


def threat(result: Result) -> dict[str, Any]:
    """What the attacker was allowed, in a label and a sentence."""
    found = result["threat"]
    batch = found["label"] != "per example"
    why = f"The model couples the examples of a batch ({found['coupled']})"
    if batch:
        text = (
            f"Groups of {found['group']} examples were attacked and scored together: one can be "
            "fooled through others of its group. Not comparable with attacks on single examples."
        )
        text += f" {why}." * bool(found["coupled"])
    elif found["coupled"]:
        text = f"{why}, so that each was run alone: none can be fooled through another."
    else:
        text = "Each was attacked by itself: none can be fooled through another."
    label = found["label"][:1].upper() + found["label"][1:]
    return {"batch": batch, "label": label, "text": text}


def answers(result: Result) -> dict[str, str]:
    """The first thing to read: a text for each question."""
    at, best = last(result["eps"]), strongest(result)
    eps, union = eps_text(result["eps"][at]), result["union"]
    reached = number(result["attacks"][best]["error"][at], ".1%")
    spread = interval(union["low"][at], union["high"][at], ".1%")
    together = f"); all attacks together {number(union['error'][at], '.1%')} ("
    found = {
        "Under attack": f"{reached} of the answers are wrong at ε = {eps} ({best}"
        f"{together if _several(result) else '; '}95 % interval {spread}).",
        "No attack": _clean(result),
    }
    if result["attribution"]:
        found["Which door"] = _door(result["attribution"])
    masking = result["masking"]
    found["Trust"] = (
        "No: gradients are masked, so that a stronger attack would find more."
        if masking["flagged"]
        else "No sign of masked gradients."
    )
    return found


def _clean(result: Result) -> str:
    """The error without attack, and a word where there is nothing left to attack."""
    error, classes = result["clean"]["error"], result["data"]["classes"]
    said = f"{number(error, '.1%')} of the answers are wrong"
    if error < 1 - 1 / classes:
        return f"{said}."
    return (
        f"{said}, no better than guessing among {classes} classes: look at the order of the "
        "classes, at the normalisation and at the model's training before the rest."
    )


def _door(found: Result) -> str:
    at = last(found["eps"])
    total, input, routes = (found[key][at] for key in PARTS)
    where = f"at ε = {eps_text(found['eps'][at])} ({found['attack']})"
    if total is None or total <= 0:
        return f"The loss does not rise {where}."
    form = ".0%" if min(input, routes) >= 0 else "+.3g"  # no share is above 100 %, nor below 0
    parts = {"the input at unchanged routes": input, "changed routes": routes}
    shown = {by: part / total if form == ".0%" else part for by, part in parts.items()}
    said = ", ".join(f"{number(part, form)} through {by}" for by, part in shown.items())
    return f"The loss rises by {number(total)} {where}: {said}."


# -- error -----------------------------------------------------------------------------------------


def error_view(result: Result) -> dict[str, Any]:
    """The chart of error against ε, and its numbers."""
    attacks = result["attacks"]
    drawn = {**attacks, UNION: result["union"]} if _several(result) else attacks
    x, across = eps_axis(result["eps"])
    series = [
        Series(name, x, each["error"], each["low"], each["high"], bold=name == UNION)
        for name, each in drawn.items()
    ]
    label = f"Error against ε with 95 % intervals, of {', '.join(drawn)}"
    rows = {name: _errors(each) for name, each in drawn.items()}
    columns = ["Error at ε", *map(eps_text, result["eps"])]
    numbers = table("Error of every attack", columns, rows, bold=UNION)
    more = {
        key: _values(result, key, form, caption)
        for key, form, caption in (
            ("loss", ".3f", "Mean cross-entropy under every attack"),
            ("changed", ".1%", "Share of the predictions that changed"),
        )
    }
    return {"chart": lines(label, series, across=across, top=1.0), "table": numbers, **more}


def _errors(each: Result) -> list[dict[str, str]]:
    return [
        cell(number(error, ".1%"), interval(low, high, ".1%").replace("% to ", "–"))
        for error, low, high in zip(each["error"], each["low"], each["high"])
    ]


def _values(result: Result, key: str, form: str, caption: str) -> dict[str, Any]:
    rows = {
        name: [cell(number(value, form)) for value in each[key]]
        for name, each in result["attacks"].items()
    }
    return table(caption, [f"{key.capitalize()} at ε", *map(eps_text, result["eps"])], rows)


# -- the rest --------------------------------------------------------------------------------------


def _attribution(result: Result) -> dict[str, Any] | None:
    found = result["attribution"]
    if not found:
        return None
    sizes = [eps_text(e) for e in found["eps"]]
    _, across = eps_axis(found["eps"])
    names = [size.removesuffix("/255") for size in sizes] if "255" in across else sizes
    parts = {"input, routes unchanged": found["input"], "changed routes": found["routes"]}
    label = f"Rise in loss under {found['attack']}, by input and by routes, against ε"
    return {
        "text": f"The rise in loss (cross-entropy, in nats) under {found['attack']}, split into "
        "what the changed input does at unchanged routes and what changed routes do.",
        "chart": bars(label, names, parts, across=across),
        "table": table(
            label, SPLIT, {size: _split(result, found, i) for i, size in enumerate(sizes)}
        ),
    }


def _split(result: Result, found: Result, i: int) -> list[dict[str, str]]:
    attack = result["attacks"].get(found["attack"])
    place = result["eps"].index(found["eps"][i]) if found["eps"][i] in result["eps"] else None
    error = attack["error"][place] if attack and place is not None else None
    frozen = [found["frozen"][kind]["error"][i] for kind in ("choices", "weights")]
    weighed = found["frozen"]["weights"]["routes"]
    parts = [number(each[i], "+.3f") for each in (*(found[key] for key in PARTS), weighed)]
    texts = [*parts, *(number(value, ".1%") for value in (error, *frozen))]
    return [cell(text) for text in texts]


def _masking(found: Result) -> dict[str, Any]:
    kinds = {
        "strongest": "Strongest attack by gradients",
        "transfer": "Transferred attack",
        "random": "Random search, without gradients",
    }
    shown = {text: found[key] for key, text in kinds.items() if found[key] is not None}
    rows = {text: [cell(number(error, ".1%"))] for text, error in shown.items()}
    numbers = table("Errors by kind of attack", ["Kind", "Error"], rows)
    return {
        "flagged": found["flagged"],
        "reasons": found["reasons"],
        "table": numbers,
        "on": f"At ε = {eps_text(found['eps'])}, on {found['examples']:,} examples",
        "transfer": found["transfer"] is not None,
    }


def _lipschitz(found: Result | None) -> dict[str, Any] | None:
    if not found:
        return None
    rows = {
        name: [cell(number(each.get(key))) for key in ("median", "max", "jump")]
        for name, each in {"Input to logits": found["end_to_end"], **found["layers"]}.items()
    }
    columns = ["Part", "Median", "Largest", "Jump, median"]
    return table("Local Lipschitz constants", columns, rows)


def _settings(result: Result) -> dict[str, str]:
    """What was set, by name."""
    made = {
        f"Attack {name}": ", ".join(
            [
                *(f"{key.replace('_', ' ')} {plain(v)}" for key, v in each["settings"].items()),
                f"took {duration(each['seconds'])}",
            ]
        )
        for name, each in result["attacks"].items()
    }
    noise = result["noise"]["error"]
    made["Error of two runs differs by"] = number(noise, ".2%") + " (standard deviation)"
    made |= {"Seed": str(result["seed"]), "Machine": where(result["machine"])}
    made |= {name: str(version) for name, version in result["versions"].items()}
    return made | {"When": when(result["when"])}
