"""`Target`: a model as an attacker sees it: an input within bounds in, logits (and routes) out.

target = Target(model, normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
with target.at_rest():              # eval mode, no gradients of parameters; left as it was found
    logits = target(x).logits       # [B, C]
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from ..moe import MoE
from ..watch import Routes, watch
from .graph import Repeater

Normalize: TypeAlias = (
    tuple[float | Sequence[float], float | Sequence[float]] | Callable[[Tensor], Tensor] | None
)
Bounds: TypeAlias = tuple[float, float] | None


@dataclass(frozen=True, eq=False)
class Seen:
    """What one forward pass showed: logits `[B, C]` and, where asked for, the routes."""

    logits: Tensor
    routes: Routes | None = None


@dataclass(frozen=True, eq=False)
class Target:
    """A model to attack.

    normalize  (mean, std), numbers or one a channel, or a function of x: applied inside, so that
               eps and bounds speak of x itself
    call       (model, x) -> logits, where the model is not called with x alone; by default x goes
               to `pixel_values`, `inputs_embeds` or the first argument, by the model's signature
    watch      None, "choice" or "all" (with gradients): the routes that `Seen` carries
    """

    model: nn.Module
    _: dataclasses.KW_ONLY
    normalize: Normalize = None
    call: Callable[[nn.Module, Tensor], Any] | None = None
    watch: Literal["choice", "all"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            found = type(self.model).__name__
            raise ValueError(f"the model to attack must be a torch module, got {found}")
        if self.watch not in (None, "choice", "all"):
            raise ValueError(f'watch must be None, "choice" or "all", got {self.watch!r}')
        pair = isinstance(self.normalize, (tuple, list)) and len(self.normalize) == 2
        if self.normalize is not None and not callable(self.normalize) and not pair:
            raise ValueError(f"normalize must be (mean, std) or a function, got {self.normalize!r}")

    def __call__(self, x: Tensor) -> Seen:
        x = self._normalized(x)
        if self.watch is None:
            return Seen(self._logits(x))
        with watch(self.model, keep=self.watch) as routes:
            logits = self._logits(x)
        return Seen(logits, routes)

    def watching(self, keep: Literal["choice", "all"] | None) -> Target:
        """The same target, seen with these routes; asked again, the same object."""
        if keep == self.watch:
            return self
        if keep not in self._views:
            self._views[keep] = dataclasses.replace(self, watch=keep)
        return self._views[keep]

    @cached_property
    def _views(self) -> dict[str | None, Target]:
        return {}

    def forget(self) -> None:
        """Free the captured steps, which hold memory of the GPU until the collector comes."""
        for view in (self, *self._views.values()):
            view.__dict__.pop("repeater", None)

    @property
    def device(self) -> torch.device | None:
        """Where the model is; None: it has no tensor."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        return next((t.device for t in tensors), None)

    def _normalized(self, x: Tensor) -> Tensor:
        if callable(self.normalize):
            x = self.normalize(x)
        elif self.normalize is not None:
            mean, std = self._constants(x)
            x = (x - mean) / std
        own = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), x.dtype)
        return x.to(own)  # a model in half precision is attacked with steps in full precision

    def _constants(self, x: Tensor) -> tuple[Tensor, ...]:
        """Mean and std as x needs them; made once, since a captured step may copy no host data."""
        key = x.shape[1:2], x.dim(), x.dtype, x.device
        if key not in self._known:
            assert isinstance(self.normalize, Sequence)
            self._known[key] = tuple(_per_channel(v, x) for v in self.normalize)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Hashable, tuple[Tensor, ...]]:
        return {}

    def _logits(self, x: Tensor) -> Tensor:
        given = self.call(self.model, x) if self.call else self._plain(x)
        logits = getattr(given, "logits", given)
        if isinstance(logits, (tuple, list)) and logits:
            logits = logits[0]
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"the model returns {type(given).__name__}: give call=(model, x) -> logits [B, C]"
            )
        if logits.dim() == 3:  # of every position: the class is what follows the last one
            logits = logits[:, -1]
        if logits.dim() != 2 or logits.shape[0] != x.shape[0]:
            raise ValueError(
                f"logits must be [{x.shape[0]}, classes], got {list(logits.shape)}: give "
                "call=(model, x) -> logits"
            )
        return logits if logits.dtype == torch.float64 else logits.float()

    def _plain(self, x: Tensor) -> Any:
        return self.model(x) if self._word is None else self.model(**{self._word: x})

    @cached_property
    def _word(self) -> str | None:
        try:
            names = inspect.signature(self.model.forward).parameters
        except ValueError:  # a traced module has none
            return None
        return next((w for w in ("pixel_values", "inputs_embeds") if w in names), None)

    @cached_property
    def repeater(self) -> Repeater:
        """What repeats the steps of attacks; on a GPU it captures them."""

        def places() -> tuple[int | bool, ...]:
            own = itertools.chain(self.model.parameters(), self.model.buffers())
            return (self.model.training, *(t.data_ptr() for t in own))

        return Repeater(places, self._all_experts)

    @contextlib.contextmanager
    def _all_experts(self) -> Iterator[bool]:
        """Let layers that choose their backend compute all experts; whether there are any."""
        layers = [m for m in self.model.modules() if isinstance(m, MoE) and m.backend == "auto"]
        layers = [layer for layer in layers if "dense" in layer.experts.backends]
        try:
            for layer in layers:
                layer.backend = "dense"
            yield bool(layers)
        finally:
            for layer in layers:
                layer.backend = "auto"

    # -- left as found -------------------------------------------------------------------------

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[Target]:
        """Eval mode and parameters without gradients; the model and the RNG are put back after."""
        modes = [(m, m.training) for m in self.model.modules()]
        wanted = [(p, p.requires_grad) for p in self.model.parameters()]
        buffers = [(m, dict(m._buffers.items())) for m in self.model.modules()]
        values = [(b, b.detach().clone()) for b in self.model.buffers()]
        gpus = {t.device for t in (*self.model.parameters(), *self.model.buffers()) if t.is_cuda}
        try:
            self.model.eval()
            self.model.requires_grad_(False)
            with torch.random.fork_rng(devices=list(gpus)), torch.inference_mode(False):
                yield self
        finally:
            for module, training in modes:
                module.training = training
            for parameter, required in wanted:
                parameter.requires_grad_(required)
            for module, named in buffers:  # a forward may put another tensor in a buffer's place
                for name, buffer in named.items():
                    module._buffers[name] = buffer
            with torch.no_grad():
                for buffer, before in values:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)

    # -- checks --------------------------------------------------------------------------------

    def warn_training(self) -> None:
        """Say in one sentence that a model in train mode is attacked in eval mode."""
        if any(m.training for m in self.model.modules()):
            warnings.warn(
                "the model is in train mode: it is attacked in eval mode and left in train mode",
                stacklevel=_user_level(),
            )

    def check_logits(self, logits: Tensor, y: Tensor) -> None:
        """Raise unless these can be the logits of clean inputs with labels y."""
        wrong = logits.isnan().any(-1)
        if bool(wrong.any()):
            raise ValueError(
                f"the logits of {int(wrong.sum())} of {len(logits)} clean inputs are NaN: look at "
                "the model's weights and at normalize"
            )
        if logits.shape[-1] > 1 and _probabilities(logits):
            raise ValueError(
                "the model returns probabilities (no value below 0, rows sum to 1): give logits, "
                "as the gradient of a saturated softmax misleads every attack"
            )
        classes = logits.shape[-1]
        if y.dim() == 1 and not bool(((y >= 0) & (y < classes)).all()):
            raise ValueError(
                f"labels must be from 0 to {classes - 1} (the model has {classes} classes), got "
                f"{int(y.min())} to {int(y.max())}"
            )
        if y.dim() == 2 and y.shape[1] != classes:
            raise ValueError(f"y has {y.shape[1]} columns and the model {classes} classes")


