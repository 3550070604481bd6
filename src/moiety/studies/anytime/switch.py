"""The causal Switch transformer of the language studies, and how a phase trains it.

model = SwitchTransformer(vocabulary=4096, length=256, dim=256, depth=4, heads=4, experts=4)
logits = model(tokens)                           # [B, L] -> [B, L, 4096]
learner("growing-switch", make, training=Schedule(batch=32, epochs=4))

Pre-norm blocks, learned positions, experts in every second block: top-1, capacity factor 1, balance
0.01 (Fedus et al. 2022; digest 4, section 4.4). A batch shares the capacity, in order: a token may
lose its place to one before it, in its own sequence or in another, never to a later one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...anytime.data import Examples
from ...anytime.fitting import METHODS, Fit, Training
from ...models.patch_transformer import Block, dense
from ...moe import MoE
from ...train.draws import step_seed
from ...train.graph import Graph, capture
from ..cosine.language import CausalAttention

WARM = 3  # steps before one is captured, for what libraries set up once


class SwitchTransformer(nn.Module):
    """Logits of the next token, `[B, L, V]`, from tokens `[B, L]`."""

    def __init__(
        self, *, vocabulary: int, length: int, dim: int, depth: int, heads: int, experts: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.randn(length, dim) * 0.1)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.blocks = nn.ModuleList(
            Block(dim, heads, switch(dim, experts) if number % 2 else dense(dim))
            for number in range(depth)
        )
        for block in self.blocks:
            block.attention = CausalAttention(dim, heads)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        # bf16 on a GPU; routers work in fp32 all the same, and so does the loss.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            h = self.embed(x) + self.position[: x.shape[1]]
            for block in self.blocks:
                h = block(h)
            return self.head(self.norm(h)).float()


def switch(dim: int, experts: int) -> MoE:
    """A Switch layer, whose experts are as wide as the dense part of a block."""
    return MoE(
        "switch",
        experts,
        dim=dim,
        hidden=4 * dim,
        activation=F.gelu,
        capacity_factor=1.0,
        jitter=0.0,
        balance={"switch": 0.01},
    )


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Schedule(Training):
    """AdamW with a linear warm-up, then a cosine down to nothing, in each phase.

    On a GPU a step is captured as a CUDA graph and repeated.
    """

    method: str = "adamw"
    score: Any = "loss"
    clip: float | None = 1.0
    min_gain: float = 0.0
    warmup: float = 0.1  # share of the steps of a phase

    def rate(self, step: int, steps: int) -> float:
        """The share of the learning rate in a step, counted from 1."""
        warm = max(round(self.warmup * steps), 1)
        if step <= warm:
            return step / warm
        return (1 + math.cos(math.pi * (step - warm) / (steps - warm + 1))) / 2

    def begin(
        self,
        model: nn.Module,
        train: Examples,
        validation: Examples,
        seed: int,
        carried: Mapping[str, Any] | None = None,
    ) -> Fit:
        return ScheduledFit(model, self, train, validation, seed, carried)


class ScheduledFit(Fit):
    """A training whose learning rate follows a schedule."""

    training: Schedule

    def __init__(self, model: nn.Module, *words: Any) -> None:
        super().__init__(model, *words)
        lr = self.training.lr
        self.usual: float = METHODS[self.training.method][1] if lr is None else lr
        self.graph: Graph | None = None
        self.taken = 0  # steps, since the training began or went on
        # Where a captured step can read it anew.
        self.lr = torch.tensor(self.usual, device=self.device)

    def _advance(self, rows: Tensor) -> None:
        self.step, self.taken = self.step + 1, self.taken + 1
        torch.manual_seed(step_seed(self.seed, self.step))
        self._set_rate(self.usual * self.training.rate(self.step, int(self.last)))
        rows = rows.to(self.device, non_blocking=True)  # the host goes on to the next step
        if self.device.type == "cuda" and self.taken == WARM + 1:
            self.graph = capture(self._update, rows, type(self.model).__name__)
        loss = None
        if self.graph and len(rows) == len(self.graph.rows):
            loss = self.graph.replay(rows)
        self.losses.append(self._update(rows) if loss is None else loss)

    def _set_rate(self, rate: float) -> None:
        self.lr.fill_(rate)
        captured = self.device.type == "cuda"
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr if captured else rate
            group["capturable"] = captured
