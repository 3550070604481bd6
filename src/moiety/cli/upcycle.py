"""`moiety upcycle`: give a saved dense model experts, and save it with the proof."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import filesize
from rich.console import Console

from ..report import Column

if TYPE_CHECKING:
    from torch import nn

    from ..hf.plan import Plan, Size
    from ..hf.upcycle import Receipt

DTYPES = {"float32": 4, "bfloat16": 2}  # bytes of a number
OPTIONS = {
    'init="copy"': "--init copy",
    'init="low-rank"': "--init low-rank",
    "exact=False": "--no-exact",
    "allow_noncausal=True": "--allow-noncausal",
}
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Init = Literal["copy", "noise", "reinit", "split", "low-rank"]


def command(
    model: Annotated[str, typer.Option(help="Folder of a saved model, or its id on the hub.")],
    out: Annotated[Path, typer.Option(help="Folder of the new model.")] = Path("out/upcycled"),
    experts: Annotated[int, typer.Option(min=1, help="Experts of a block.")] = 8,
    router: Annotated[
        str, typer.Option(help="Such as top-k, cosine or softmax (with low-rank: any).")
    ] = "top-k",
    k: Annotated[int | None, typer.Option(min=1, help="Experts a token; most routers: 2.")] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            help='"last:4", "every:2", a pattern of module names or a position; may be repeated. '
            "All blocks, if not given."
        ),
    ] = None,
    init: Annotated[Init, typer.Option(help="How experts start from the dense block.")] = "copy",
    rank: Annotated[int | None, typer.Option(help="Rank of low-rank experts; 8.")] = None,
    shards: Annotated[int | None, typer.Option(help="Parts a block is split into; k.")] = None,
    amount: Annotated[
        float | None, typer.Option(help="How much noise (0.01) or reinit (0.5) changes.")
    ] = None,
    capacity_factor: Annotated[
        float | None,
        typer.Option(help="How many tokens an expert takes, relative to an even share; no limit."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Of router or layer, as name=value; may be repeated."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact/--no-exact", help="Refuse what changes the outputs.")
    ] = True,
    allow_noncausal: Annotated[
        bool, typer.Option("--allow-noncausal", help="Let a decoder's router see later tokens.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of the new weights; auto: as saved.")] = "auto",
    device: Annotated[str, typer.Option(help="Such as cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of routers and new weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder in use.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show blocks and cost; read no weights.")
    ] = False,
) -> None:
    """Replace feed-forward blocks of a dense model by experts; its outputs stay as they are."""
    from ..train import find_device, seeded

    where, console = find_device(device), Console()
    options = read_options(option or [])
    if k is not None:
        options["k"] = k
    if capacity_factor is not None:
        options["capacity_factor"] = capacity_factor
    chosen: Any = [int(w) if w.lstrip("-").isdigit() else w for w in layers or []] or None
    limits = {"layers": chosen, "exact": exact, "allow_noncausal": allow_noncausal}
    asked = {"router": router, "experts": experts, "init": init}
    asked |= {"rank": rank, "shards": shards, "amount": amount}
    refuse_same(model, out)
    if dry_run:
        from ..hf.plan import plan

        typer.echo(f"Looking at the shapes of {model} …")
        with seeded(seed), words_of_the_command():
            tell_plan(console, plan(model, asked, options, **limits), asked)
        return
    check_out(out, force)
    check_words(asked, options)
    with seeded(seed, where):
        typer.echo(f"Loading {model} …")
        loaded = load(model, dtype, where)
        typer.echo(f"Upcycling {type(loaded).__name__} on {device} …")
        with words_of_the_command():
            proof = apply(loaded, **asked, **limits, **options)
    typer.echo(f"Saving to {out} …")
    save(loaded, model, out)
    tell(console, proof, out, names_loss(loaded))


def refuse_same(model: str, out: Path) -> None:
    if Path(model).is_dir() and Path(model).resolve() == out.resolve():
        raise ValueError(f"--out {out} is the model itself, whose dense weights would be lost")


def check_words(asked: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise for a wrong router, option or start before any weights are read."""
    from ..hf.start import Start

    Start(**asked, options=options, frozen=None).try_out()


def names_loss(model: nn.Module) -> bool:
    """Whether the model has a head that computes a loss."""
    return "labels" in inspect.signature(model.forward).parameters


def read_options(given: list[str]) -> dict[str, Any]:
    """`["k=2", "renormalise=false"]` as words and values; a value that is no literal is a text."""
    from ..hf.upcycle import upcycle

    taken = inspect.signature(upcycle).parameters
    options = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--option takes name=value, got {each!r}")
        if name in taken:
            raise ValueError(f"{name} is no option of a router: give --{name.replace('_', '-')}")
        try:
            options[name] = ast.literal_eval(text.title() if text in ("true", "false") else text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def check_out(out: Path, force: bool) -> None:
    """Raise now, not after the work, if the folder cannot be written or holds something."""
    from .demo import check_writable

    if not force and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} exists and is not empty: choose another folder, or --force")
    check_writable(out)


