"""The ledger: every claim of every built-in study, and what was measured of it.

    rows = ledger("results")              # the committed results, results/<study>.json
    io.write_atomic("docs/claims.md", ledger_markdown(rows))

The verdicts are computed anew from the stored differences, because all claims of one paper, over
all its studies, are corrected together; those that were not run count too. A study of our own
answers for its claims alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..report.words import difference, difference_interval, sentence
from .claims import Claim
from .judging import judge, would_change
from .loading import list_studies, load_study
from .result import NOT_THE_ARM
from .schema import read_result
from .study import Study
from .tuning import without_settings

NOT_RUN = "not run"
COMMAND = "moiety study claims --out docs/claims.md"
CAUTION = {
    "exact": "In the paper's own setting.",
    "scaled down": "At a smaller scale than the paper's: what was seen here, where the paper may "
    "be right at its own.",
    "proxy": "On other data than the paper's: this is what was seen here, and says nothing "
    "against the paper.",
    "our own": "A question of our own.",
}


@dataclass(frozen=True)
class Row:
    """A declared claim with what was measured of it."""

    paper: str  # "": a study of our own
    study: str
    number: int  # of the claim in its study, from 1
    claim: Claim
    form: str  # of the metric's numbers
    note: str = ""  # why there is no verdict
    measured: Mapping[str, Any] | None = None  # the claim in the result
    result: Mapping[str, Any] | None = None
    verdict: Mapping[str, Any] | None = None  # corrected over the paper
    would_change: str = ""

    @property
    def name(self) -> str:
        return f"{self.study} {self.number}"

    @property
    def tier(self) -> str:
        """The tier, with the scale where it was not the whole one."""
        scale = (self.result or {}).get("scale", "full")
        return self.claim.tier if scale == "full" else f"{self.claim.tier}, scale {scale}"

    @property
    def effect(self) -> str:
        """The difference with its interval."""
        if not self.verdict or self.verdict["interval"] is None:
            return "–"
        low, high = self.verdict["interval"]
        span = difference_interval(low, high, self.form)
        return f"{difference(self.verdict['effect'], self.form)} ({span})"

    @property
    def word(self) -> str:
        """The verdict in a word."""
        return self.verdict["word"] if self.verdict else self.note.split(":")[0]

    def as_dict(self) -> dict[str, Any]:
        """The row as plain values; its result shortened to what tells how it was made."""
        result = self.result or {}
        kept = ("scale", "command", "when", "machine", "trials_sha256", "deviations", "looks")
        row = {name: getattr(self, name) for name in ("paper", "study", "number", "note")}
        row |= {"verdict": self.verdict, "would_change": self.would_change}
        row["failed"] = self.measured["failed"] if self.measured else None
        return {**row, "claim": asdict(self.claim), "result": {n: result.get(n) for n in kept}}


def result_path(folder: str | Path, study: str) -> Path:
    """Where the committed result of a study lies."""
    return Path(folder) / f"{study.replace('/', '-')}.json"


def ledger(folder: str | Path = "results", studies: Mapping[str, Study] | None = None) -> list[Row]:
    """All claims with their verdicts, paper by paper; by default of the built-in studies."""
    if studies is None:
        studies = {name: load_study(name) for name in list_studies()}
    families: dict[str, list[Row]] = {}
    for name, study in studies.items():
        families.setdefault(study.paper or f"/{name}", []).extend(_rows(study, folder))
    return [row for rows in families.values() for row in _judged(rows)]


def family_size(study: Study) -> int:
    """How many claims are corrected together with those of a study: all of its paper."""
    others = [load_study(name) for name in list_studies() if study.paper and name != study.name]
    return len(study.claims) + sum(len(o.claims) for o in others if o.paper == study.paper)


def _rows(study: Study, folder: str | Path) -> list[Row]:
    """The claims of a study, each with its measurement or with a note why there is none."""
    result, note = _read(study, result_path(folder, study.name))
    rows = []
    for number, claim in enumerate(study.claims, start=1):
        found, why = _match(claim, study, result) if result else (None, note)
        form, made = study.metrics[claim.metric].format, result if found else None
        rows.append(Row(study.paper, study.name, number, claim, form, why, found, made))
    return rows


def _read(study: Study, path: Path) -> tuple[dict[str, Any] | None, str]:
    """The result of a study, or why there is none to use."""
    if not path.exists():
        return None, NOT_RUN
    try:
        result = read_result(path)
    except ValueError as error:
        return None, f"unusable result: {error}"
    if result["study"] != study.name:
        return None, f"unusable result: {path.name} is that of {result['study']}"
    return result, ""


def _match(
    claim: Claim, study: Study, result: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, str]:
    """What was measured of exactly this claim, or else what has changed since."""
    declared, changed = asdict(claim), []
    for each in result["claims"]:
        if any(each[name] != declared[name] for name in ("kind", "a", "b", "metric")):
            continue
        changed = [name for name, value in declared.items() if each[name] != value]
        if not changed:
            changed = _changed_around(claim, study, result)
            return (None, _again(changed)) if changed else (each, "")
    return None, _again(changed) if changed else NOT_RUN


def _changed_around(claim: Claim, study: Study, result: Mapping[str, Any]) -> list[str]:
    """What the study file has other than the result: the metric's direction, an arm's settings."""
    better = result["metrics"][claim.metric]["better"]
    changed = ["metric"] if better != study.metrics[claim.metric].better else []
    scale = study.scales.get(result["scale"])
    if scale is None:
        return [*changed, "scale"]
    searched = (result["tuning"] or {}).get("arms", {})
    for arm in result["arms"]:
        if arm["name"] in (claim.a, claim.b):
            # A search overwrites what it varies.
            free = {*NOT_THE_ARM, *searched.get(arm["name"], {}).get("space", {})}
            now = json.loads(json.dumps({**scale.settings, **study.arms[arm["name"]]}))
            fixed = {name: value for name, value in now.items() if name not in free}
            if any(arm["settings"].get(name) != value for name, value in fixed.items()):
                changed.append(f"setting of {arm['name']}")
    return changed


def _again(changed: Sequence[str]) -> str:
    return f"measured with another {' and '.join(changed)}: run again"


def _judged(rows: Sequence[Row]) -> list[Row]:
    """The rows of one family with their verdicts, corrected over all of them."""
    measured = [row.measured for row in rows if row.measured]
    said = iter(judge(measured, untested=len(rows) - len(measured)))
    judged = []
    for row in rows:
        if row.measured:
            verdict = next(said)
            lost = without_settings((row.result or {}).get("tuning"))
            change = would_change(row.measured, verdict, form=row.form, claims=len(rows), lost=lost)
            row = Row(**{**vars(row), "verdict": verdict, "would_change": change})
        judged.append(row)
    return judged


# -- as text ---------------------------------------------------------------------------------------


def ledger_markdown(rows: Sequence[Row]) -> str:
    """The ledger as a Markdown page: a table for each paper, and a paragraph for each claim."""
    papers: dict[str, list[Row]] = {}
    for row in rows:
        papers.setdefault(row.paper, []).append(row)
    # Our own questions come last.
    order = sorted(papers, key=lambda paper: not paper)
    return "\n\n".join([_head(rows), *(_paper(paper, papers[paper]) for paper in order)]) + "\n"


def _head(rows: Sequence[Row]) -> str:
    words = [row.word for row in rows]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    return f"""# Claims, measured again

