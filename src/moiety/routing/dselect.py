"""What both forms of DSelect-k share: options, schedules, penalties and the decision.

Hazimeh et al. 2021. Axes besides the package's: K selectors (the slots are all E experts), M binary
digits, C = 2^M codes, of which E belong to experts; the others are orphans.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn

from .anneal import geometric, ramp, refuse_unused, step_of
from .base import Opt, Router, masked_mean, top_k
from .selector import code_order, digits, entropy_terms, selector
from .softmax import dense_routing
from .static import small_uniform
from .value import Routing

Selectors = Annotated[int, Opt("selectors; two may pick the same expert", alt=3, low=1)]
Width = Annotated[float, Opt("b: a digit is 0 below −b/2 and 1 above b/2", alt=2.0, low=1e-12)]
WidthEnd = Annotated[
    float | None,
    Opt("b after annealing; None: width / 100", alt=0.5, low=1e-12, given={"width_steps": 2}),
]
WidthSteps = Annotated[
    int, Opt("training calls in which b goes to width_end, evenly in log b; 0: never", alt=2, low=0)
]
Reach = Annotated[
    str,
    Opt(
        "reachability penalty. paper: the mass of orphan codes; code: 1 / the mass of the others",
        alt="code",
        choices=("paper", "code"),
    ),
]
EntropySteps = Annotated[
    int, Opt("training calls in which the entropy penalty rises from 0; 0: full", alt=2, low=0)
]
WarmSteps = Annotated[
    int,
    Opt("training calls in which one softmax over the experts is the gate; 0: none", alt=2, low=0),
]
Codes = Annotated[
    str,
    Opt(
        "an expert's code: its number, drawn, or its rank in the softmax of the warm_steps",
        alt="random",
        choices=("natural", "random", "ranked"),
    ),
]
Seed = Annotated[
    int | None, Opt("seed of random codes; None: 0", alt=1, low=0, given={"codes": "random"})
]
Slots = Annotated[
    int | None,
    Opt("largest weights kept a token, the rest told in Routing.lost; None: all", alt=2, low=1),
]


SETTLE = 100  # calls after a warm-up in which an optimizer's momentum may still move the order


class DSelect(Router):
    """What both forms share: all but where α and z come from."""

    entropy = "sum"
    calls: Tensor
    code: Tensor
    order: Tensor

    def __init__(
        self,
        dim: int,
        experts: int,
        *,
        k: Selectors = 2,
        width: Width = 1.0,
        width_end: WidthEnd = None,
        width_steps: WidthSteps = 0,
        reach: Reach = "paper",
        entropy_steps: EntropySteps = 0,
        warm_steps: WarmSteps = 0,
        codes: Codes = "natural",
        seed: Seed = None,
        slots: Slots = None,
    ) -> None:
        super().__init__(dim, experts)
        if width_steps == 0:
            refuse_unused(self.name, "width_steps > 0", width_end=width_end)
        if codes != "random":
            refuse_unused(self.name, 'codes="random"', seed=seed)
        if codes == "ranked" and warm_steps == 0:
            raise ValueError(f'{self.name}: codes="ranked" needs warm_steps > 0 to rank by')
        if slots is not None and slots > experts:
            raise ValueError(f"{self.name}: slots = {slots}, but there are only {experts} experts")
        self.k, self.width, self.width_steps = k, width, width_steps
        self.width_end = width_end
        self.reach, self.entropy_steps, self.codes, self.slots = reach, entropy_steps, codes, slots
        self.warm_steps = warm_steps
        self.digits = (experts - 1).bit_length()
        self.orphans = 2**self.digits - experts
        self.weights_sum = "at most one" if self.orphans or (slots or experts) < experts else "one"
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        # The first E are the experts' codes, the rest the orphans.
        self.register_buffer(
            "code", code_order(self.digits, seed or 0 if codes == "random" else None)
        )
        if codes == "ranked":
            self.register_buffer("order", self.code.clone())
        self.warm = nn.Parameter(torch.empty(experts)) if warm_steps else None
        self.make_parameters()
        self.reset_parameters()

    def make_parameters(self) -> None:
        raise NotImplementedError

    def logits(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """α `[T, K]` and z `[T, K, M]`; one row for a static gate."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Start with every digit near 1/2: one that is exactly 0 or 1 never learns again."""
        for name, parameter in self.named_parameters(recurse=False):
            small_uniform(parameter, float(self.width) / 100 if name.startswith("z") else 0.05)

    def default_balance(self) -> dict[str, float]:
        """The weights of the paper's code."""
        return {"entropy": 1e-6, **({"reachability": 1.0} if self.orphans else {})}

    @property
    def slots_per_token(self) -> int:
        return self.slots or self.experts  # k selectors, but until they are binary all experts

    def width_at(self, step: Tensor, dtype: torch.dtype) -> Tensor | float:
        if self.width_steps == 0:
            return self.width
        end = self.width / 100 if self.width_end is None else self.width_end
        return geometric(self.width, end, ramp(step, self.width_steps, dtype))

    def route(
        self, x_TD: Tensor, mask: Tensor | None, ids: Tensor | None, group: int | None
    ) -> Routing:
        return self.decide(x_TD, None if self.static else mask, step_of(self))

    def decide(self, x_TD: Tensor, mask: Tensor | None, step: Tensor) -> Routing:
        """The decision after so many training calls."""
        alpha_TK, z_TKM = self.logits(x_TD)
        r_TKC = selector(*digits(z_TKM, self.width_at(step, z_TKM.dtype)))
        if self.codes != "natural":
            r_TKC = r_TKC.gather(-1, self.codes_at(step).expand(r_TKC.shape))
        r_TKE = r_TKC[..., : self.experts]
        gate_TE = (alpha_TK.softmax(-1)[..., None] * r_TKE).sum(1)  # (6)
        # A softmax that underflows also makes a zero, but only a plateau makes a dead one.
        active_TE = (r_TKE.detach() > 0).any(1)
        penalties = self.penalties(r_TKC, mask, step)
        if self.warm is not None:
            warm = step < self.warm_steps
            gate_TE = torch.where(warm, self.warm.to(gate_TE.dtype).softmax(0), gate_TE)
            active_TE = active_TE | warm
            # Without a task's gradient they alone would decide where the digits go.
            penalties = {name: value * ~warm for name, value in penalties.items()}
        fields: dict[str, Any] = {
            "active": active_TE,
            "penalties": penalties,
            "by": "all" if self.static else "token",
            "tokens": x_TD.shape[0],
        }
        if self.slots is None:
            return dense_routing(gate_TE, **fields)
        return keep_largest(self.slots, gate_TE, mask, **fields)

    def codes_at(self, step: Tensor) -> Tensor:
        """`[C]`: the code of each expert, then the orphans.

        Ranked: the best experts of the warm-up get the codes 0, 1, 2, …, which share their high
        digits, so that a digit asks a question with an answer: better or worse experts? No gradient
        reaches `warm` after the warm-up, but weight decay does, which under Adam would shuffle it:
        the order is kept in a buffer, and soon stays.
        """
        if self.warm is None or self.codes != "ranked":
            return self.code
        rank_E = self.warm.detach().argsort(descending=True, stable=True).argsort()
        rank_C = torch.cat([rank_E, self.code[self.experts :]])
        order_C = torch.where(step <= self.warm_steps + SETTLE, rank_C, self.order)
        if self.training:
            self.order.copy_(order_C)
        return order_C

    def penalties(self, r_TKC: Tensor, mask: Tensor | None, step: Tensor) -> dict[str, Tensor]:
        """Ω over the experts' codes, and the mass on orphan codes; padding never counts."""
        r_TKE, orphan_TKC = r_TKC.split([self.experts, self.orphans], -1)
        entropy_T = entropy_terms(r_TKE).sum((1, 2))
        if self.entropy == "mean":
            entropy = masked_mean(entropy_T, mask)
        else:
            entropy = (entropy_T if mask is None else entropy_T.where(mask, 0.0)).sum()
        if self.entropy_steps > 0:
            entropy = entropy * ramp(step, self.entropy_steps, r_TKC.dtype)
        if self.reach == "paper":
            reach_TK = orphan_TKC.sum(-1)
        else:
            # All mass on orphans gives 1/0, and a gradient of 0 · ∞; the floor keeps both finite.
            floor = torch.finfo(r_TKC.dtype).eps ** 2
            reach_TK = 1 / r_TKE.sum(-1).clamp(min=floor)
        return {"entropy": entropy, "reachability": masked_mean(reach_TK.sum(1), mask)}


def keep_largest(
    slots: int, gate_TE: Tensor, mask: Tensor | None, *, active: Tensor, **fields: Any
) -> Routing:
    """Offer each token the experts with its largest weights; tell the share that is lost."""
    order_TE = top_k(gate_TE, gate_TE.shape[1])
    cut_T = gate_TE.detach().gather(1, order_TE[:, slots:]).sum(1)
    whole_T = gate_TE.detach().sum(1)
    tiny = torch.finfo(gate_TE.dtype).tiny
    lost = masked_mean(cut_T, mask) / masked_mean(whole_T, mask).clamp(min=tiny)
    index = order_TE[:, :slots]
    return Routing.choose(index, gate_TE, active=active.gather(1, index), lost=lost, **fields)