@contextlib.contextmanager
def words_of_the_command() -> Iterator[None]:
    """Let advice that is written for Python name the options of this command instead."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        advice = str(error)
        for word, option in OPTIONS.items():
            advice = advice.replace(word, option)
        if advice == str(error):
            raise
        raise ValueError(advice) from error


def load(name: str, dtype: str, device: Any) -> nn.Module:
    import torch

    from ..hf.loading import load_any

    model = load_any(name)
    return model.to(device=device, dtype=getattr(torch, dtype, None))


def apply(model: nn.Module, **words: Any) -> Receipt:
    from ..hf.upcycle import receipt, upcycle

    return receipt(upcycle(model, inplace=True, **words))


def save(model: nn.Module, name: str, out: Path) -> None:
    """Write the model, and beside it what reads its input, so that the folder is complete."""
    from ..hf.saving import save

    save(model, out)
    for reader in readers(name):
        if reader is not None:
            reader.save_pretrained(out)


def readers(name: str) -> Iterator[Any]:
    """What the model has of a tokenizer, and a processor of images or sound."""
    from transformers import AutoFeatureExtractor

    from ..hf.loading import load_image_processor, load_tokenizer

    yield load_tokenizer(name)
    images = load_image_processor(name)
    yield images
    if images is None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            yield AutoFeatureExtractor.from_pretrained(name)


def tell(console: Console, proof: Receipt, out: Path, loss: bool) -> None:
    """The receipt as a table, and what to do next."""
    from ..hf.upcycle import counted
    from .demo import show

    pairs = {
        "Parameters": (proof.parameters_before, proof.parameters_after),
        "Active for a token": (proof.active_before, proof.active_after),
        "Forward FLOPs a token": (proof.flops_before, proof.flops_after),
    }
    rows = [
        {"arm": what, "before": round(a), "after": round(b), "ratio": b / a}
        for what, (a, b) in pairs.items()
    ]
    columns = [
        Column("arm", "Cost"),
        Column("before", "Dense", ",d"),
        Column("after", "Upcycled", ",d"),
        Column("ratio", "Ratio", ".2f"),
    ]
    title = f"{counted(len(proof.layers), 'block')}, {proof.router}, start: {proof.init}"
    show(console, rows, columns, title)
    typer.echo(f"Relative change of the outputs on a probe: {proof.gap:.1e}\n")
    if loss:
        typer.echo("Train it like the dense model; its balance losses are part of outputs.loss:\n")
        typer.echo(f"    import moiety\n    model = moiety.load({str(out)!r})\n")
    else:
        typer.echo("It has no head yet. Give it one, and its balance losses join outputs.loss:\n")
        typer.echo(
            "    import moiety.hf\n    from transformers import AutoModelForSequenceClassification"
        )
        typer.echo(
            "    model = AutoModelForSequenceClassification.from_pretrained("
            f"{str(out)!r}, num_labels=2)\n"
        )
    typer.echo(f"See what its experts do:  moiety health --model {out} --data YOUR_DATA")


# -- a dry run -------------------------------------------------------------------------------------


def tell_plan(console: Console, plan: Plan, asked: dict[str, Any]) -> None:
    """Which blocks would be replaced, and what the model would take."""
    from .demo import show

    typer.echo(
        f"{plan.model}: {len(plan.blocks)} of its {plan.found} feed-forward blocks would get "
        f"{asked['experts']} experts each, behind router {asked['router']!r}:"
    )
    for block in plan.blocks:
        kind = f"{'gated ' if block.gated else ''}{block.activation}"
        kind = kind if block.activation else "a module of its own kind"
        typer.echo(f"  {block.name}  ({block.dim} to {block.hidden} to {block.dim}, {kind})")
    figures = {name: figures_of(size) for name, size in plan.sizes.items()}
    rows = [
        {"arm": what, **{name: own[what] for name, own in figures.items()}}
        for what in figures["dense"]
    ]
    columns = [Column("arm", "Cost"), *(Column(name, name, ",d") for name in figures)]
    show(console, rows, columns, "What it would take")
    typer.echo(
        "Training: weights, gradients and the two states of AdamW, all of one type; activations "
        "come on top. With low-rank experts the dense blocks are frozen.\n"
        "Nothing was read but the config, and nothing written."
    )


def figures_of(size: Size) -> dict[str, int | str]:
    """The figures of a model by what they count; bytes in units that read well."""
    memory = {}
    for dtype, width in DTYPES.items():
        memory[f"Weights, {dtype}"] = filesize.decimal(size.weights(width))
        memory[f"Training, {dtype}"] = filesize.decimal(size.training(width))
    return {
        "Parameters": size.parameters,
        "Active for a token": size.active,
        "Forward FLOPs a token": round(size.flops),
        **memory,
    }
