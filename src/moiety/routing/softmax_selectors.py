"""Softmax selectors: DSelect-k's ablation gate, each selector a softmax over all the experts."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from .anneal import geometric, ramp, refuse_unused, step_of
from .base import Opt
from .registry import register
from .static import StaticLogits, facts, small_uniform
from .value import Routing

ANNEAL = {"mode": "anneal"}


@register(
    "softmax-selectors-static",
    paper="DSelect-k (Hazimeh et al. 2021), its ablation",
    equation="g = Σ_i softmax(α)_i softmax(γ⁽ⁱ⁾ / τ)",
)
class SoftmaxSelectors(StaticLogits):
    """Mix k softmax selectors over all experts, made one-hot by an entropy term or by annealing.

    A softmax has no exact zero, so every expert works. The `entropy` penalty is the sum over the
    selectors of h(p) = −Σ p log p; both modes report it, and only mode "entropy" asks for it.
    """

    calls: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Annotated[int, Opt("selectors", alt=3, low=1)] = 2,
        mode: Annotated[
            str,
            Opt(
                "what makes a selector one-hot: the entropy penalty or a falling temperature",
                alt="anneal",
                choices=("entropy", "anneal"),
            ),
        ] = "entropy",
        temperature: Annotated[float, Opt("τ, at the start if annealed", alt=0.1, low=1e-20)] = 1.0,
        temperature_end: Annotated[
            float | None,
            Opt("τ after the annealing; None: 1e-16", alt=1e-3, low=1e-20, given=ANNEAL),
        ] = None,
        anneal_steps: Annotated[
            int | None,
            Opt("training calls of the annealing; None: 1000", alt=2, low=1, given=ANNEAL),
        ] = None,
    ) -> None:
        super().__init__(dim, experts, k)  # weight = γ [E, k]: a row for each expert
        if mode == "entropy":
            refuse_unused(
                self.name,
                'mode="anneal"',
                temperature_end=temperature_end,
                anneal_steps=anneal_steps,
            )
        self.k, self.mode, self.temperature = k, mode, temperature
        self.temperature_end = 1e-16 if temperature_end is None else temperature_end
        self.anneal_steps = 1000 if anneal_steps is None else anneal_steps
        self.alpha = nn.Parameter(torch.empty(k))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        small_uniform(self.weight)
        small_uniform(self.alpha)

    def default_balance(self) -> dict[str, float]:
        return {"entropy": 0.01} if self.mode == "entropy" else {}

    @property
    def slots_per_token(self) -> int:
        return self.experts  # k selectors, each over all of them

    def diagnostics(self) -> dict[str, object]:
        gate_E, _ = self.mix(self.calls, self.weight.dtype)
        return facts(gate_E, torch.ones_like(gate_E, dtype=torch.bool))

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        self.check_scores(self.weight)
        gate_E, entropy = self.mix(step_of(self), x_TD.dtype)
        return self.whole(x_TD, gate_E, penalties={"entropy": entropy})

    def mix(self, step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The gate `[E]` and the summed entropy of its selectors."""
        temperature: Tensor | float = self.temperature
        if self.mode == "anneal":
            progress = ramp(step, self.anneal_steps, dtype)
            temperature = geometric(self.temperature, self.temperature_end, progress)
        scores_EK = self.weight.to(dtype) / temperature + self.shift.to(dtype)[:, None]
        log_p_EK = scores_EK.log_softmax(0)
        p_EK = log_p_EK.exp()
        gate_E = (p_EK * self.alpha.to(dtype).softmax(0)).sum(1)
        return gate_E, -(p_EK * log_p_EK).sum()
