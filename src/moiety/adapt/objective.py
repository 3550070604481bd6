"""What a step of adaptation minimises: L = mae_weight · L_MAE + distill_weight · L_Distill.

Lee et al., Self-Distillation for Further Pre-training of Transformers (ICLR 2023), eq. 2 and 3:

    objective = Objective(match="cls")
    target = objective.target(teacher, batch, masks)              # unmasked input, no gradient
    values = objective.backward(student, batch, masks, target)    # then one step of the optimizer

What `match` compares, student against teacher:

    cls         the class token after the last norm: squared error summed over features, mean over
                the batch (the authors' code)
    hidden      every real token in its own order: summed over features, mean over the real tokens
                of an example, mean over the batch (ours, for text)
    prediction  what both predict at the same masked places: squared error for patches, summed over
                a patch; KL(teacher || student) for words; mean over places. The one that also
                reaches the decoder
    weights     the encoder's parameters: their squared distance, or with norm="mars" the largest
                row sum of |W − U| of each parameter, summed
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from .mars import row_sum
from .masks import mean_over_masked
from .mixtures import balance_losses, gates, probs_of, routing_error, uncounted

if TYPE_CHECKING:
    from .encoders import Batch, Encoder, Masked

Match = Literal["hidden", "cls", "prediction", "weights"]
Norm = Literal["l2", "mars"]


@dataclass(frozen=True)
class Target:
    """What a teacher asks of a batch, without gradient."""

    values: Tensor | None = None  # [B, L, D], [B, D], or predictions at the masked places
    weights: dict[str, Tensor] = field(default_factory=dict)  # of the encoder, by name
    probs: list[Tensor] = field(default_factory=list)  # [T, E] of each router, call by call


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which terms a step has, and how much each counts.

    distill_every   every so many steps has the second term, which then counts as many times: its
                    mean over the steps stays what it is
    match_routing   weight of KL(teacher || student) between the routers of a mixture on the
                    unmasked input, mean over real tokens, summed over layers
    """

    match: Match = "hidden"
    mae_weight: float = 1.0
    distill_weight: float = 1.0
    distill_every: int = 1
    match_routing: float = 0.0
    norm: Norm = "l2"

    def __post_init__(self) -> None:
        for name, kinds in (("match", Match), ("norm", Norm)):
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        for name in ("mae_weight", "distill_weight", "match_routing"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.distill_every < 1:
            raise ValueError(f"distill_every must be at least 1, got {self.distill_every}")
        if not self.mae_weight and not self.distill_weight:
            raise ValueError("mae_weight and distill_weight are both 0: nothing would be learnt")
        if self.norm != "l2" and self.match != "weights":
            raise ValueError(f"norm is that of match='weights', and match is {self.match!r}")
        if self.match_routing and not (self.represents and self.distill_weight):
            raise ValueError(
                "match_routing compares routers on the unmasked input: it needs match='cls' or "
                "'hidden' and a distill_weight above 0"
            )

    @property
    def represents(self) -> bool:
        """Whether the second term runs the encoders on unmasked input."""
        return self.match in ("hidden", "cls")

    def distills(self, step: int) -> bool:
        """Whether a step, counted from 0, has the second term."""
        return self.distill_weight > 0 and step % self.distill_every == 0

    # -- the teacher ---------------------------------------------------------------------------

    @torch.no_grad()
    def target(self, teacher: Encoder, batch: Batch, masks: Tensor) -> Target:
        """What a teacher in eval mode asks of a batch."""
        if self.match == "weights":
            return Target(weights={n: p.detach() for n, p in teacher.trunk.named_parameters()})
        if self.match == "prediction":
            return Target(values=teacher.masked(batch, masks).predictions)
        with gates(teacher.model, self.match_routing > 0) as routings:
            values = self.pick(teacher.represent(batch).features)
        return Target(values=values, probs=[probs_of(routing) for routing in routings])

    def pick(self, features_BLD: Tensor) -> Tensor:
        """The part of a representation that is compared."""
        return features_BLD[:, 0] if self.match == "cls" else features_BLD

    # -- the student ---------------------------------------------------------------------------

    def backward(
        self,
        student: Encoder,
        batch: Batch,
        masks: Tensor,
        target: Target | None = None,
        half: bool = False,
    ) -> dict[str, Tensor]:
        """Add the gradients of one step, and tell the terms before their weights.

        Without a target the step has the masked term alone; `half`: products in bfloat16. One
        backward pass for each of the two, as in the authors' code: both graphs need not be in
        memory at once.
        """
        told: dict[str, Tensor] = {}
        for loss in self._terms(student, batch, masks, target, half, told):
            loss.backward()
        return told

    def loss(
        self,
        student: Encoder,
        batch: Batch,
        masks: Tensor,
        target: Target | None = None,
        half: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What `backward` adds the gradients of, in one, and the terms before their weights."""
        told: dict[str, Tensor] = {}
        terms = [*self._terms(student, batch, masks, target, half, told)]
        return torch.stack(terms).sum(), told

    def _terms(
        self,
        student: Encoder,
        batch: Batch,
        masks: Tensor,
        target: Target | None,
        half: bool,
        told: dict[str, Tensor],
    ) -> Iterator[Tensor]:
        """The losses of a step, each made when it is asked for."""
        words = student.device.type, torch.bfloat16, half
        predicts = target is not None and self.match == "prediction"
        if self.mae_weight or predicts:
            with torch.autocast(*words):
                loss = self._masked(student, batch, masks, target if predicts else None, told)
            yield loss
        if target is not None and not predicts:
            # The balance of experts belongs to the masked pass: that of this one is left, both as
            # losses and as counts, unless there is no other. Counts are put back when the loss was
            # used: a backward pass may run the layers again.
            with uncounted(student.model) if self.mae_weight else nullcontext():
                with torch.autocast(*words):
                    loss = self._distilled(student, batch, target, told)
                yield loss

    def _masked(
        self,
        student: Encoder,
        batch: Batch,
        masks: Tensor,
        target: Target | None,
        told: dict[str, Tensor],
    ) -> Tensor:
        with balance_losses(student.model) as terms:
            if target is None:
                asked = student.masked_loss(batch, masks)
            else:
                masked = student.masked(batch, masks)
                asked = masked.loss
        told["masked"] = asked.detach()
        # Without a weight of its own the masked loss is left out, and the balance is not.
        first = asked if self.mae_weight else torch.zeros_like(asked)
        loss = (self.mae_weight or 1.0) * sum((t.to(asked.device) for t in terms), first)
        if target is not None:
            assert target.values is not None
            error = prediction_error(student.kind, masked, target.values)
            told["distill"] = error.detach()
            loss = loss + self.distill_weight * self.distill_every * error
        return loss

    def _distilled(
        self, student: Encoder, batch: Batch, target: Target, told: dict[str, Tensor]
    ) -> Tensor:
        if self.match == "weights":
            error = weight_error(student.trunk, target.weights, self.norm)
            told["distill"] = error.detach()
            return self.distill_weight * self.distill_every * error
        assert target.values is not None
        weighed = self.match_routing > 0
        with balance_losses(student.model) as terms, gates(student.model, weighed) as routings:
            made = student.represent(batch)
        error = representation_error(self.pick(made.features), target.values, made.real)
        told["distill"] = error.detach()
        loss = self.distill_weight * error
        if terms and not self.mae_weight:  # there is no masked pass to balance experts in
            loss = loss + torch.stack(terms).sum()
        if weighed:
            apart = routing_error(routings, target.probs)
            told["routing"] = apart.detach()
            loss = loss + self.match_routing * apart
        return self.distill_every * loss


# -- the distances -----------------------------------------------------------------------------


def representation_error(made: Tensor, wanted: Tensor, real_BL: Tensor) -> Tensor:
    """Eq. 3 for `[B, D]`, or for `[B, L, D]` with the real tokens of L."""
    gap = _exact(made) - _exact(wanted)
    if gap.dim() == 2:
        return gap.square().sum(-1).mean()
    # Selected before it is squared: nobody promises what stands at padding, and 0 · inf is no 0.
    return mean_over_masked(torch.where(real_BL[..., None], gap, 0.0).square().sum(-1), real_BL)


def prediction_error(kind: str, masked: Masked, wanted: Tensor) -> Tensor:
    """Between `[B, L, V]` predictions for the same masked places."""
    made, wanted = _exact(masked.predictions), _exact(wanted)
    if kind == "image":
        error_BL = (made - wanted).square().sum(-1)
    else:
        made, wanted = made.log_softmax(-1), wanted.log_softmax(-1)
        error_BL = (wanted.exp() * (wanted - made)).sum(-1)  # F.kl_div is slow under vmap
    return mean_over_masked(error_BL, masked.where)


def weight_error(trunk: nn.Module, wanted: dict[str, Tensor], norm: Norm) -> Tensor:
    """Between the parameters of two encoders."""
    # By name: many models are trained together with plain tensors in the place of parameters.
    gaps = [attrgetter(name)(trunk) - weight for name, weight in wanted.items()]
    if norm == "mars":
        return torch.stack([row_sum(_exact(g)) for g in gaps]).sum()
    return torch.stack([_exact(g).square().sum() for g in gaps]).sum()


def _exact(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))
