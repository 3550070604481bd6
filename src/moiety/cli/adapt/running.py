"""What `moiety adapt` does with what was asked: one method, or three beside each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.console import Console

from ... import io
from ...report.words import duration
from .telling import Bar, tell_costs, tell_files, tell_opened, tell_stages, tell_tuned

if TYPE_CHECKING:
    from ...adapt.asked import Asked


def dry(asked: Asked, out: Path, device: torch.device) -> None:
    """Say what would run."""
    from ...adapt.command import begin
    from ...adapt.costing import costs, rough_seconds
    from ...adapt.folder import check_out

    opened = begin(asked, None)
    check_out(asked, out)
    tell_opened(asked, opened)
    plan = costs(asked, opened)
    seconds = rough_seconds(asked, opened, plan) if device.type == "cpu" else None
    tell_costs(plan, seconds, Console())


def run(asked: Asked, out: Path, device: torch.device, save_every: float, repeat: str) -> None:
    """Run, or go on, to the end; what is done already is told again."""
    from ...adapt.command import begin, finish, pretrain
    from ...adapt.recipe import Diverged

    result = io.read_json(out / "result.json") if (out / "result.json").exists() else {}
    if result.get("asked") == dataclasses.asdict(asked):
        typer.echo(f"{out} is complete (its data were not read again); another --out runs it anew.")
        tell(result, out)
        return
    again = (out / "plan.json").exists()
    opened = begin(asked, out, device)
    tell_opened(asked, opened)
    if again:
        typer.echo(f"Going on in {out}.")
    made, how = list(opened.encoder.made), ", in another --out"
    try:
        with Bar() as bar:
            adapted = pretrain(asked, opened, out, bar, save_every=save_every)
            how = ", with --tune-lr; what was pre-trained is kept"
            if asked.method == "compare":
                from .comparing import compare

                assert adapted is not None
                result = compare(asked, opened, adapted, out, bar, save_every, repeat)
            else:
                result = finish(asked, opened, adapted, out, bar, save_every=save_every)
    except Diverged as error:
        raise ValueError(f"{error}{how}") from None
    tell(result, out)
    if adapted is not None:
        took, flops = duration(adapted.seconds), f"{adapted.flops['total']:.2e}"
        warm = ", besides the warm-up of its head" if made else ""
        typer.echo(f"Steps and checks of pre-training took {took} and {flops} FLOPs{warm}.")


def tell(result: dict[str, Any], out: Path) -> None:
    """What came out, for a reader in a terminal."""
    console = Console()
    tell_stages(result, console)
    if "judgement" in result:
        from .comparing import tell_judgement

        tell_judgement(result, out, console)
        return
    tell_tuned(result["tuned"])
    tell_files(out, result)
