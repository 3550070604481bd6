"""The ledger of a stream: one JSON line for each time t, written as it happens, and its sums.

    ledger = Ledger("out/ledger.jsonl")
    ledger.append({"t": 1, "error": 0.9, "parameters": 3210, "flops": {…}, …})
    summary(ledger.lines).cer                    # equation (1) of the paper

| field | what it says of time t |
|---|---|
| `t`, `name`, `rows` | the mega-batch that arrived |
| `phase`, `trained` | phases done so far, and whether one ended at t |
| `error` or `perplexity` | of the model in force; chance before the first phase |
| `parameters`, `inference_flops` | of the model in force; FLOPs of one answer |
| `flops` | spent at t: `train` (forward and backward), `forward` (the paper's), `validation`, `growth` |
| `steps`, `examples`, `validation`, `growth` | of the phase that ended at t |
| `bytes` | of `model`, `optimizer` and `replay` |
| `seconds` | of wall time: all that two equal runs differ in |

Paper: Caccia et al., 2022. Its Mem and Comp start at t = 0, its CER at t = 1; here all at t = 1.
"""  # noqa: E501

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import io

FLOPS = ("train", "forward", "validation", "growth")
Line = dict[str, Any]


class Ledger:
    """The lines of a file; what is appended is on disk before anything else happens."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lines: list[Line] = read_ledger(self.path)

    def append(self, line: Line) -> None:
        """Write the line of the next time."""
        if line["t"] != len(self.lines) + 1:
            raise ValueError(f"{self.path}: t = {len(self.lines) + 1} is next, not {line['t']}")
        io.append_line(self.path, json.dumps(line, allow_nan=False, ensure_ascii=False))
        self.lines.append(line)


def read_ledger(path: str | Path) -> list[Line]:
    """The lines of a ledger, also while it is being written; a line that is wrong raises."""
    lines = []
    for t, text in enumerate(io.read_lines(path), start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {t} is not JSON ({error}); restore it") from error
        if not isinstance(line, dict) or line.get("t") != t:
            raise ValueError(f"{path}, line {t} is not that of t = {t}; restore the file")
        lines.append(line)
    return lines


def timeless(lines: Sequence[Line]) -> list[Line]:
    """The lines without wall time: equal for equal runs."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


# -- what was reached ------------------------------------------------------------------------------


def metric_of(lines: Sequence[Line]) -> str:
    """What a ledger measures: "error" or "perplexity"."""
    return "perplexity" if lines and "perplexity" in lines[0] else "error"


def score(measured: Mapping[str, float], metric: str) -> float:
    """Error, or perplexity from the mean loss (at most what a float holds)."""
    if metric == "error":
        return measured["error"]
    return math.exp(min(measured["loss"], 700.0))


def chance(classes: int, metric: str) -> float:
    """The score of a uniform guess: before the first phase there is nothing better."""
    return 1 - 1 / classes if metric == "error" else float(classes)


@dataclass(frozen=True)
class Summary:
    """Sums over t = 1 … B; lower is better in all of them."""

    metric: str
    batches: int  # B
    cer: float  # sum of the errors (or perplexities): the area under the curve
    average: float  # CER / B
    final: float
    mem: int  # sum of the parameters
    comp: float  # training FLOPs, forward and backward
    comp_forward: float  # the paper's convention: forward passes of training only
    comp_validation: float
    comp_growth: float
    seconds: float


def summary(lines: Sequence[Line]) -> Summary:
    """CER, CER/B, Mem and Comp of a ledger (equations 1 and 2, from t = 1)."""
    if not lines:
        raise ValueError("the ledger is empty: nothing has arrived yet")
    metric = metric_of(lines)
    scores = [line[metric] for line in lines]
    spent = {word: math.fsum(line["flops"][word] for line in lines) for word in FLOPS}
    return Summary(
        metric=metric,
        batches=len(lines),
        cer=math.fsum(scores),
        average=math.fsum(scores) / len(lines),
        final=scores[-1],
        mem=sum(line["parameters"] for line in lines),
        comp=spent["train"],
        comp_forward=spent["forward"],
        comp_validation=spent["validation"],
        comp_growth=spent["growth"],
        seconds=math.fsum(sum(line["seconds"].values()) for line in lines),
    )
