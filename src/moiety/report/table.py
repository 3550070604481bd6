"""A table of results: which values to show, under which heading, in which form."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True)
class Column:
    """Show `row[key]` under `label`, written with a format such as ".1%" or ",.0f"."""

    key: str
    label: str
    format: str = ""

    def text(self, row: Mapping[str, Any]) -> str:
        """Write the value of one row; what is missing or not a number becomes a dash."""
        value = row.get(self.key)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return "–"
        # A text among numbers, such as "none", is shown as it is.
        return str(value) if isinstance(value, str) else format(value, self.format)


def as_columns(columns: Sequence[Column | tuple[str, ...]]) -> list[Column]:
    """Accept plain tuples (key, label) and (key, label, format) beside `Column`."""
    return [column if isinstance(column, Column) else Column(*column) for column in columns]


def cells(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]
) -> tuple[list[list[str]], list[bool]]:
    """Return the text of every cell, row by row, and which columns hold numbers."""
    numeric = [
        any(isinstance(row.get(column.key), int | float) for row in rows) for column in columns
    ]
    return [[column.text(row) for column in columns] for row in rows], numeric


@dataclass(frozen=True)
class TablePart:
    """A section of a page that is a table."""

    title: str
    summary: str
    columns: Sequence[Column]
    notes: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()

    def with_rows(self, rows: Sequence[Mapping[str, Any]]) -> Self:
        """The same with what came out."""
        return replace(self, rows=rows)

    def view(self) -> dict[str, Any]:
        """As the template shows it."""
        body, numeric = cells(self.rows, self.columns)
        return {**vars(self), "body": body, "numeric": numeric}