def correct(logits: Tensor, y: Tensor) -> Tensor:
    """`[B]` bool: whether the top class is the label, or one of the labels (`y` `[B, C]`)."""
    top = logits.argmax(-1)
    return top == y if y.dim() == 1 else y.gather(1, top[:, None])[:, 0] > 0


def check_inputs(x: Tensor, y: Tensor, bounds: Bounds) -> None:
    """Raise unless x are inputs within bounds and y one label each (or a row of 0 and 1)."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
        found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be a float tensor [examples, ...], got {found}")
    if not bool(torch.isfinite(x).all()):
        raise ValueError("x holds NaN or infinite values: leave those examples out")
    if bounds is not None and x.numel():
        low, high = x.min().item(), x.max().item()
        if low < bounds[0] or high > bounds[1]:
            raise ValueError(
                f"x lies in [{low:.4g}, {high:.4g}], outside bounds {tuple(bounds)}: give x before "
                "normalisation with normalize=(mean, std), or other bounds"
            )
    _check_labels(x, y)


def _check_labels(x: Tensor, y: Tensor) -> None:
    if not isinstance(y, Tensor):
        raise ValueError(f"y must be a tensor of class ids, got {type(y).__name__}")
    if y.dim() not in (1, 2) or len(y) != len(x):
        raise ValueError(
            f"y must hold one label for each of {len(x)} examples, got shape {list(y.shape)}"
        )
    if y.dim() == 1 and (y.is_floating_point() or y.dtype == torch.bool):
        raise ValueError(f"y must hold whole numbers (class ids), got {y.dtype}: call y.long()")
    if y.dim() == 2 and not bool(((y == 0) | (y == 1)).all()):
        raise ValueError("y with a column for each class must hold 0 and 1 only")


def plain_inputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs without a graph, in full precision, and labels, as attacks and losses take them."""
    with torch.inference_mode(False):
        # Autograd refuses tensors of inference mode, though not their copies.
        x, y = (t.clone() if t.is_inference() else t.detach() for t in (x, y))
        half = x.dtype in (torch.float16, torch.bfloat16)
        return x.float() if half else x, y.long() if y.dim() == 1 else y


def _user_level() -> int:
    """The `stacklevel` of a warning in the caller that shows the line outside this package."""
    package = __name__.rpartition(".")[0]
    frames = traceback.walk_stack(inspect.currentframe())
    names = (frame.f_globals.get("__name__", "") for frame, _ in frames)
    return sum(1 for _ in itertools.takewhile(lambda name: name.startswith(package), names))


def _probabilities(logits: Tensor) -> bool:
    sums = logits.sum(-1)
    return bool((logits >= 0).all() & ((sums - 1).abs() < 1e-3).all())


def _per_channel(value: float | Sequence[float], x: Tensor) -> Tensor:
    """A number, or one for each channel: the second axis of x, of a table the columns."""
    t = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if t.dim() == 1 and len(t) not in (1, x.shape[1]):
        raise ValueError(
            f"normalize has {len(t)} numbers and x, of shape {list(x.shape)}, {x.shape[1]} "
            "channels: give one number, or one for each"
        )
    return t.view(-1, *[1] * (x.dim() - 2)) if t.dim() == 1 else t