{len(rows)} claims: {counts}. This page is written by `{COMMAND}`
from the files in `results/`; do not edit it.

Each claim was written into its study, with the smallest difference δ that matters and the reason
for it, before there were results. *holds*: the difference lies above δ (for "the same": within ±δ);
*reversed*: below −δ (for "the same": outside ±δ); *negligible*: within ±δ; *undecided*: these seeds
do not tell. Differences are over shared seeds, positive where the first arm is better, with their
95 % t interval. Intervals are of one claim alone; verdicts and p are corrected over all claims of a
paper and over every look, so that an interval may clear zero, or δ, where the verdict is undecided.
How that is done, and how often it errs: [statistics.md](statistics.md)."""


def _paper(paper: str, rows: Sequence[Row]) -> str:
    title = paper or "Questions of our own"
    head = "| claim | verdict | difference | p | paper's number | tier | seeds |\n"
    table = head + "|---|---|---|---|---|---|---|\n" + "\n".join(map(_line, rows))
    return "\n\n".join([f"## {title}", table, *map(_details, rows)])


def _line(row: Row) -> str:
    """One claim as a row of the table."""
    verdict = row.verdict or {}
    cells = [
        f"{row.name}: {row.claim.quote}",
        f"**{row.word}**" if row.verdict else row.word,
        row.effect,
        f"{verdict['p']:.2g}" if verdict else "–",
        row.claim.number or "–",
        row.tier,
        str(verdict.get("seeds", "–")),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _details(row: Row) -> str:
    """Everything else about a claim."""
    claim, mark = row.claim, f" ({row.claim.mark})" if row.claim.mark else ""
    margin = difference(claim.margin, row.form, signed=False)
    lines = [
        f"### {row.name}",
        "",
        f"> {claim.quote}{mark}",
        "",
        f"- **Declared:** {_statement(claim, margin)} in {claim.metric}. δ = {margin}: "
        f"{claim.reason}.",
    ]
    if row.verdict is None or row.measured is None or row.result is None:
        again = f"`moiety study run {row.study}`"
        return "\n".join([*lines, f"- **Verdict:** none, {row.note}. To run it: {again}"])
    return "\n".join([*lines, *_measurement(row, row.verdict, row.measured, row.result)])


def _measurement(
    row: Row, verdict: Mapping[str, Any], measured: Mapping[str, Any], result: Mapping[str, Any]
) -> list[str]:
    """What was found, how sure it is, and how it was made."""
    detectable = verdict["detectable"]
    smallest = "–" if detectable is None else difference(detectable, row.form, signed=False)
    found = sentence({**measured, "verdict": verdict}, row.form)
    number = f" The paper's own number: {row.claim.number}." if row.claim.number else ""
    deviations = "; ".join(result["deviations"]) or "none declared"
    return [
        f"- **Verdict:** *{verdict['word']}*. {found} {CAUTION[row.claim.tier]}{number}",
        f"- **Measured:** {row.effect} over {verdict['seeds']} seeds, "
        f"p = {verdict['p']:.2g} against {verdict['level']:.2g} at look {measured['look']}; "
        f"smallest detectable distance from δ: {smallest}; failed trials: {measured['failed']}.",
        f"- **What would change it:** {row.would_change}",
        f"- **Deviations from the paper:** {deviations}."
        if row.paper
        else f"- **A seed decides:** {', '.join(result['varies']) or 'not declared'}.",
        f"- **Made by** `{result['command']}` ({result['scale']}, {result['machine']['device']}); "
        f"raw trials `{result['trials_sha256'][:16]}`.",
    ]


def _statement(claim: Claim, margin: str) -> str:
    if claim.kind == "greater":
        return f"{claim.a} is better than {claim.b} by more than {margin}"
    return f"{claim.a} and {claim.b} differ by less than {margin} either way"
