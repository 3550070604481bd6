"""The options that all comparisons have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Target = Annotated[
    list[str] | None,
    typer.Option(
        "--target", "--targets", help="Column to predict; several with commas, or repeated."
    ),
]
Experts = Annotated[int, typer.Option(min=1, help="Experts of a block.")]
K = Annotated[int, typer.Option(min=1, help="Experts a token.")]
Seeds = Annotated[int, typer.Option(min=2, help="Trials of every arm.")]
Budget = Annotated[str, typer.Option(help="Time for all training, such as 90s or 1h30m.")]
Equal = Annotated[
    Literal["flops", "examples", "time"],
    typer.Option(help="What every trial gets the same of."),
]
Margin = Annotated[
    float, typer.Option(help="The smallest difference that matters, in the main metric.")
]
Rate = Annotated[float | None, typer.Option(help="Learning rate of all arms.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Examples of a step.")]
Tune = Annotated[int, typer.Option(min=0, help="Learning rates to try for every arm; 0: none.")]
MaxExamples = Annotated[
    int | None, typer.Option(min=1, help="Take at most so many examples of the data.")
]
SplitSeed = Annotated[int, typer.Option(min=0, help="Of the split into train and test.")]
KeepLeaks = Annotated[
    bool, typer.Option("--keep-leaks", help="Keep columns that give a target away.")
]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets by name lie.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Trials at once; a CPU: as many as cores.")
]
Device = Annotated[str, typer.Option(help="Such as cpu or cuda.")]
Out = Annotated[Path | None, typer.Option(help="Folder; runs/compare-NAME.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show arms, cost and time; write nothing.")]
