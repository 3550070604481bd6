"""The page of an adaptation that was compared: which way to a classifier, and how sure that is.

html = adapt_page(json.loads(Path("out/adapt/result.json").read_text()))

The result is that of `moiety adapt --method compare`.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .chart import Series, lines
from .page import render
from .words import THOUSANDS, VERDICTS, difference, difference_interval, number, plain, quantity

Result = Mapping[str, Any]
FORM = ".1%"
ARMS = {
    "fine-tune": "Fine-tuning alone",
    "further": "Further pre-training",
    "self-distill": "Self-distillation",
}
HEADS = {"accuracy": "Accuracy", "macro_f1": "Macro F1"}
FOLLOWED = {  # by name in a history: title, axis, form
    "target": ("Masked loss, new domain", "Held-out rows of the unlabelled data.", ".4g"),
    "source": ("Masked loss, old domain", "Held-out rows of the source: what is forgotten.", ".4g"),
    "distance": ("Distance from the start", "l2, of the encoder's weights.", ".3g"),
    "score": (
        "Probe",
        "Mean accuracy of a linear and a kNN probe, inside the labelled training split.",
        ".0%",
    ),
}
NEAR = 0.05  # of a probe: lines that differ by less are drawn from zero to one


def adapt_page(result: Result) -> str:
    """Return a self-contained page, without script."""
    asked = result["asked"]
    return render(
        "adapt.html",
        title=f"Adapting {_last(asked['model'])} to {_last(asked['unlabelled'])}",
        summary=_summary(result),
        answers=answers(result),
        arms=_arms(result),
        verdicts=difference_rows(result),
        seeds=_seeds(result),
        charts=_charts(result["stages"]),
        online=[
            f"{stage_name(name)}: the teacher ran at every step: {stage['online']}"
            for name, stage in result["stages"].items()
            if stage["online"]
        ],
        metric=HEADS[asked["metric"]],
        other=HEADS[_other(asked["metric"])],
        numbers=_numbers(result["stages"]),
        split=result["split"],
        labels=f"{result['labels']:,}",
        drawn=asked["labels"] is not None,
        margin=difference(asked["margin"], FORM, signed=False),
        command=result["command"],
        settings=_settings(result),
    )


def stage_name(stage: str) -> str:
    """As the page calls it: a round of self-distillation."""
    if stage == "further":
        return ARMS[stage]
    return stage.replace("round-", f"{ARMS['self-distill']}, round ")


def _last(path: str) -> str:
    return path.rstrip("/").split("/")[-1]


def _summary(result: Result) -> str:
    data, model, judged = result["data"], result["model"], result["judgement"]
    return (
        f"{model['class']}, {quantity(model['parameters'], THOUSANDS)} parameters; "
        f"{data['train']:,} unlabelled rows; {result['labels']:,} labelled examples of "
        f"{len(data['labelled']['classes'])} classes; {judged['seeds']} seeds; scored on "
        f"{judged['examples']:,} examples of the {result['split']} split."
    )


def answers(result: Result) -> dict[str, str]:
    """The first thing to read: a text for each question."""
    judged, spent = result["judgement"], result["spent"]
    best, means = judged["best"], judged["means"]
    which = f"{ARMS[best]}." if best else f"{_sentence(judged['reason'])}."
    scores = ", ".join(f"{ARMS[arm].lower()} {number(mean, FORM)}" for arm, mean in means.items())
    margin = difference(judged["margin"], FORM, signed=False)
    sure = f"It is better than both others by more than {margin}."
    if not best:
        widest = max(difference_rows(result), key=lambda row: row["size"])
        sure = f"Largest difference: {widest['arm']} {widest['effect']} ({widest['interval']})."
    cost = (
        f"Pre-training: {quantity(spent['further'], THOUSANDS)}FLOPs for further pre-training, "
        f"{quantity(spent['self-distill'], THOUSANDS)}FLOPs for self-distillation, which includes "
        "it; fine-tuning alone needs none."
    )
    passes = result["asked"]["steps"] * _word(result, "batch") / result["data"]["train"]
    if passes < 1:
        cost += f" Each stage has {number(passes, '.2g')} passes over the unlabelled rows: "
        cost += "more --steps may help."
    metric, floor = HEADS[judged["metric"]], number(judged["floor"], FORM)
    said = f"{metric}: {scores}; the commonest class alone {floor}."
    if result["looks"] > 1:
        sure += (
            f" This is look {result['looks']} at the same scored examples, with other seeds, "
            "metric or margin: every look may err anew."
        )
    if result["repeated"]:
        sure += (
            f" {result['repeated']:,} scored examples were left out: they are also training "
            "examples."
        )
    return {"Which": which, "Scores": said, "How sure": sure, "Cost": cost}


def _sentence(text: str) -> str:
    """A reason with the arms as the page calls them."""
    for arm, name in sorted(ARMS.items(), key=lambda each: -len(each[0])):
        text = text.replace(arm, name.lower())
    return text[:1].upper() + text[1:]


def difference_rows(result: Result) -> list[dict[str, Any]]:
    """Every difference with its interval and what follows from it."""
    rows = []
    for each in result["judgement"]["differences"]:
        a, b = ARMS[each["a"]].lower(), ARMS[each["b"]].lower()
        margin = difference(each["margin"], FORM, signed=False)
        said = {
            "holds": f"{a} is better by more than {margin}",
            "reversed": f"{b} is better by more than {margin}",
            "negligible": f"less than {margin} apart",
            "undecided": "undecided",
        }[each["word"]]
        low, high = each["interval"]
        rows.append(
            {
                "arm": f"{a} − {b}",
                "size": abs(each["effect"]),
                "effect": difference(each["effect"], FORM),
                "interval": difference_interval(low, high, FORM),
                "word": each["word"],
                "sign": VERDICTS[each["word"]],
                "said": said,
            }
        )
    return rows


def _word(result: Result, name: str) -> Any:
    """What was asked for, or stood in for it."""
    asked = result["asked"][name]
    return result["used"][name] if asked is None else asked


def _other(metric: str) -> str:
    return next(name for name in HEADS if name != metric)


def _arms(result: Result) -> list[dict[str, Any]]:
    judged = result["judgement"]
    rows = []
    for arm, name in ARMS.items():
        low, high = judged["intervals"][arm]
        found = result["scores"][arm]
        row: dict[str, Any] = {"name": name, "best": arm == judged["best"]}
        row |= {"mean": number(judged["means"][arm], FORM)}
        row |= {"interval": f"{number(low, FORM)} to {number(high, FORM)}"}
        row["other"] = number(fmean(each[_other(judged["metric"])] for each in found), FORM)
        row["loss"] = number(fmean(each["loss"] for each in found), ".3f")
        row["moved"] = number(fmean(result["moved"][arm]), ".3g")
        spent = result["spent"][arm]
        row["flops"] = quantity(spent, THOUSANDS) if spent else "none"
        rows.append(row)
    return rows


def _seeds(result: Result) -> dict[str, Any]:
    """The score of every seed."""
    metric, first = result["asked"]["metric"], result["asked"]["seed"]
    count = result["judgement"]["seeds"]
    rows = [
        [ARMS[arm], *(number(each[metric], FORM) for each in found)]
        for arm, found in result["scores"].items()
    ]
    return {"columns": [f"Seed {first + i}" for i in range(count)], "rows": rows}


def _charts(stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was followed, stage by stage."""
    made = []
    for key, (title, note, form) in FOLLOWED.items():
        series = [
            Series(stage_name(name), *_along(stage["history"], key))
            for name, stage in stages.items()
            if any(key in line for line in stage["history"])
        ]
        if series:
            # Differences of losses and probes are often small beside their values.
            seen = [value for each in series for value in each.y if value is not None]
            near = max(seen, default=0.0) - min(seen, default=0.0) < NEAR
            whole = key == "distance" or (key == "score" and near)
            top = 1.0 if whole and key == "score" else None
            words: dict[str, Any] = {"across": "Step", "top": top, "zero": whole, "form": form}
            chart = lines(f"{title} by step", series, **words)
            made.append({"name": title, "note": note, "chart": chart})
    return made


