"""What a routing page tells of a stream: sums of each ledger, and the error at every arrival."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .chart import Series, lines
from .table import Column, cells


@dataclass(frozen=True)
class StreamPart:
    """A row of sums for each learner, and its errors at t = 1, 2, …"""

    title: str
    summary: str
    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[Column]
    errors: Mapping[str, Sequence[float]]
    notes: Mapping[str, str] = field(default_factory=dict)

    def view(self) -> dict[str, Any]:
        """As the template shows it."""
        body, numeric = cells(self.rows, self.columns)
        series = [Series(arm, range(1, len(y) + 1), y) for arm, y in self.errors.items()]
        return {
            "title": self.title,
            "summary": self.summary,
            "columns": self.columns,
            "body": body,
            "numeric": numeric,
            "notes": self.notes,
            "chart": lines("Error at every arrival", series, across="mega-batches arrived", top=1),
        }
