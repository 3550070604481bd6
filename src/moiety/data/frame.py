"""A problem from a table: numbers and categories, or a column of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .columns import (
    CUT,
    TEXT_NAMES,
    Columns,
    encode_categories,
    encode_numbers,
    is_text,
    sort_columns,
)
from .leaks import find_leaks
from .problem import Kind, Leak, Problem, Split
from .splits import Rows, choose, drop_repeats, split_of
from .targets import Kinds, check_classes, encode, find_targets, near, settle_kinds, strata

if TYPE_CHECKING:
    import pandas

FEW_VALUES = 0.2  # of train may repeat in later splits by accident, and is then taken out


def from_frame(
    frame: pandas.DataFrame,
    name: str,
    *,
    targets: str | Sequence[str] | None,
    text: str | None = None,
    given: np.ndarray | None = None,
    seed: int = 0,
    max_examples: int | None = None,
    leaks: Literal["drop", "keep"] = "drop",
    missing: Literal["drop", "mask"] = "drop",
) -> Problem:
    """Work out a problem from a table; `given` is the split of each row, where there is one."""
    _check(frame, name)
    frame = frame.rename(columns=str).reset_index(drop=True)
    frame, given = _split_column(frame, given)
    wanted = find_targets(targets, list(frame.columns), name)
    notes: list[str] = []
    labels, kinds = settle_kinds(frame[list(wanted)], wanted, name, notes, missing)
    kept = np.isin(frame.index, labels.index)
    inputs = frame[kept].drop(columns=list(wanted))
    given = None if given is None else given[kept]
    check_classes(labels, kinds, name, ours=given is None)
    text = _text_column(inputs, text, name)
    rows = choose(strata(labels, kinds), given, seed=seed, limit=max_examples, notes=notes)
    if text is None:
        splits, found = _table(name, inputs, labels, kinds, rows, leaks, notes)
    else:
        splits, found = _texts(name, inputs, text, rows, next(iter(kinds)), notes)
    return finish(
        name, "table" if text is None else "text", labels, kinds, splits, rows, notes, found
    )


def finish(
    name: str,
    kind: Kind,
    labels: pandas.DataFrame,
    kinds: Kinds,
    splits: dict[str, Split],
    rows: Rows,
    notes: list[str],
    found: dict[str, Any],
    order: Sequence[str] = (),
) -> Problem:
    """Put the targets to the inputs of `splits`; `found` are further fields of the problem."""
    targets, values = encode(labels, kinds, rows, name, notes, order)
    for split, made in splits.items():
        made.targets = values[split]
    sizes = ", ".join(f"{len(these)} {split}" for split, these in rows.items())
    notes.insert(0, f"{kind}: {sum(map(len, rows.values()))} examples ({sizes})")
    parts = splits["train"], splits["validation"], splits["test"]
    return Problem(name, kind, targets, *parts, notes=notes, **found)


def _check(frame: pandas.DataFrame, name: str) -> None:
    if not len(frame):
        raise ValueError(f"{name} holds no row; give a table with examples")
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise ValueError(f"{name} has two columns {twice[0]!r}; rename one of them")


def _split_column(
    frame: pandas.DataFrame, given: np.ndarray | None
) -> tuple[pandas.DataFrame, np.ndarray | None]:
    """Take the split from a column of that name, where all its values are names of splits."""
    if given is not None or "split" not in frame:
        return frame, given
    words = frame["split"].astype(str)
    parts = {word: split_of(word) for word in words.unique()}
    if None in parts.values():
        return frame, None
    return frame.drop(columns="split"), words.map(parts).to_numpy()


def _text_column(inputs: pandas.DataFrame, text: str | None, name: str) -> str | None:
    """The column of text: the one asked for, or the only one that looks so and is all there is."""
    if text is not None:
        if text not in inputs:
            hint = near(text, list(inputs.columns))
            raise ValueError(
                f"{name} has no column {text!r} with text; it has "
                f"{', '.join(inputs.columns) or 'none besides the targets'}{hint}"
            )
        return text
    texts = [column for column in inputs if is_text(inputs[column])]
    if not texts:
        return None
    _, rest = sort_columns(inputs.drop(columns=texts), [])
    alone = not rest.numbers and not rest.categories
    usual = [column for column in texts if column.lower() in TEXT_NAMES]
    if len(texts) == 1 and (alone or usual):
        return texts[0]
    return usual[0] if len(usual) == 1 and alone else None


def _texts(
    name: str, inputs: pandas.DataFrame, text: str, rows: Rows, target: str, notes: list[str]
) -> tuple[dict[str, Split], dict[str, Any]]:
    """Splits of texts; other columns are not used."""
    import pandas

    words = inputs[text].astype(object).fillna("").astype(str).str.strip()
    # Half a pair of surrogates, which JSON may hold, is no text to a tokenizer.
    texts = [word.encode("utf-8", "replace").decode() for word in words]
    empty = sum(not word for word in texts)
    if empty == len(texts):
        raise ValueError(f"{name}: the column {text!r} is empty; name the one with text")
    if empty:
        notes.append(f"{text}: {empty} texts are empty")
    other = [column for column in inputs if column != text]
    ignored = f"; not used: {', '.join(other)}" if other else ""
    length = np.mean([len(word.split()) for word in texts])
    notes.append(f"text: column {text}, {length:.0f} words on average{ignored}")
    keys = pandas.factorize(words.str.lower().str.split().str.join(" "))[0]
    leaks = drop_repeats(keys, rows, target=target, notes=notes)
    splits = {split: Split({}, {}, [texts[row] for row in these]) for split, these in rows.items()}
    return splits, {"text": text, "leaks": leaks}


def _table(
    name: str,
    inputs: pandas.DataFrame,
    labels: pandas.DataFrame,
    kinds: Kinds,
    rows: Rows,
    leaks: Literal["drop", "keep"],
    notes: list[str],
) -> tuple[dict[str, Split], dict[str, Any]]:
    """Splits of numbers and categories, without the columns that give a target away."""
    dates = [column for column in inputs if inputs[column].dtype.kind == "M"]
    inputs, columns = sort_columns(inputs, notes)
    # By the training rows only: what test holds must not choose the inputs.
    train = inputs[columns.numbers + columns.categories].iloc[rows["train"]]
    found = find_leaks(train, labels.iloc[rows["train"]], kinds)
    found = [replace(leak, dropped=leak.dropped and leaks == "drop") for leak in found]
    out = {leak.column for leak in found if leak.dropped}
    numbers = [column for column in columns.numbers if column not in out]
    categories = [column for column in columns.categories if column not in out]
    used = inputs[numbers + categories]
    if used.empty:
        raise ValueError(_nothing_left(name, columns, out))
    repeats = drop_repeats(
        _row_keys(used, labels), rows, target=next(iter(kinds)), notes=notes, most=FEW_VALUES
    )
    notes.extend(_describe(numbers, categories, columns, used))
    notes.extend(_say_leaks(found))
    as_numbers, scales = encode_numbers(used[numbers], rows)
    as_categories, levels = encode_categories(used[categories], rows, notes)
    splits = {
        split: Split({"numbers": as_numbers[split], "categories": as_categories[split]}, {})
        for split in rows
    }
    fields = {
        "numbers": numbers,
        "scales": scales,
        "dates": [column for column in dates if column in numbers],
        "categories": categories,
        "levels": levels,
        "cardinalities": [len(words) + 1 for words in levels],
    }
    return splits, {**fields, "leaks": found + repeats}


def _nothing_left(name: str, columns: Columns, out: set[str]) -> str:
    """Why there is no column to predict from."""
    if out:
        return (
            f"{name}: every column gives a target away ({', '.join(sorted(out))}); if that is "
            "meant, keep them with --keep-leaks (leaks='keep')"
        )
    if columns.texts:
        return (
            f"{name} has several columns of text ({', '.join(columns.texts)}); say which one to "
            "use as text"
        )
    why = "; ".join(f"{column} is {reason}" for column, reason in columns.ignored.items())
    return f"{name} has no column to predict from: {why or 'only targets'}"


def _row_keys(inputs: pandas.DataFrame, labels: pandas.DataFrame) -> np.ndarray:
    """Equal for rows that are equal in inputs and targets."""
    import pandas

    both = pandas.concat([inputs, labels.add_prefix("target ")], axis=1)
    return pandas.util.hash_pandas_object(both, index=False).to_numpy()


def _describe(
    numbers: list[str], categories: list[str], columns: Columns, used: pandas.DataFrame
) -> Iterator[str]:
    """What each column is used as, and how gaps are filled."""
    if numbers:
        yield (
            f"numbers: {', '.join(numbers)}; standardised with mean and std of train, "
            f"cut at ±{CUT:.0f}"
        )
    if categories:
        yield f"categories: {', '.join(categories)}"
    ignored = columns.ignored | dict.fromkeys(columns.texts, "text (name it to learn from it)")
    yield from (f"not used: {column}: {why}" for column, why in ignored.items())
    gaps = used.isna().mean()
    if gaps.any():
        shown = ", ".join(f"{column} {share:.1%}" for column, share in gaps[gaps > 0].items())
        yield f"missing: {shown}; numbers become the mean of train, categories one value for it"


def _say_leaks(found: list[Leak]) -> Iterator[str]:
    out = sorted({leak.column for leak in found if leak.dropped})
    if out:
        how = "--keep-leaks (leaks='keep') keeps them"
        yield f"leaks: {', '.join(out)} left out of the inputs; {how}"
    suspects = sorted({leak.column for leak in found} - set(out))
    if suspects:
        yield f"leaks: {', '.join(suspects)} suspected, kept among the inputs: look at them"
