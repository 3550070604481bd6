"""RecAdam: AdamW that first recalls the initial weights and then, more and more, learns the task.

Chen et al. 2020 (arXiv 2004.12651), as their code has it. With l(t) = 1 / (1 + exp(-k (t - t0))):

    w <- w - lr l(t) m / (sqrt(v) + eps)              the step of Adam on the task's loss
    w <- w - lr (1 - l(t)) strength (w - w0)          the pull back to the initial weights

The pull is decoupled: the moments m and v never see it. Weights that have no w0, of a fresh head,
are updated as by AdamW.

    optimizer = RecAdam(groups, lr=2e-5, k=0.1, t0=250)       # groups as for AdamW
    groups = [{"params": encoder, "recall": True}, {"params": head}]

t0 = -inf makes l(t) = 1: AdamW to the last bit. With a learning rate that is a tensor the count of
steps is one too, so that a step asks nothing of the host, and can be repeated as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class RecAdam(torch.optim.AdamW):
    """AdamW with annealed recall in groups that say `recall=True`, of their weights as they are.

    k           how fast recall gives way to learning
    t0          the step, counted from 1, at which both weigh the same
    strength    of the pull, gamma in the paper; lr times strength is at most 1
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        k: float = 0.1,
        t0: float = 250.0,
        strength: float = 5000.0,
        **adamw: Any,
    ) -> None:
        if not (k > 0 and strength >= 0):
            raise ValueError(f"k must be positive and strength at least 0, got {k} and {strength}")
        super().__init__(params, **adamw)
        self.k, self.t0, self.strength = k, t0, strength
        rate = self.param_groups[0]["lr"]
        self.taken: int | Tensor = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0
        for group in self.param_groups:
            group.setdefault("recall", False)
            # With room for the rounding of a rate that is a tensor.
            if group["recall"] and float(group["lr"]) * strength > 1 + 1e-6:
                raise ValueError(
                    f"a strength of {strength:g} at a learning rate of {group['lr']:g} would jump "
                    f"past the initial weights; give at most {1 / group['lr']:g}"
                )
        recalled = (p for group in self.param_groups if group["recall"] for p in group["params"])
        self.initial: dict[Tensor, Tensor] = {p: p.detach().clone() for p in recalled}

    def learning(self, t: int | Tensor) -> float | Tensor:
        """l(t), the weight of the task at a step."""
        if isinstance(t, Tensor):
            return torch.sigmoid(self.k * (t - self.t0))
        # exp overflows where l(t) is 0 to the last bit.
        return 1 / (1 + math.exp(min(-self.k * (t - self.t0), 700.0)))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.taken += 1
        learned = self.learning(self.taken)
        kept = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        for group in self._recalling():
            if group["weight_decay"]:  # in full, as AdamW does, whatever the task weighs
                torch._foreach_mul_(_moved(group), 1 - group["lr"] * group["weight_decay"])
            group["lr"], group["weight_decay"] = group["lr"] * learned, 0.0
        try:
            super().step()
        finally:
            for group, (lr, decay) in zip(self.param_groups, kept):
                group["lr"], group["weight_decay"] = lr, decay
        for group in self._recalling():
            pull = group["lr"] * (1 - learned) * self.strength
            if isinstance(pull, Tensor) or pull:
                moved = _moved(group)
                away = torch._foreach_sub(moved, [self.initial[p] for p in moved])
                torch._foreach_mul_(away, pull)
                torch._foreach_sub_(moved, away)
        return loss

    def _recalling(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["recall"] and _moved(group)]

    # -- states ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As AdamW's, with the count of steps; the initial weights are those of the start."""
        return {**super().state_dict(), "taken": int(self.taken)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; this optimizer was made on the initial weights."""
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "taken"})
        if isinstance(self.taken, Tensor):
            self.taken.fill_(state_dict["taken"])
        else:
            self.taken = state_dict["taken"]


def _moved(group: dict[str, Any]) -> list[Tensor]:
    """The weights of a group that have a gradient; AdamW leaves the others alone too."""
    return [p for p in group["params"] if p.grad is not None]
