"""The page of a study: verdicts first, then the arms, the plots, and how to repeat it.

html = study_page(json.loads(Path("runs/lab--routers/small/result.json").read_text()))
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import arms, figures, lines, tasks
from .figures import Figure, form_of, label_of
from .page import TEMPLATES, data_block, fingerprint, plotly_script, render
from .routing import SHADES
from .words import (
    MISSING,
    VERDICTS,
    difference,
    difference_interval,
    duration,
    missing,
    plain,
    sentence,
    when,
    where,
)

Result = Mapping[str, Any]
LABEL = 24  # letters of what a note is about
SECTIONS: list[tuple[str, str, Callable[[Any], list[Figure]]]] = [
    ("effects", "Effects", figures.forest),
    ("curves", "Curves", lines.curves),
    ("costs", "Quality and cost", figures.costs),
    ("loads", "Load of the experts", figures.loads),
    ("similarity", "Similarity of the tasks", tasks.similarity),
    ("gates", "Gates over time", lines.trajectories),
    ("search", "Search for settings", lines.tuning),
]


def study_page(result: Result, answers: Mapping[str, str] | None = None) -> str:
    """Return a self-contained page of a study, from the values of its result.json.

    answers: the first thing to read, a text for each question (`moiety.lab.headline`).
    """
    result = _finite(result)
    plotly, script = plotly_script(), (TEMPLATES / "study.js").read_text(encoding="utf-8")
    sections, specs = _number({name: make(result) for name, _, make in SECTIONS})
    return render(
        "study.html",
        title=result["title"],
        result=result,
        answers=answers or {},
        warnings=_warnings(result),
        facts=_facts(result),
        verdicts=[_verdict(result, claim) for claim in result["claims"]],
        tally=_tally(result["claims"]),
        columns=arms.columns(result),
        rows_of_arms=[arms.row(result, arm) for arm in result["arms"]],
        failures=[[f["arm"], str(f["seed"]), f["error"]] for f in result["failures"]],
        notes=_notes(result["notes"]),
        looks=_looks(result["looks"]),
        sections=sections,
        titles=titles(),
        legend=[name for _, name in SHADES],
        likeness=[name for _, name in tasks.LIKENESS],
        gates_of_tasks=tasks.gate_tables(result.get("gates") or {}),
        unseen_gates=_unseen(result),
        search=_search(result),
        settings=_settings(result["arms"]),
        made=_made(result),
        plotly=plotly,
        script=script,
        data=data_block(specs),
        allowed=" ".join(map(fingerprint, filter(None, (plotly, script)))),
    )


def titles() -> dict[str, str]:
    """The headings of the sections with plots, by their names."""
    return {name: title for name, title, _ in SECTIONS}


def _number(
    sections: Mapping[str, list[Figure]],
) -> tuple[dict[str, list[tuple[str, Figure]]], dict[str, Any]]:
    """Give every figure an id; return them by section, and what plotly draws by id."""
    specs: dict[str, Any] = {}
    named: dict[str, list[tuple[str, Figure]]] = {section: [] for section in sections}
    for section, made in sections.items():
        for figure in made:
            name = f"plot-{len(specs) + 1}"
            layout = {**figure.layout, "height": figure.height}
            specs[name] = {"data": figure.data, "layout": layout}
            named[section].append((name, figure))
    return named, specs


def _finite(value: Any) -> Any:
    """The same values with none in place of NaN and infinities, which JSON has no words for."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- head and verdicts -----------------------------------------------------------------------------


def _facts(result: Result) -> list[str]:
    machine = result["machine"]
    return [
        f"{len(result['arms'])} arm{'s' * (len(result['arms']) != 1)}",
        f"{result['seeds']} seed{'s' * (result['seeds'] != 1)}",
        f"scale {result['scale']}",
        where(machine),
        when(result["when"]),
    ]


def _warnings(result: Result) -> list[dict[str, str]]:
    """What a reader must know before the answers, each with the section that tells more."""
    found = []
    if result["scale"] == "smoke":
        text = "A smoke test: too short for conclusions."
        found.append({"text": text, "to": "made", "more": "How it was made"})
    leaks = sum(note["leak"] for note in _notes(result["notes"]))
    if leaks:
        text = f"The data may give the answer away: {leaks} suspected leak{'s' * (leaks != 1)}."
        found.append({"text": text, "to": "notes", "more": "What was found"})
    for name, arm in ((result.get("tuning") or {}).get("arms") or {}).items():
        if arm.get("failure"):
            text = f"{name} was not measured: {arm['failure']}"
            found.append({"text": text, "to": "search", "more": titles()["search"]})
    if result["failures"]:
        count, names = len(result["failures"]), {each["arm"]: 0 for each in result["failures"]}
        trials = count + sum(arm["finished"] for arm in result["arms"])
        text = f"{count} of {trials} trials failed ({', '.join(names)})."
        found.append({"text": text, "to": "failures", "more": "Their errors"})
    return found


