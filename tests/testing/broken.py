"""Routers that each make one mistake of the kind users report, and the check that finds it."""

from __future__ import annotations

import weakref
from typing import Annotated, ClassVar

import torch

from moiety.routing import Opt, Routing
from moiety.routing.base import keep_real, masked_mean
from moiety.routing.capacity import limit
from moiety.routing.top_k import TopK


class NoiseInEval(TopK):
    """Choose by noisy scores, also in eval."""

    stochastic = True
    caught_by = "eval_is_deterministic"

    def scores(self, x_TD):
        scores = super().scores(x_TD)
        return scores + torch.randn_like(scores)


class DetachedGate(TopK):
    """Weigh by a gate that the task's gradient cannot reach; the losses still can."""

    caught_by = "weights_carry_a_gradient"

    def route(self, x_TD, mask, ids, group):
        r = super().route(x_TD, mask, ids, group)
        return r.replace(weight=r.weight.detach(), gate=r.gate.detach())


class TiesAtWill(TopK):
    """Give equal scores to whom it likes."""

    caught_by = "ties_go_to_the_lower_id"

    def route(self, x_TD, mask, ids, group):
        scores = self.scores(x_TD)
        index = torch.sort(scores.flip(-1), dim=-1, descending=True, stable=True).indices[
            :, : self.k
        ]
        index = self.experts - 1 - index
        return Routing.choose(
            index, scores.softmax(-1), renormalise=self.renormalise, scores=scores
        )


class WrongSum(TopK):
    """Declare that weights sum to one, and double them."""

    caught_by = "weights_sum_as_declared"

    def route(self, x_TD, mask, ids, group):
        r = super().route(x_TD, mask, ids, group)
        return r.replace(weight=2 * r.weight, scale=2.0)


class IgnoredOption(TopK):
    """Take a temperature, keep it, and forget it."""

    caught_by = "every_option_matters"

    def __init__(
        self, dim, experts, *, temperature: Annotated[float, Opt("of the softmax", 2.0, 0.01)] = 1.0
    ) -> None:
        super().__init__(dim, experts)
        self.register_buffer("temperature", torch.tensor(temperature))


class PooledLoss(TopK):
    """Give the losses the mean gate of all layers, where the collapse of one is diluted."""

    caught_by = "losses_are_per_layer"
    gates: ClassVar = weakref.WeakKeyDictionary()

    def route(self, x_TD, mask, ids, group):
        r = super().route(x_TD, mask, ids, group)
        if not self.training:
            return r
        self.gates[self] = masked_mean(r.probs, mask)
        # Other layers' gates count as they were, without their gradient.
        others = [g.detach() for layer, g in self.gates.items() if layer is not self]
        pooled_E = torch.stack([self.gates[self], *others]).mean(0)
        return r.replace(probs=pooled_E.expand_as(r.probs))


class PaddingTakesPlaces(TopK):
    """Limit the capacity without a look at the mask: padding on the left goes first."""

    caught_by = "padding_never_counts"

    def __init__(self, dim, experts) -> None:
        super().__init__(dim, experts, k=1)

    def route(self, x_TD, mask, ids, group):
        return limit(super().route(x_TD, mask, ids, group), 1.0, group=group)


class PaddingInPenalty(TopK):
    """Average a penalty over all tokens, padding among them."""

    caught_by = "padding_never_counts"

    def route(self, x_TD, mask, ids, group):
        r = super().route(x_TD, mask, ids, group)
        penalty = torch.special.entr(r.probs).sum(1).sum() / max(r.tokens, 1)
        return r.replace(penalties={"entropy": penalty})


class FalselyCausal(TopK):
    """Centre the scores over the whole batch, and say that no token sees a later one."""

    caught_by = "causal_as_declared"

    def scores(self, x_TD):
        scores = super().scores(x_TD)
        return scores - masked_mean(scores, None)


class HalfScores(TopK):
    """Replace the public call, and with it the switch that keeps routing out of autocast."""

    caught_by = "fp32_under_autocast"

    def forward(self, x_TD, mask=None, ids=None, group=None):
        self._check_input(x_TD, mask, ids)
        x_TD = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
        return keep_real(self.route(x_TD, mask, ids, group), mask)


class DeadParameter(TopK):
    """Learn a bias that never takes part."""

    caught_by = "gradients_reach_parameters"

    def __init__(self, dim, experts) -> None:
        super().__init__(dim, experts)
        self.bias = torch.nn.Parameter(torch.zeros(experts))


class CountsInEval(TopK):
    """Move a counter at every call, in eval too."""

    caught_by = "eval_is_deterministic"

    def __init__(self, dim, experts) -> None:
        super().__init__(dim, experts)
        self.register_buffer("calls", torch.zeros(()))

    def route(self, x_TD, mask, ids, group):
        self.calls += 1
        return super().route(x_TD, mask, ids, group)


class CountsTwice(CountsInEval):
    """Count training calls, and those that gradient checkpointing repeats as well."""

    caught_by = "recomputation_changes_nothing"

    def route(self, x_TD, mask, ids, group):
        self.calls += float(self.training)
        return TopK.route(self, x_TD, mask, ids, group)


BROKEN = (
    NoiseInEval,
    DetachedGate,
    TiesAtWill,
    WrongSum,
    IgnoredOption,
    PooledLoss,
    PaddingTakesPlaces,
    PaddingInPenalty,
    FalselyCausal,
    HalfScores,
    DeadParameter,
    CountsInEval,
    CountsTwice,
)
