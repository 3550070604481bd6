"""`Routing`: what a router decided for T tokens and E experts.

The number of slots is a shape; whether a slot is used is data, so a GPU never waits for the host.
Three forms, told apart by `by`:

    "token"   index [T, K]   expert ids, K slots a token (top-k and its kin; dense gates have K = E)
    "expert"  index [E, C]   token ids, C slots an expert (expert choice)
    "all"     index [1, K]   expert ids, the same for every token (static gates)

Axes of the package: B batch, L length, T tokens, D model width, F hidden width, E experts,
K slots a token, C capacity, N rows (slots sorted by expert), S seeds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """The slots of a `Routing`, sorted by expert; rows of inactive slots come last.

    `ends_E[e]` is one past the last row of expert e. Rows past `ends_E[-1]` belong to nobody: a
    grouped product leaves uninitialised memory there, and nothing may read them.
    """

    slot_N: Tensor  # the slot (position in `index.flatten()`, or in its [T, K] form) of each row
    token_N: Tensor  # the token of each row; `tokens` for a row that belongs to nobody
    ends_E: Tensor  # int32
    tokens: int
    slots_per_token: int | None  # K where slots are laid out [T, K], None by expert
    full: bool  # every row belongs to somebody

    @property
    def rows(self) -> int:
        return self.slot_N.shape[0]

    def row_of_slot(self) -> Tensor:
        """The inverse of `slot_N`; only where no row was cut off."""
        row_N = torch.arange(self.rows, device=self.slot_N.device)
        return torch.empty_like(self.slot_N).scatter(0, self.slot_N, row_N)

    def bags(self) -> tuple[Tensor, Tensor]:
        """Rows in token order and the T + 1 places where each token's rows begin."""
        if self.full and self.slots_per_token is not None:
            starts = torch.arange(self.tokens + 1, device=self.slot_N.device) * self.slots_per_token
            return self.row_of_slot(), starts
        token_N, row_N = torch.sort(self.token_N, stable=True)
        ids = torch.arange(self.tokens + 1, device=token_N.device)
        return row_N, torch.searchsorted(token_N, ids)

    def used(self) -> Tensor:
        """`[N]` bool: rows that belong to somebody."""
        return torch.arange(self.rows, device=self.ends_E.device) < self.ends_E[-1]

    def expert_N(self) -> Tensor:
        """The expert of each row (rows of nobody: the last expert, never read)."""
        row_N = torch.arange(self.rows, device=self.ends_E.device, dtype=torch.int32)
        expert_N = torch.searchsorted(self.ends_E, row_N, right=True)
        return expert_N.clamp(max=self.ends_E.shape[0] - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Routing:
    """A routing decision. See the module's head for the three forms of `index`."""

    index: Tensor
    weight: Tensor  # as index, fp32, differentiable: the combine weight
    experts: int
    tokens: int
    by: Literal["token", "expert", "all"] = "token"
    active: Tensor | None = None  # bool, as index; False = not computed
    dropped: Tensor | None = None  # bool, as index; chosen, then cut by a capacity limit
    scores: Tensor | None = None  # [T, E] or [1, E], noise-free selection scores
    probs: Tensor | None = None  # [T, E] or [1, E], noise-free gate distribution (for the losses)
    gate: Tensor | None = None  # [T, E] or [1, E], the weight an expert has if chosen
    renormalise: bool = False  # chosen gate values are divided by their sum
    scale: float = 1.0  # chosen gate values are multiplied by this
    threshold: Tensor | None = None  # [T], the K-th largest noisy score (for the load loss)
    noise_std: Tensor | None = None  # scalar or [T, E], the noise behind it
    mask: Tensor | None = None  # [T] bool, real tokens
    lost: Tensor | None = None  # scalar, share of the weight cut by a slot limit
    penalties: dict[str, Tensor] = field(default_factory=dict)  # the router's own terms, unweighted

    @classmethod
    def choose(
        cls,
        index: Tensor,
        gate: Tensor,
        *,
        probs: Tensor | None = None,
        renormalise: bool = False,
        scale: float = 1.0,
        **fields: Any,
    ) -> Routing:
        """Make the `[T, K]` decision whose weights are the gate's values at `index`.

        The softmax over the chosen scores equals the softmax over all of them, renormalised over
        the chosen ones, so one rule covers both orders of selection and softmax.
        """
        weight = _weigh(gate, index, renormalise, scale)
        return cls(
            index=index,
            weight=weight,
            gate=gate,
            probs=gate if probs is None else probs,
            renormalise=renormalise,
            scale=scale,
            experts=fields.pop("experts", gate.shape[-1]),
            tokens=fields.pop("tokens", index.shape[0]),
            **fields,
        )

    def replace(self, **changes: Any) -> Routing:
        return dataclasses.replace(self, **changes)

    # -- what was decided ----------------------------------------------------------------------

    def by_token(self) -> Routing:
        """The `[T, K]` form of a static decision; any other is returned as it is."""
        if self.by != "all":
            return self
        shape = (self.tokens, self.index.shape[1])
        active = None if self.active is None else self.active.expand(shape)
        if self.mask is not None:
            real = self.mask[:, None].expand(shape)
            active = real if active is None else active & real
        index, weight = self.index.expand(shape), self.weight.expand(shape)
        return self.replace(index=index, weight=weight, active=active, by="token")

    def used(self) -> Tensor:
        """Bool, as `index` (by token for a static gate): slots worked on."""
        r = self.by_token()
        return torch.ones_like(r.index, dtype=torch.bool) if r.active is None else r.active

    def chosen(self) -> Tensor:
        """Bool, as `index` (by token for a static gate): slots chosen, dropped ones included."""
        r = self.by_token()
        return r.used() if r.dropped is None else r.used() | r.dropped

    def real_tokens(self) -> Tensor:
        """The number of tokens that are not padding."""
        if self.mask is None:
            # Not `torch.tensor`, whose copy to a GPU waits for all that is queued there.
            return torch.full((), self.tokens, device=self.index.device)
        return self.mask.sum()

    def dense(self) -> Tensor:
        """`[T, E]`: the combine weight of every expert for every token."""
        r = self.by_token()
        weight = r.weight if r.active is None else r.weight.masked_fill(~r.active, 0.0)
        if r.by == "token":
            return weight.new_zeros(self.tokens, self.experts).scatter(1, r.index, weight)
        # By expert: an unused slot may name a token that another slot of this expert uses.
        index = r.index if r.active is None else r.index.masked_fill(~r.active, self.tokens)
        out = weight.new_zeros(self.experts, self.tokens + 1).scatter(1, index, weight)
        return out[:, : self.tokens].t()

    def choice(self) -> Tensor:
        """`[T, E]` bool: which experts work for which token."""
        r = self.by_token()
        ones = dataclasses.replace(r, weight=r.used().to(torch.float32))
        return ones.dense() > 0

    def load(self) -> Tensor:
        """`[E]`: how many slots each expert works on (padding and dropped slots not counted)."""
        return self._count(dropped=False)

    def demand(self) -> Tensor:
        """`[E]`: how many slots each expert was chosen for, dropped ones included."""
        return self._count(dropped=True)

    def _count(self, dropped: bool) -> Tensor:
        r = self.by_token()
        used = r.chosen() if dropped else r.used()
        if r.by == "expert":
            return used.sum(1)
        zero = torch.zeros(self.experts, dtype=torch.long, device=r.index.device)
        # Integer sums are exact in any order, so this scatter is deterministic.
        return zero.scatter_add(0, r.index.flatten(), used.flatten().long())

    def drop_rate(self) -> Tensor:
        """Share of the chosen slots that capacity cut; by expert: share of tokens nobody chose."""
        if self.by == "expert":
            served = self.choice().any(1)
            if self.mask is not None:
                served = served | ~self.mask
            return (~served).sum() / self.real_tokens().clamp(min=1)
        if self.dropped is None:
            return torch.zeros((), device=self.index.device)
        return self.dropped.sum() / self.chosen().sum().clamp(min=1)

    # -- how the work is laid out ----------------------------------------------------------------

    def plan(self) -> Plan:
        """Sort the slots by expert, inactive ones last."""
        r = self.by_token()
        if r.by == "token":
            expert_NN = r.index.flatten()
            slots = torch.arange(expert_NN.shape[0], device=expert_NN.device)
            token = slots // max(r.index.shape[1], 1)
        else:
            ids = torch.arange(self.experts, device=r.index.device)
            expert_NN = ids[:, None].expand_as(r.index).flatten()
            token = r.index.flatten()
        if r.active is not None:
            expert_NN = expert_NN.masked_fill(~r.active.flatten(), self.experts)
        key_N, slot_N = torch.sort(expert_NN, stable=True)
        ids = torch.arange(self.experts, device=key_N.device)
        ends_E = torch.searchsorted(key_N, ids, right=True, out_int32=True)
        full = r.active is None
        if not full and readable(key_N):
            # Here the host may look: rows of nobody are cut off instead of carried along.
            rows = int(ends_E[-1])
            full = rows == slot_N.shape[0]
            key_N, slot_N = key_N[:rows], slot_N[:rows]
        token_N = token[slot_N]
        if not full:
            token_N = token_N.masked_fill(key_N == self.experts, self.tokens)
        k = r.index.shape[1] if r.by == "token" else None
        return Plan(slot_N, token_N, ends_E, self.tokens, k, full)

    # -- another's choice, no gradient -------------------------------------------------------------

    def chosen_by(self, other: Routing) -> Routing:
        """Take the other's choice with my own gate: what `replay` does."""
        if (other.tokens, other.experts) != (self.tokens, self.experts):
            raise ValueError(
                f"a choice for {other.tokens} tokens and {other.experts} experts cannot be taken "
                f"on {self.tokens} tokens and {self.experts} experts"
            )
        weight = other.weight
        if self.gate is not None:
            if other.by == "expert":
                gate = self.gate.expand(self.tokens, self.experts).t()
                weight = _weigh(gate, other.index, self.renormalise, self.scale)
            else:
                weight = _weigh(self.gate, other.index, self.renormalise, self.scale)
        return self.replace(
            index=other.index,
            weight=weight,
            by=other.by,
            active=other.active,
            dropped=other.dropped,
        )

    def detach(self) -> Routing:
        def cut(v: Any) -> Any:
            if isinstance(v, dict):
                return {k: t.detach() for k, t in v.items()}
            return v.detach() if isinstance(v, Tensor) else v

        return Routing(**{f.name: cut(getattr(self, f.name)) for f in dataclasses.fields(self)})


def _weigh(gate: Tensor, index: Tensor, renormalise: bool, scale: float) -> Tensor:
    rows = max(gate.shape[0], index.shape[0])
    weight = gate.expand(rows, -1).gather(1, index.expand(rows, -1))
    if renormalise:
        # The smallest normal number keeps 0/0 (all chosen gates underflowed) at zero.
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
    return weight * scale if scale != 1.0 else weight


def in_vmap() -> bool:
    """Whether this code runs, eagerly, under `torch.func.vmap`, at any depth."""
    if torch.compiler.is_compiling():  # the stack cannot be traced
        return False
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(i.key() == torch._C._functorch.TransformType.Vmap for i in stack)


def readable(t: Tensor) -> bool:
    """Whether the host can look at values without waiting: not on a GPU, compiled or vmapped."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling() and not in_vmap()
