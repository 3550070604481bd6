"""Optimizers on stacked tensors `[S, …]`: one step in place, with numbers of its own for each copy.

s holds [S] float64 numbers, t is the number of the step, from 1. Stacked tensors are large and
each pass over them costs, so that intermediate results are written over; the gradient is not ours
to write to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ALIGN, MANY, LARGE = 8, 32, 2**16

Numbers = dict[str, Tensor]


def column(number_S: Tensor, like: Tensor) -> Tensor:
    """One number per copy, to be multiplied with stacked tensors."""
    return number_S.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def _decayed(p: Tensor, g: Tensor, s: Numbers) -> Tensor:
    return g if "weight_decay" not in s else g + column(s["weight_decay"], p) * p


def _adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Numbers, t: Tensor) -> None:
    g = _decayed(p, g, s)
    square = g * g
    m.lerp_(g, column(1 - s["beta1"], p))
    v.lerp_(square, column(1 - s["beta2"], p))
    root = torch.sqrt(v, out=square).mul_(column((1 - s["beta2"] ** t) ** -0.5, p))
    root.add_(column(s["eps"], p))
    p.sub_(torch.div(m, root, out=root).mul_(column(s["lr"] / (1 - s["beta1"] ** t), p)))


def _adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, s: Numbers, t: Tensor) -> None:
    if "weight_decay" in s:
        p.mul_(column(1 - s["lr"] * s["weight_decay"], p))
    _adam(p, g, m, v, {name: n for name, n in s.items() if name != "weight_decay"}, t)


def _adagrad(p: Tensor, g: Tensor, total: Tensor, s: Numbers, t: Tensor) -> None:
    g = _decayed(p, g, s)
    root = total.addcmul_(g, g).sqrt().add_(column(s["eps"], p))
    p.sub_(torch.div(g, root, out=root).mul_(column(s["lr"], p)))


def _adadelta(p: Tensor, g: Tensor, square: Tensor, moved: Tensor, s: Numbers, t: Tensor) -> None:
    g, eps, weight = _decayed(p, g, s), column(s["eps"], p), column(1 - s["rho"], p)
    work = torch.addcmul(eps, g, g)
    square.lerp_(work, weight)
    # One root of the quotient for two roots: on a CPU they are what costs.
    delta = torch.div(moved, square, out=work).sqrt_().mul_(g)
    moved.lerp_(torch.addcmul(eps, delta, delta), weight)
    p.addcmul_(delta, column(s["lr"], p), value=-1)


def _sgd(p: Tensor, g: Tensor, m: Tensor, s: Numbers, t: Tensor) -> None:
    g, momentum = _decayed(p, g, s), column(s["momentum"], p)
    m.mul_(momentum).add_(g)
    ahead = column(s["nesterov"], p) > 0
    p.sub_(torch.where(ahead, g + momentum * m, m).mul_(column(s["lr"], p)))


# By name: options with torch's defaults, running averages per parameter, the step.
OPTIMIZERS: dict[str, tuple[dict[str, float], int, Callable[..., None]]] = {
    "adam": ({"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, 2, _adam),
    "adamw": ({"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, 2, _adamw),
    "adagrad": ({"eps": 1e-10}, 1, _adagrad),
    "adadelta": ({"rho": 0.9, "eps": 1e-6}, 2, _adadelta),
    "sgd": ({"momentum": 0.0, "nesterov": 0.0}, 1, _sgd),
}


# Adadelta's averages are used with eps added: they hold it from the start, a pass less for each.
START = {"adadelta": "eps"}


class Stacked:
    """Parameters `[S, …]` of one dtype in one tensor `[S, P]`, and what their optimizer remembers.

    One tensor, because a step over many small ones is all launches. On a CPU, where a pass over
    large ones costs more, they are updated one by one, laid out as their gradients are: a matrix
    product gives them transposed, and a copy would turn them.
    """

    def __init__(
        self, params: dict[str, Tensor], grads: dict[str, Tensor], optimizer: str, numbers: Numbers
    ) -> None:
        _, moments, self.update = OPTIMIZERS[optimizer]
        size = sum(p.numel() for p in params.values())
        self.apart = not grads[next(iter(params))].is_cuda and size > LARGE * len(params)
        like = {name: grads[name] if self.apart else p for name, p in params.items()}
        flat, self.params = _side_by_side(like)
        own = [_side_by_side(like) for _ in range(moments)]
        # What is updated at once: a tensor and its running averages.
        self.parts = [*zip(*(views.values() for views in (self.params, *(v for _, v in own))))]
        if not self.apart:
            self.parts = [(flat, *(average for average, _ in own))]
            self.grad, self.slots = _side_by_side(like)
            self.zeros = flat.new_zeros(len(flat), ALIGN)
        self.start_S = numbers[START[optimizer]] if optimizer in START else None
        self.reset()
        for name, p in params.items():
            self.params[name].copy_(p.detach())
            self.params[name].requires_grad_()

    def reset(self) -> None:
        """Forget all steps, in place, as a captured step needs it."""
        for _, *averages in self.parts:
            for average in averages:
                average.zero_()
                if self.start_S is not None:
                    average += column(self.start_S, average)

    def take(self, grads: dict[str, Tensor]) -> list[Tensor]:
        """The gradients `[S, …]` of the parameters, one for each part."""
        if self.apart:
            return [grads[name] for name in self.params]
        if self.grad.is_cuda and len(self.slots) > MANY:  # a few launches instead of one for each
            each = [grads[name].flatten(1) for name in self.slots]
            gaps = [self.zeros[:, : -t.shape[1] % ALIGN] for t in each]
            torch.cat([part for pair in zip(each, gaps) for part in pair], 1, out=self.grad)
        else:
            for name, slot in self.slots.items():
                slot.copy_(grads[name])
        return [self.grad]

    def step(self, grads: list[Tensor], numbers: Numbers, t: Tensor) -> None:
        """Update the parameters in place."""
        for g, (p, *averages) in zip(grads, self.parts):
            self.update(p, g, *averages, numbers, t)


def _side_by_side(like: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A tensor `[S, P]` with room for all, and the place of each in it, axes in its own order."""
    first = next(iter(like.values()))
    # Each starts at a multiple of ALIGN, as matrix products like it.
    widths = {name: -(-t[0].numel() // ALIGN) * ALIGN for name, t in like.items()}
    flat = first.new_zeros(len(first), sum(widths.values()), requires_grad=False)
    parts = zip(like.items(), flat.split(list(widths.values()), dim=1))
    return flat, {name: _laid_out(part, t) for (name, t), part in parts}


def _laid_out(part_SN: Tensor, like: Tensor) -> Tensor:
    """The first numbers of each row as a tensor like another, whose axes lie in the same order."""
    order = sorted(range(1, like.dim()), key=like.stride, reverse=True)
    shape = [len(like), *(like.shape[axis] for axis in order)]
    turned = part_SN[:, : like[0].numel()].view(shape)
    return turned.permute(0, *(1 + order.index(axis) for axis in range(1, like.dim()))).detach()
