"""`moiety upcycle`: give a saved dense model experts, and save it with the proof."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import filesize
from rich.console import Console

from ..report import Column

if TYPE_CHECKING:
    from torch import nn

    from ..hf.blocks import Block
    from ..hf.start import Start
    from ..hf.upcycle import Receipt

DTYPES = {"float32": 4, "bfloat16": 2}  # bytes of a number
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Init = Literal["copy", "noise", "reinit", "split", "low-rank"]


def command(
    model: Annotated[str, typer.Option(help="Folder of a saved model, or its id on the hub.")],
    out: Annotated[Path, typer.Option(help="Folder of the new model.")] = Path("out/upcycled"),
    experts: Annotated[int, typer.Option(min=1, help="Experts of a block.")] = 8,
    router: Annotated[str, typer.Option(help="Such as top-k, switch or cosine.")] = "top-k",
    k: Annotated[int | None, typer.Option(min=1, help="Experts a token.")] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            help='"last:4", "every:2", a pattern of module names or a position; may be repeated. '
            "All blocks, if not given."
        ),
    ] = None,
    init: Annotated[Init, typer.Option(help="How experts start from the dense block.")] = "copy",
    rank: Annotated[int | None, typer.Option(help="Of low-rank experts; 8.")] = None,
    shards: Annotated[int | None, typer.Option(help="Parts of a block, for split.")] = None,
    amount: Annotated[float | None, typer.Option(help="For noise and reinit.")] = None,
    capacity_factor: Annotated[float | None, typer.Option(help="Limit of an expert.")] = None,
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
    words = {"init": init, "rank": rank, "shards": shards, "amount": amount}
    if dry_run:
        with seeded(seed):
            plan(console, model, chosen, exact, allow_noncausal, (router, experts, options), words)
        return
    check_out(out, force)
    with seeded(seed, where):
        with step(console, f"Loading {model}"):
            loaded = load(model, dtype, where)
        with step(console, f"Upcycling {type(loaded).__name__} on {device}"):
            words = {**words, "exact": exact, "allow_noncausal": allow_noncausal, **options}
            proof = apply(loaded, experts=experts, router=router, layers=chosen, **words)
    with step(console, f"Saving to {out}"):
        save(loaded, model, out)
    tell(console, proof, out)


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


@contextmanager
def step(console: Console, what: str) -> Iterator[None]:
    """Say what is being done while it is done, and leave the line when it is."""
    with console.status(f"{what} …"):
        yield
    console.print(what, highlight=False, soft_wrap=True)


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
    from ..hf import loading, saving

    saving.save(model, out)
    for reader in (loading.load_tokenizer(name), loading.load_image_processor(name)):
        if reader is not None:
            reader.save_pretrained(out)


def tell(console: Console, proof: Receipt, out: Path) -> None:
    """The receipt as a table, and what to do next."""
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
    title = f"{len(proof.layers)} blocks, {proof.router}, start: {proof.init}"
    show(console, rows, columns, title)
    typer.echo(f"Relative change of the outputs on a probe: {proof.gap:.1e}\n")
    typer.echo("Train it like the dense model; its balance losses are part of outputs.loss:\n")
    typer.echo(f"    import moiety\n    model = moiety.load({str(out)!r})\n")
    typer.echo(f"See what its experts do:  moiety health --model {out} --data YOUR_DATA")


# -- a dry run: shapes, no weights -----------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """What a model takes."""

    parameters: int
    trainable: int
    active: int
    flops: float  # forward, a token

    def row(self, what: str) -> str:
        number = dict(zip(ROWS, (self.parameters, self.active, round(self.flops))))
        if what in number:
            return f"{number[what]:,d}"
        use, dtype = what.split(", ")
        # AdamW keeps two numbers for each that is trained, beside its gradient, all of one type.
        trained = 3 * self.trainable if use == "Training" else 0
        return filesize.decimal(DTYPES[dtype] * (self.parameters + trained))


ROWS = ("Parameters", "Active for a token", "Forward FLOPs a token")
MEMORY = tuple(f"{use}, {dtype}" for dtype in DTYPES for use in ("Weights", "Training"))


def plan(
    console: Console,
    name: str,
    layers: Any,
    exact: bool,
    allow_noncausal: bool,
    mixture: tuple[str, int, dict[str, Any]],
    words: dict[str, Any],
) -> None:
    """Show which blocks would be replaced, and what the model would take."""
    from ..hf.blocks import find_blocks
    from ..hf.causal import refuse_noncausal
    from ..hf.layers import select
    from ..hf.probe import make_probe
    from ..hf.start import Start
    from .demo import show

    with console.status(f"Looking at the shapes of {name} …"):
        model = hollow(name)
        inputs = make_probe(model)
        found = find_blocks(model, inputs)
        blocks = select(found, layers, model)
        start = Start(*mixture, **words, frozen=None)
        for block in blocks:
            start.check(block, exact)
        if not allow_noncausal:
            refuse_noncausal(model, inputs, blocks, start.empty(blocks[0]))
        sizes = {"Dense": dense_size(model, inputs, blocks)}
        sizes.update({i: size(model, blocks, s, sizes["Dense"]) for i, s in shaped(mixture, words)})
    router, experts, _ = mixture
    typer.echo(
        f"{type(model).__name__}: {len(blocks)} of its {len(found)} feed-forward blocks would get "
        f"{experts} experts each, behind router {router!r}:"
    )
    for block in blocks:
        typer.echo(f"  {describe(block)}")
    rows = [
        {"arm": what, **{n: s.row(what) for n, s in sizes.items()}} for what in (*ROWS, *MEMORY)
    ]
    columns = [Column("arm", "Cost"), *(Column(n, n) for n in sizes)]
    show(console, rows, columns, "What it would take")
    typer.echo(
        "Training: weights, gradients and the two states of AdamW, all of one type; activations "
        "come on top. With low-rank experts the dense blocks are frozen.\n"
        "Nothing was read but the config, and nothing written."
    )


def shaped(
    mixture: tuple[str, int, dict[str, Any]], words: dict[str, Any]
) -> Iterator[tuple[str, Start]]:
    """The start that is asked for, and low-rank beside it, as makers of layers without weights."""
    from ..hf.start import Start

    router, experts, options = mixture
    options = {**options, "balance": {}}  # losses are tried out on numbers, and there are none
    for init in dict.fromkeys((words["init"], "low-rank")):
        # Noise and new weights have the shapes of a copy.
        kind: Any = "copy" if init in ("noise", "reinit") else init
        rank = words["rank"] if words["init"] == init else None
        shards = words["shards"] if init == "split" else None
        yield init, Start(router, experts, options, kind, rank, shards, None, None)


def describe(block: Block) -> str:
    kind = "gated " if block.gated else ""
    what = f"{kind}{block.activation}" if block.activation else "a module of its own kind"
    return f"{block.name}  ({block.dim} to {block.hidden} to {block.dim}, {what})"


def hollow(name: str) -> Any:
    """The model with all its shapes and next to no memory.

    To find blocks it must run, so that its weights need values: each is an overlapping view of a
    few random numbers, in which no two rows are alike.
    """
    import torch
    import transformers
    from accelerate import init_empty_weights
    from torch import nn

    from ..hf.loading import load_config

    config = load_config(name)
    kind = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModel.from_config(config) if kind is None else kind(config)
    for module in model.modules():
        for word, p in list(module.named_parameters(recurse=False)):
            few = torch.randn(sum(p.shape)) / max(p.shape[-1:], default=1) ** 0.5
            thin = few.as_strided(p.shape, [1] * p.dim()) if p.dim() > 1 else 1 + few / 9
            setattr(module, word, nn.Parameter(thin))
    if isinstance(model, transformers.PreTrainedModel):
        model.tie_weights()
    return model.eval()


def dense_size(model: nn.Module, inputs: Any, blocks: list[Block]) -> Size:
    from .. import cost

    number = cost.parameters(model)
    flops = cost.forward_flops(lambda: inputs.run(model), model)
    return Size(number, number, number, flops / max(rows(b).shape[0] for b in blocks))


def size(model: Any, blocks: list[Block], start: Start, dense: Size) -> Size:
    """What the model takes with mixtures in place of its blocks; they are made without memory."""
    import torch

    from .. import cost
    from ..experts import LowRank
    from ..hf.place import dense_module, place, shape_of

    shapes, idle, flops = shape_of(model), 0.0, 0.0
    for block in blocks:
        x_TD, ids = rows(block), torch.arange(rows(block).shape[0])
        with torch.device("meta"):
            layer = start.layer(block, shapes)
        decides = start.empty(block).eval()
        with torch.no_grad():
            routing = decides.route(x_TD, ids=ids)
        experts, own = layer.experts, cost.parameters(layer.experts)
        flops += cost.forward_flops(lambda: decides.route(x_TD, ids=ids), decides)  # noqa: B023
        flops += experts.flops(routing)
        if isinstance(experts, LowRank):
            own -= cost.parameters(experts.base)
        else:
            block_itself = dense_module(model, block)
            flops -= cost.forward_flops(lambda: block_itself(x_TD), block_itself)  # noqa: B023
        slots = float(routing.load().sum()) / x_TD.shape[0]
        idle += own * (1 - slots / experts.experts)
        place(shapes, block, layer, shape_of(dense_module(model, block)))
    total = cost.parameters(shapes)
    tokens = max(rows(b).shape[0] for b in blocks)
    trainable = cost.parameters(shapes, trainable=True)
    return Size(total, trainable, round(total - idle), dense.flops + flops / tokens)


def rows(block: Block) -> Any:
    """What the block read on the probe, as tokens."""
    assert block.x is not None
    return block.x.reshape(-1, block.dim)