def _tally(claims: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """How many claims got each verdict, in fixed order."""
    words = [claim["verdict"]["word"] for claim in claims]
    return [(word, words.count(word)) for word in VERDICTS if word in words]


def _verdict(result: Result, claim: Mapping[str, Any]) -> dict[str, Any]:
    form, verdict = form_of(result, claim["metric"]), claim["verdict"]
    low, high = verdict["interval"] or (None, None)
    facts = {
        "Smallest effect that matters (δ)": difference(claim["margin"], form, signed=False),
        "Smallest detectable": difference(verdict["detectable"], form, signed=False),
        "p, adjusted": f"{_p(verdict['p'])} (level {verdict['level']:.2g})",
        "Seeds": str(verdict["seeds"]),
        "Look": str(claim["look"]),
    }
    if claim["failed"]:
        facts["Failed trials"] = str(claim["failed"])
    return {
        "word": verdict["word"],
        "sign": VERDICTS[verdict["word"]],
        "sentence": sentence(claim, form),
        "metric": label_of(result, claim["metric"]),
        "effect": "" if missing(verdict["effect"]) else difference(verdict["effect"], form),
        "interval": "" if missing(low) else difference_interval(low, high, form),
        "facts": facts,
        **{key: claim[key] for key in ("tier", "quote", "mark", "number", "reason")},
        "would_change": claim["would_change"],
    }


def _p(p: float) -> str:
    return "< 0.001" if p < 1e-3 else f"{p:.2g}"


# -- the rest --------------------------------------------------------------------------------------


def _notes(notes: Sequence[str]) -> list[dict[str, Any]]:
    """What each note is about, in front of its colon, its text, and whether it tells of a leak."""
    found = []
    for note in notes:
        about, colon, text = note.partition(": ")
        about, text = (about, text) if colon and len(about) <= LABEL else ("", note)
        about = about[:1].upper() + about[1:]
        found.append({"about": about, "text": text, "leak": about == "Suspected leak"})
    return found


def _unseen(result: Result) -> int:
    return sum(max(len(gates) - lines.GATES, 0) for gates in result["trajectories"].values())


def _search(result: Result) -> dict[str, Any] | None:
    """What was tried for each arm, and chosen."""
    search = result.get("tuning")
    if not search:
        return None
    rows = [
        [
            name,
            str(arm["tried"]),
            "; ".join(f"{n} × {reason}" for reason, n in arm["discarded"].items()) or "none",
            ", ".join(f"{key} {plain(value)}" for key, value in (arm["chosen"] or {}).items())
            or arm.get("failure", MISSING),
        ]
        for name, arm in search["arms"].items()
    ]
    metric = label_of(result, search["metric"])
    summary = f"{search['trials']} trials for each arm ({search['sampler']} search), chosen by "
    return {"summary": f"{summary}{metric} on validation data alone.", "rows": rows} | {
        "columns": ["Arm", "Tried", "Discarded", "Chosen"],
        "space": search["space"],
    }


def _settings(arms: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that all arms share, and a table of those that differ."""
    names = list(dict.fromkeys(name for arm in arms for name in arm["settings"]))
    values = {name: [arm["settings"].get(name) for arm in arms] for name in names}
    absent = {name for name in names if any(name not in arm["settings"] for arm in arms)}
    shared = {
        name: plain(each[0])
        for name, each in values.items()
        if name not in absent and all(value == each[0] for value in each)
    }
    differing = [name for name in names if name not in shared]
    rows = [
        [
            arm["name"],
            *(plain(arm["settings"][n]) if n in arm["settings"] else MISSING for n in differing),
        ]
        for arm in arms
    ]
    return {"shared": shared, "columns": ["Arm", *differing], "rows": rows if differing else []}


def _made(result: Result) -> dict[str, str]:
    """The machine and what was fixed before the first trial, by name."""
    planned, budget, machine = result.get("planned") or {}, result.get("budget"), result["machine"]
    made = {"Study": result["study"], "Scale": result["scale"], "Machine": where(machine)}
    if machine.get("threads"):
        made["Threads of a trial"] = str(machine["threads"])
    made["Seeds"] = str(result["seeds"])
    if planned:
        made["Seeds planned"] = f"{planned['seeds']}, from {_source(planned)}"
    if result["varies"]:
        made["A seed decides"] = ", ".join(result["varies"])
    if budget:
        equal = {"flops": "active FLOPs"}.get(budget["equal"], budget["equal"])
        time = duration(budget["seconds"]).replace(".0 s", " s")
        made["Budget"] = f"{time} for all trials, at equal {equal}"
    if result.get("spent"):
        made["Time of the trials"] = _spent(result["spent"])
    made |= {name: str(version) for name, version in result["versions"].items()}
    return made | {"When": when(result["when"]), "SHA-256 of the trials": result["trials_sha256"]}


def _looks(looks: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [
        [str(each["look"]), str(each["seeds"]), when(each["when"]), each["trials_sha256"][:16]]
        for each in looks
    ]


def _spent(stages: Mapping[str, Mapping[str, Any]]) -> str:
    words = {"tune": "search", "pilot": "pilot", "main": "measured"}
    each = [
        f"{words.get(stage, stage)} {duration(spent['seconds'])} ({spent['trials']})"
        for stage, spent in stages.items()
    ]
    return ", ".join(each)


def _source(planned: Mapping[str, Any]) -> str:
    word = planned["from"]
    if "pilot" in planned:
        asked = planned["asked"] or "more than 1000"
        return f"a pilot of {planned['pilot']} seeds, which asked for {asked}"
    return {"given": "the command", "pilot": "a pilot", "scale": "the scale"}.get(word, word)
