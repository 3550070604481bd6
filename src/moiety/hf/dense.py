"""`to_dense`: an upcycled model becomes an ordinary dense one again.

dense = moiety.to_dense(model)                        # the mean of every block's experts
print(moiety.receipt(dense))                          # how far the outputs moved
dense.save_pretrained("dir")                          # transformers loads it alone
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from .. import cost
from ..experts import FeedForward, LowRank, ModuleExperts
from ..watch import Routes, watch
from .place import Dense, Mixed, mixtures, put
from .probe import gap, make_probe
from .transformers_hook import METHOD

By = Literal["average", "usage", "most-used"]


@dataclass(frozen=True)
class DenseReceipt:
    """What the way back changed, measured on a probe."""

    gap: float  # as in `Receipt`
    parameters_before: int
    parameters_after: int
    by: str  # "base" where the experts were low-rank corrections
    layers: list[str]

    def __str__(self) -> str:
        made = f"by={self.by!r}"
        if self.by == "base":
            made = "the base of low-rank experts; their corrections are left out"
        lines = [
            f"{len(self.layers)} blocks, dense again: {made}",
            f"  relative output gap   {self.gap:.2e}",
            f"  parameters            {self.parameters_before:,} -> {self.parameters_after:,}",
        ]
        return "\n".join(lines)


def to_dense(
    model: nn.Module,
    by: By = "average",
    routes: Routes | None = None,
    probe: Any = None,
    inplace: bool = False,
) -> nn.Module:
    """Turn every mixture of an upcycled model back into the dense block that it was.

    by       "average"    the plain mean of a block's experts
             "usage"      their mean, each weighted by its share of the work
             "most-used"  the one with most work (after init="split": of each part of the block)
    routes   of `moiety.watch`, which say how much each expert worked; None: measured on the probe
    probe    inputs to measure with, as for `upcycle`; None: made from the config

    Right after upcycling this is the dense model; later it is a start for training, and
    `receipt(model)` says how far the outputs moved. Low-rank experts leave their base: a correction
    that depends on the token cannot be folded into one block.
    """
    layers = dict(mixtures(model)) if isinstance(model, nn.Module) else {}
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no mixture that upcycle made")
    _check(layers, by, routes)
    inputs = make_probe(model, probe)
    size = cost.parameters(model)
    with watch(model) as measured:
        before = inputs.outputs(model)
    shares = {
        n: _shares(n, m, by, measured if routes is None else routes) for n, m in layers.items()
    }
    if not inplace:
        model = copy.deepcopy(model, _only_read(layers))
    base = all(isinstance(m.moe.experts, LowRank) for m in layers.values())
    _warn_of_corrections(layers)
    _remove_traces(model)
    for name, mixed in list(mixtures(model)):
        _put_back(model, mixed, _merge(mixed, shares[name]))
        _restore_fused_path(model, name)
    moved = gap(before, inputs.outputs(model))
    words = "base" if base else by
    proof = DenseReceipt(moved, size, cost.parameters(model), words, list(layers))
    model._moiety_receipt = proof  # type: ignore[assignment]
    return model


def _warn_of_corrections(layers: dict[str, Mixed]) -> None:
    learned = [
        name
        for name, mixed in layers.items()
        if isinstance(mixed.moe.experts, LowRank) and bool(mixed.moe.experts.up.any())
    ]
    if learned:
        warnings.warn(
            f"what the low-rank experts of {', '.join(learned)} have learned is left out: only "
            "their base is a dense block (moiety.receipt says how far the outputs moved)",
            stacklevel=3,
        )


def _check(layers: dict[str, Mixed], by: str, routes: Routes | None) -> None:
    """Raise for what cannot be done, before anything is."""
    if by not in get_args(By):
        raise ValueError(f"by must be one of {', '.join(get_args(By))}, got {by!r}")
    if by == "average" and routes is not None:
        raise ValueError('routes say which experts worked: take by="usage" or by="most-used"')
    for name, mixed in layers.items():
        if by != "average" and isinstance(mixed.moe.experts, LowRank):
            raise ValueError(
                f"{name} has low-rank experts, of which only the base can stay, so that {by!r} "
                'means nothing: take by="average"'
            )
        if mixed.moe.shared is not None:
            raise ValueError(f"{name} has a shared expert, which its dense block cannot hold")
        lost = [] if not isinstance(mixed.moe.experts, FeedForward) else _not_kept(mixed)
        if lost:
            raise ValueError(f"{name} held {lost[0]}, which upcycling did not keep")


def _not_kept(mixed: Mixed) -> list[str]:
    """Weights of the dense block that belong to none of its linear maps."""
    was = mixed._was[0]
    linears = _linears(mixed.block, was)
    kept = {id(t) for m in linears for t in (*m.parameters(), *m.buffers())}
    named = (*was.named_parameters(), *was.named_buffers())
    return [name for name, t in named if id(t) not in kept]


# -- how much every expert counts ------------------------------------------------------------------


def _shares(name: str, mixed: Mixed, by: str, routes: Routes) -> Tensor:
    """[P, E]: what each expert adds to each of the P parts of the block; rows sum to one.

    P is one, except after init="split", where expert e holds part e mod P.
    """
    experts, families = mixed.moe.experts, mixed.moe.router.families
    parts = mixed.block.hidden // experts.hidden if isinstance(experts, FeedForward) else 1
    first = torch.arange(experts.experts) if families is None else families.family.cpu()
    holds_PE = first % parts == torch.arange(parts)[:, None]
    work_E = torch.ones(experts.experts) if by == "average" else _load(f"{name}.moe", routes)
    work_PE = torch.where(holds_PE, work_E.double(), 0.0)
    idle = work_PE.sum(1, keepdim=True) == 0  # nobody worked on this part: all count alike
    work_PE = torch.where(idle, holds_PE.double(), work_PE)
    if by == "most-used":
        return F.one_hot(work_PE.argmax(1), experts.experts).double()
    return work_PE / work_PE.sum(1, keepdim=True)


def _load(name: str, routes: Routes) -> Tensor:
    try:
        return routes.load()[routes.find(name)].cpu()
    except KeyError:
        raise ValueError(f"routes hold no call of {name}: record them with this model") from None


def _mean(weights: Any, share_E: Tensor) -> Tensor:
    """Σ share_e · w_e, added up in at least fp32."""
    terms = [(float(s), w.detach()) for s, w in zip(share_E, weights, strict=True) if s]
    if len(terms) == 1:
        return terms[0][1].clone()
    wide = torch.promote_types(terms[0][1].dtype, torch.float32)
    total = torch.zeros_like(terms[0][1], dtype=wide)
    for s, w in terms:
        total.add_(w.to(wide), alpha=s)
    return total.to(terms[0][1].dtype)


# -- one block -------------------------------------------------------------------------------------


def _merge(mixed: Mixed, share_PE: Tensor) -> nn.Module:
    """The dense block with the weights that stand for its experts."""
    experts, was = mixed.moe.experts, mixed._was[0]
    if isinstance(experts, LowRank):
        flags = dict(was.named_parameters())
        for name, p in experts.base.named_parameters():
            if name in flags:  # freezing was for the corrections' sake
                p.requires_grad_(flags[name].requires_grad)
        return experts.base
    if isinstance(experts, ModuleExperts):
        return _mean_module(experts, share_PE[0])
    assert isinstance(experts, FeedForward)
    _fill(mixed, experts, share_PE)
    return was


def _mean_module(experts: ModuleExperts, share_E: Tensor) -> nn.Module:
    dense = copy.deepcopy(experts.members[int(share_E.argmax())])
    members = [dict((*m.named_parameters(), *m.named_buffers())) for m in experts.members]
    for name, value in (*dense.named_parameters(), *dense.named_buffers()):
        if value.is_floating_point():  # a counter is that of the expert with the largest share
            value.data.copy_(_mean([m[name] for m in members], share_E))
    return dense


def _fill(mixed: Mixed, experts: FeedForward, share_PE: Tensor) -> None:
    """Give the linear maps of the dense block their weights: the parts' means, joined."""
    block, parts = mixed.block, share_PE.shape[0]
    w_in = _join([_mean(experts.w_in, s) for s in share_PE], block.gated, block.swapped)
    # An expert that is one part of the block answers for all of them.
    w_out = torch.cat([_mean(experts.w_out, s) / parts for s in share_PE], 1)
    b_in = b_out = None
    if experts.b_in is not None and experts.b_out is not None:
        b_in = _join([_mean(experts.b_in, s) for s in share_PE], block.gated, block.swapped)
        b_out = _mean(experts.b_out, share_PE.mean(0))
    *inner, outer = _linears(block, mixed._was[0])
    rows = [m.weight.shape[1 if isinstance(m, Conv1D) else 0] for m in inner]
    biases = [None] * len(inner) if b_in is None else b_in.split(rows)
    for linear, w, b in zip(inner, w_in.split(rows), biases, strict=True):
        _set(linear, w, b)
    _set(outer, w_out, b_out)


