"""`moiety adapt`: carry a masked encoder, of images or of text, to a new domain."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .asked import command_line, in_options, read_bytes, refuse_idle

Way = Literal["self-distill", "further", "fine-tune", "compare"]
Match = Literal["hidden", "cls", "prediction", "weights"]
Tune = Literal["plain", "recadam", "mars", "r3f"]


# Options by their panel of --help.
train = partial(typer.Option, rich_help_panel="Pre-training")
distil = partial(typer.Option, rich_help_panel="Self-distillation")
tuning = partial(typer.Option, rich_help_panel="Fine-tuning, with --labelled")
compared = partial(typer.Option, rich_help_panel="Comparison, with --method compare")
data = partial(typer.Option, rich_help_panel="Data")


def command(
    model: Annotated[
        str, typer.Option(help="Folder, or hub id, of a masked encoder such as RoBERTa or ViT-MAE.")
    ],
    unlabelled: Annotated[
        str | None,
        typer.Option(
            help="Texts (a file, a folder, a table) or images (a folder, .npz) of the new domain."
        ),
    ] = None,
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
        Way, typer.Option(help="further: masks alone; compare: all three ways at the same labels.")
    ] = "self-distill",
    out: Annotated[Path, typer.Option(help="Folder of models and states.")] = Path("out/adapt"),
    steps: Annotated[int | None, train(help="Of each stage. Default: 2000.", min=1)] = None,
    batch: Annotated[
        int | None, train(help="Examples of a step. Default: 64 images, 128 texts.", min=1)
    ] = None,
    lr: Annotated[
        float | None, train(help="Learning rate. Default: 1.5e-4 for images, 1e-4 for text.")
    ] = None,
    rounds: Annotated[int | None, distil(help="Of self-distillation. Default: 1.", min=1)] = None,
    match: Annotated[
        Match | None,
        distil(
            help="What the student keeps of its teacher. Default: cls of images, hidden of text."
        ),
    ] = None,
    mae_weight: Annotated[float | None, distil(help="Of the masked loss. Default: 1.")] = None,
    distill_weight: Annotated[float | None, distil(help="Of the teacher. Default: 1.")] = None,
    distill_every: Annotated[
        int | None,
        distil(help="Steps from one look at the teacher to the next. Default: 1.", min=1),
    ] = None,
    match_routing: Annotated[
        float | None, distil(help="Weight that keeps routers close to the teacher's. Default: 0.")
    ] = None,
    cache_limit: Annotated[
        str | None,
        distil(
            help="Largest cache of the teacher, such as 10GB, or 0; above it the teacher runs at "
            "every step."
        ),
    ] = None,
    warm_steps: Annotated[
        int | None, train(help="Of a head that the model lacks. Default: 500.", min=1)
    ] = None,
    lora: Annotated[
        int | None,
        train(
            help="Rank of LoRA adapters (peft) to train instead of the encoder, and to merge.",
            min=1,
        ),
    ] = None,
    checks: Annotated[
        int | None, train(help="Looks at the model in a stage. Default: 8.", min=1)
    ] = None,
    stop: Annotated[
        Literal["probe"] | None, train(help="probe: keep the check with the best probe.")
    ] = None,
    patience: Annotated[
        int | None, train(help="With --stop: worse checks until a stage ends. Default: 3.", min=1)
    ] = None,
    tune: Annotated[Tune | None, tuning(help="How to fine-tune. Default: plain.")] = None,
    epochs: Annotated[int | None, tuning(help="Of fine-tuning. Default: 10.", min=1)] = None,
    tune_batch: Annotated[
        int | None, tuning(help="Examples of a step. Default: 32 images, 16 texts.", min=1)
    ] = None,
    tune_lr: Annotated[
        float | None, tuning(help="Learning rate. Default: 1e-4 for images, 2e-5 for text.")
    ] = None,
    seeds: Annotated[int | None, compared(help="Of a comparison, at least 5. Default: 5.")] = None,
    labels: Annotated[
        int | None,
        compared(help="Labelled examples that a seed of a comparison draws. Default: all.", min=2),
    ] = None,
    metric: Annotated[
        Literal["accuracy", "macro_f1"] | None,
        compared(help="That a comparison judges by. Default: accuracy."),
    ] = None,
    margin: Annotated[
        float | None, compared(help="Smallest difference that matters. Default: 0.01.")
    ] = None,
    text: Annotated[
        str | None,
        data(
            help="Column of tables that holds the text, or array of an .npz that holds the images."
        ),
    ] = None,
    labelled_text: Annotated[
        str | None,
        data(help="Column of labelled tables that holds the text. Default: that of --text."),
    ] = None,
    target: Annotated[str | None, data(help="Column of labelled tables to predict.")] = None,
    length: Annotated[int | None, data(help="Tokens of a row. Default: up to 128.", min=3)] = None,
    fit: Annotated[
        bool, data("--fit", help="Resize and convert images that the model does not read.")
    ] = False,
    precision: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Of products.")
    ] = "float32",
    seed: Annotated[
        int, typer.Option(help="Of splits, masks, orders and heads.", min=0, max=2**32 - 1)
    ] = 0,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    data_dir: Annotated[Path | None, data(help="Where data sets by name lie.")] = None,
    save_every: Annotated[
        float, typer.Option(help="Seconds between states on the disk.", min=0)
    ] = 30.0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show steps, FLOPs, sizes and a rough time; train and write nothing."
        ),
    ] = False,
) -> None:
    """Adapt a masked encoder to unlabelled data, and fine-tune it where there are labels."""
    from ... import io
    from ...adapt.asked import Asked
    from ...adapt.folder import check_out
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
            dry(asked, out, where)
        return
    check_out(asked, out)
    check_writable(out)
    with io.lease(out), quietly(), in_options():
        run(asked, out, where, save_every, repeat)
