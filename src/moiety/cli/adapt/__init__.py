"""`moiety adapt`: carry a masked encoder, of images or of text, to a new domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .asked import command_line, in_options, read_bytes, refuse_idle

Way = Literal["self-distill", "further", "compare"]
Match = Literal["hidden", "cls", "prediction", "weights"]
Tune = Literal["plain", "recadam", "mars", "r3f"]

# The panels of --help.
TRAIN = "Pre-training"
DISTIL = "Self-distillation"
TUNING = "Fine-tuning, with --labelled"
COMPARE = "Comparison, with --method compare"
DATA = "Data"


def command(
    model: Annotated[
        str, typer.Option(help="Folder of a masked encoder, such as RoBERTa or ViT-MAE.")
    ],
    unlabelled: Annotated[
        str,
        typer.Option(
            help="Texts (a file, a folder, a table) or images (a folder, .npz) of the new domain."
        ),
    ],
    labelled: Annotated[
        str | None,
        typer.Option(
            help="A folder with train.csv, dev.csv and test.csv, a table, or images by class."
        ),
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Data of the old domain, to follow what is forgotten.")
    ] = None,
    method: Annotated[
        Way, typer.Option(help="compare: fine-tune, further and self-distill at the same labels.")
    ] = "self-distill",
    out: Annotated[Path, typer.Option(help="Folder of models and states.")] = Path("out/adapt"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of each stage. Default: 2000.", rich_help_panel=TRAIN)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples of a step. Default: 64 images, 128 texts.", rich_help_panel=TRAIN
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate. Default: 1.5e-4 for images, 1e-4 for text.", rich_help_panel=TRAIN
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Of self-distillation. Default: 1.", rich_help_panel=DISTIL),
    ] = None,
    match: Annotated[
        Match | None,
        typer.Option(
            help="What the student keeps of its teacher. Default: cls of images, hidden of text.",
            rich_help_panel=DISTIL,
        ),
    ] = None,
    mae_weight: Annotated[
        float | None, typer.Option(help="Of the masked loss. Default: 1.", rich_help_panel=DISTIL)
    ] = None,
    distill_weight: Annotated[
        float | None, typer.Option(help="Of the teacher. Default: 1.", rich_help_panel=DISTIL)
    ] = None,
    distill_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps from one look at the teacher to the next. Default: 1.",
            rich_help_panel=DISTIL,
        ),
    ] = None,
    match_routing: Annotated[
        float | None,
        typer.Option(
            help="Weight that keeps routers close to the teacher's. Default: 0.",
            rich_help_panel=DISTIL,
        ),
    ] = None,
    cache_limit: Annotated[
        str | None,
        typer.Option(
            help="Largest cache of the teacher, such as 10GB, or 0; above it the teacher runs at "
            "every step.",
            rich_help_panel=DISTIL,
        ),
    ] = None,
    warm_steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of a head that the model lacks. Default: 500.", rich_help_panel=TRAIN
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rank of LoRA adapters (peft) to train instead of the encoder, and to merge.",
            rich_help_panel=TRAIN,
        ),
    ] = None,
    checks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Looks at the model in a stage. Default: 8.", rich_help_panel=TRAIN
        ),
    ] = None,
    stop: Annotated[
        Literal["probe"] | None,
        typer.Option(help="probe: keep the check with the best probe.", rich_help_panel=TRAIN),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --stop: worse checks until a stage ends. Default: 3.",
            rich_help_panel=TRAIN,
        ),
    ] = None,
    tune: Annotated[
        Tune | None, typer.Option(help="How to fine-tune. Default: plain.", rich_help_panel=TUNING)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of fine-tuning. Default: 10.", rich_help_panel=TUNING)
    ] = None,
    tune_batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Examples of a step. Default: 32 images, 16 texts.", rich_help_panel=TUNING
        ),
    ] = None,
    tune_lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate. Default: 1e-4 for images, 2e-5 for text.", rich_help_panel=TUNING
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Of a comparison, at least 5. Default: 5.", rich_help_panel=COMPARE),
    ] = None,
    labels: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Labelled examples that a seed of a comparison draws. Default: all.",
            rich_help_panel=COMPARE,
        ),
    ] = None,
    metric: Annotated[
        Literal["accuracy", "macro_f1"] | None,
        typer.Option(
            help="That a comparison judges by. Default: accuracy.", rich_help_panel=COMPARE
        ),
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="Smallest difference that matters. Default: 0.01.", rich_help_panel=COMPARE
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Column of tables that holds the text, or array of an .npz that holds the images.",
            rich_help_panel=DATA,
        ),
    ] = None,
    labelled_text: Annotated[
        str | None,
        typer.Option(
            help="Column of labelled tables that holds the text. Default: that of --text.",
            rich_help_panel=DATA,
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Column of labelled tables to predict.", rich_help_panel=DATA)
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=3, help="Tokens of a row. Default: up to 128.", rich_help_panel=DATA),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Resize and convert images that the model does not read.",
            rich_help_panel=DATA,
        ),
    ] = False,
    precision: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of products.")
    ] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Of splits, masks, orders and heads.")] = 0,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    data_dir: Annotated[
        Path | None, typer.Option(help="Where data sets by name lie.", rich_help_panel=DATA)
    ] = None,
    save_every: Annotated[
        float, typer.Option(min=0, help="Seconds between states on the disk.")
    ] = 30.0,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show steps, sizes and FLOPs; train and write nothing."),
    ] = False,
) -> None:
    """Adapt a masked encoder to unlabelled data, and fine-tune it where there are labels."""
    from ... import io
    from ...adapt.asked import Asked
    from ...adapt.command import check_out
    from ...train import find_device
    from ..demo import check_writable
    from .running import dry, run
    from .telling import quietly

    given: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if name in Asked.__dataclass_fields__ and value is not None
    }
    refuse_idle(given)
    repeat = command_line({**given, "out": out, "device": device})
    if cache_limit is not None:
        limit = read_bytes(cache_limit)
        given |= {"cache": limit > 0, "cache_limit": limit or None}
    if data_dir is not None:
        given["data_dir"] = str(data_dir)
    asked, where = Asked(**given), find_device(device)
    if dry_run:
        with quietly(), in_options():
            dry(asked, out)
        return
    check_out(asked, out)
    check_writable(out)
    with io.lease(out), quietly(), in_options():
        run(asked, out, where, save_every, repeat)