def _join(parts: list[Tensor], gated: bool, swapped: bool) -> Tensor:
    if not gated:
        return torch.cat(parts)
    halves = [torch.cat(h) for h in zip(*(p.chunk(2) for p in parts), strict=True)]
    return torch.cat(halves[::-1] if swapped else halves)


def _linears(block: Any, dense: nn.Module) -> list[Any]:
    """The inner maps of a dense block and its outer one."""
    if isinstance(dense, Dense):
        return [*dense.inner, dense.outer]
    return [
        dense.get_submodule(n.removeprefix(f"{block.owner}.")) for n in (*block.inner, block.outer)
    ]


def _set(linear: Any, w: Tensor, b: Tensor | None) -> None:
    w = w.t() if isinstance(linear, Conv1D) else w
    linear.weight = nn.Parameter(w.contiguous(), linear.weight.requires_grad)
    if linear.bias is not None:
        assert b is not None
        linear.bias = nn.Parameter(b.contiguous(), linear.bias.requires_grad)


# -- the model -------------------------------------------------------------------------------------


def _only_read(layers: dict[str, Mixed]) -> dict[int, Any]:
    """Weights that need no copy, since they are read and left behind; a base is kept."""
    experts = [m.moe.experts for m in layers.values() if not isinstance(m.moe.experts, LowRank)]
    return {id(p): p for e in experts for p in e.parameters()}


