"""What `moiety anytime` says: arrivals, lines of the ledger, plans and sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ...anytime.base import Learner
    from ...anytime.data import Batch
    from ...anytime.run import Result
    from ...anytime.stream import Seen, Stream


class Teller:
    """Says what each look at the folder met, and nothing twice."""

    def __init__(self, source: Stream) -> None:
        self.source = source
        self.said: set[str] = set()

    def __call__(self, seen: list[Seen]) -> None:
        new = [one for one in seen if one.reason and str(one) not in self.said]
        self.said |= {str(one) for one in new}
        for sentence in sentences(new, self.source):
            typer.echo(f"  {sentence}", err=True)


def sentences(seen: list[Seen], source: Stream) -> list[str]:
    """A sentence for each file; before mega-batch 1, for each reason.

    A wrong --target, say, is then wrong for all files alike.
    """
    if source.known():
        return [str(one) for one in seen]
    alike: dict[str, list[Seen]] = {}
    for one in seen:
        alike.setdefault(one.reason.replace(one.name, ""), []).append(one)
    return [_with_more(str(first), len(more)) for first, *more in alike.values()]


def _with_more(sentence: str, more: int) -> str:
    nor = f", nor {'is' if more == 1 else 'are'} {more} more" if more else ""
    return sentence.replace(" is not taken", f" is not taken{nor}", 1)


def mega_batches(count: int) -> str:
    """So many of them, in words."""
    return f"{count} mega-batch" if count == 1 else f"{count} mega-batches"


def tell_unused(source: Stream) -> None:
    """Columns of the first file that are no inputs, and why."""
    form = getattr(getattr(source, "read", None), "form", None)
    unused = getattr(form, "unused", {})
    if unused:
        named = "; ".join(f"{name} ({why})" for name, why in unused.items())
        typer.echo(f"Columns that are not used: {named}")


def tell_line(line: dict[str, Any]) -> None:
    """A line of the ledger in words."""
    metric = "perplexity" if "perplexity" in line else "error"
    text = f"t = {line['t']}  {line['name']}  {line['rows']} rows  {metric} {line[metric]:.4g}"
    if line["trained"]:
        text += (
            f"  phase {line['phase']}: {line['steps']} steps, {line['flops']['train']:.2e} FLOPs"
        )
        if line["validation"] is not None:
            text += f", validation {line['validation']:.4g}"
        if line["growth"]:
            text += f", grown (gap {line['growth']['gap']:.1e})"
    typer.echo(text)


def tell_plan(source: Stream, make: Callable[[Batch], Learner]) -> None:
    for sentence in sentences(source.poll(), source):
        typer.echo(f"  {sentence}")
    verb = "has" if source.known() == 1 else "have"
    typer.echo(f"{mega_batches(source.known())} {verb} arrived.")
    if source.known():
        made = make(source[1])
        typer.echo(f"Learner {made.name}: {made.parameters():,} parameters.")
    typer.echo("Nothing was trained, and nothing written.")


def tell_result(result: Result, out: Path) -> None:
    """The sums of the ledger, what still waits, and where to go on."""
    sums = result.summary
    name = "CER" if sums.metric == "error" else "Sum of perplexities"
    typer.echo(
        f"{name} {sums.cer:.4g} over {mega_batches(sums.batches)} ({sums.average:.4g} each, "
        f"{sums.final:.4g} at the end); Mem {sums.mem:,} parameters; Comp {sums.comp:.3e} FLOPs "
        f"(forward only {sums.comp_forward:.3e}; validation {sums.comp_validation:.3e}, growth "
        f"{sums.comp_growth:.3e} apart)"
    )
    if result.waiting:
        verb = "waits" if len(result.waiting) == 1 else "wait"
        waiting = mega_batches(len(result.waiting))
        typer.echo(f"{waiting} {verb} for more: {result.waiting}")
    if (out / "current").exists():
        typer.echo(f"The newest model is {out / 'current'}; the ledger is {out / 'ledger.jsonl'}")