def _numbers(stages: Mapping[str, Any]) -> dict[str, Any]:
    """What was followed at the start and at the checkpoint that every stage kept."""
    rows: list[tuple[str, int, Mapping[str, Any]]] = []
    for name, stage in stages.items():
        kept = next(line for line in stage["history"] if line["step"] == stage["kept"])
        rows += [("At the start", 0, stage["history"][0])] if not rows else []
        rows.append((stage_name(name), stage["kept"], kept))
    keys = [key for key in FOLLOWED if any(key in line for _, _, line in rows)]
    forms = {key: ".1%" if key == "score" else ".4g" for key in keys}
    return {
        "columns": ["Stage", "Step", *(FOLLOWED[key][0] for key in keys)],
        "rows": [
            [name, f"{step:,}", *(number(line.get(key), forms[key]) for key in keys)]
            for name, step, line in rows
        ],
    }


def _along(history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    found = [(line["step"], line[key]) for line in history if key in line]
    return [step for step, _ in found], [value for _, value in found]


def _settings(result: Result) -> dict[str, str]:
    asked = result["asked"]
    said = {"model", "unlabelled", "labelled", "source", "method", "seeds", "metric", "margin"}
    said |= {"cache"}  # no option: --cache-limit 0
    said |= set() if asked["stop"] else {"patience"}
    said |= set() if result["model"]["made"] else {"warm_steps"}
    shown = {
        f"--{name.replace('_', '-')}": plain(value)
        for name, value in {**asked, **result.get("used", {})}.items()
        if name not in said and value is not None and value is not False
    }
    stages = {
        stage_name(name): f"{stage['steps']:,} steps, kept that of step {stage['kept']:,}"
        for name, stage in result["stages"].items()
    }
    return {**stages, **shown}