def _put_back(model: nn.Module, mixed: Mixed, dense: nn.Module) -> None:
    dense.train(mixed.training)
    names = {module: name for name, module in model.named_modules()}
    if not mixed._taps:
        put(model, names[mixed], dense)
        return
    assert isinstance(dense, Dense)
    for tap, linear in zip(mixed._taps, dense.inner, strict=True):
        put(model, names[tap], linear)
    put(model, names[mixed], dense.outer)


def _restore_fused_path(model: nn.Module, name: str) -> None:
    """torch's own encoder may read the linear maps' weights in eval again."""
    path = name.split(".")
    for depth in reversed(range(len(path))):  # an encoder asks its layers
        part: Any = model.get_submodule(".".join(path[:depth]))
        if isinstance(part, nn.TransformerEncoderLayer):
            act = part.activation
            relu, gelu = act is F.relu or isinstance(act, nn.ReLU), act is F.gelu
            gelu = gelu or isinstance(act, nn.GELU)
            part.activation_relu_or_gelu = 1 if relu else 2 if gelu else 0
        if isinstance(part, nn.TransformerEncoder):
            with warnings.catch_warnings():  # its constructor says why it takes the slow path
                warnings.simplefilter("ignore")
                like = nn.TransformerEncoder(part.layers[0], 0, None, part.enable_nested_tensor)
            part.use_nested_tensor = like.use_nested_tensor


_HOOKS = {  # and what torch knows about some of them besides
    "_forward_pre_hooks": ["_forward_pre_hooks_with_kwargs"],
    "_forward_hooks": ["_forward_hooks_with_kwargs", "_forward_hooks_always_called"],
    "_state_dict_pre_hooks": [],
    "_state_dict_hooks": [],
    "_load_state_dict_pre_hooks": [],
    "_load_state_dict_post_hooks": [],
}


def _remove_traces(model: nn.Module) -> None:
    """Take off whatever Moiety hooked to the model or wrote on it."""
    for module in model.modules():
        for word, notes in _HOOKS.items():
            hooks = getattr(module, word)
            for key in [key for key, hook in hooks.items() if _ours(hook)]:
                del hooks[key]
                for note in notes:
                    getattr(module, note).pop(key, None)
    for word in [word for word in vars(model) if word.startswith("_moiety_")]:
        delattr(model, word)
    config: Any = getattr(model, "config", None)
    words = getattr(config, "quantization_config", None)
    if _ours(words) or (isinstance(words, dict) and words.get("quant_method") == METHOD):
        del config.quantization_config


def _ours(thing: Any) -> bool:
    """Whether a hook or an object is Moiety's."""
    thing = getattr(thing, "hook", thing)  # torch wraps some of them
    owner = thing if hasattr(thing, "__name__") else type(thing)
    return owner.__module__.split(".")[0] == "moiety"
