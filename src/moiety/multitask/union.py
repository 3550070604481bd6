"""Several gates over the same experts: each expert is computed once for all tasks.

    y_GTD = mix(experts, x_TD, [routing of task 1, routing of task 2, …])

An expert runs on a token if any task has it active there (the union of the decisions); then every
task sums the answers with its own weights. Axis G: tasks (gates); U: slots of the union.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..experts import Experts, by_slot
from ..routing import Routing
from ..routing.value import in_vmap
from .together import one_row, stack_rows

# Experts that see all tokens and are no more than this run one after the other on a GPU, too: their
# products fill it, need no copy of the weights, and are no more launches than those of a batch.
FEW = 4


@dataclass(frozen=True)
class Work:
    """Who runs where, for all tasks together."""

    routing: Routing  # the union of the decisions; its weights are ones
    ids: Tensor | None = None  # on the CPU: just these experts run, on every token


def mix(
    experts: Experts, x_TD: Tensor, routings: Sequence[Routing], backend: str = "auto"
) -> Tensor:
    """`[G, T, out_dim]`: for each task the sum of expert outputs by its own gate."""
    rows = [one_row(r) for r in routings]
    weight_GTE = stack_rows([r.dense() for r in rows])
    return mix_weights(experts, x_TD, weight_GTE, choices(routings), routings, backend)


def mix_weights(
    experts: Experts,
    x_TD: Tensor,
    weight_GTE: Tensor,
    choice_GTE: Tensor,
    routings: Sequence[Routing],
    backend: str = "auto",
    work: Work | None = None,
) -> Tensor:
    """`mix` where weights and choices of all gates (and perhaps the work) are known already."""
    if backend == "dense" or (backend == "auto" and in_vmap()):
        y_UTD = experts.answers(x_TD, None, "dense")
    else:
        work = find_work(choice_GTE, routings) if work is None else work
        y_UTD, weight_GTE = _run(experts, x_TD, weight_GTE, work, backend)
    y_GTD = _sum(weight_GTE.to(y_UTD.dtype), y_UTD)
    base_TD = experts.always(x_TD)
    return y_GTD if base_TD is None else base_TD + y_GTD.to(base_TD.dtype)


def _run(
    experts: Experts, x_TD: Tensor, weight_GTE: Tensor, work: Work, backend: str
) -> tuple[Tensor, Tensor]:
    """The answers `[U, T, D]` of who is needed, and the weights `[G, T or 1, U]` for them."""
    union = work.routing
    if backend == "auto":
        # On a CPU, experts that see all tokens are fastest one after the other: they fill a core.
        by_turns = work.ids is not None and (x_TD.device.type == "cpu" or work.ids.numel() <= FEW)
        backend = "loop" if by_turns else experts.choose(x_TD, union)[0]
    if backend == "dense":
        return experts.answers(x_TD, None, "dense"), weight_GTE
    if work.ids is not None:
        ids = union.index[0]
        y_UTD = experts.answers(x_TD, work.ids if backend == "loop" else ids, backend)
        return y_UTD, weight_GTE.index_select(2, ids)
    plan = union.plan()
    y_UTD = by_slot(experts.rows(x_TD, plan, backend), plan).transpose(0, 1)
    index_GTU = union.index.expand(weight_GTE.shape[0], *union.index.shape)
    return y_UTD, weight_GTE.expand(-1, union.index.shape[0], -1).gather(2, index_GTU)


def _sum(weight_GTU: Tensor, y_UTD: Tensor) -> Tensor:
    if weight_GTU.shape[1] == 1 and y_UTD.shape[1] != 1:  # static: one matrix product for all
        return torch.einsum("gu,utd->gtd", weight_GTU[:, 0], y_UTD)
    return torch.einsum("gtu,utd->gtd", weight_GTU, y_UTD)


def choices(routings: Sequence[Routing]) -> Tensor:
    """`[G, T, E]` bool, or `[G, 1, E]` where all gates are static: who works for whom."""
    return stack_rows([one_row(r).choice() for r in routings])


def union_of(routings: Sequence[Routing]) -> Routing:
    """The pairs of token and expert that some task needs, as one decision.

    Where the host may look, it has just the slots it needs; else as many as the gates could ask
    for. The weights are ones.
    """
    return find_work(choices(routings), routings).routing


def find_work(choice_GTE: Tensor, routings: Sequence[Routing]) -> Work:
    """`union_of`, and the experts as the host knows them where they are the same for all tokens."""
    needed_TE = choice_GTE.any(0)
    rows, experts = needed_TE.shape
    looks = rows > 0 and can_look(needed_TE)
    static = all(r.by == "all" for r in routings)
    words: dict[str, Any] = {"experts": experts, "tokens": routings[0].tokens}
    if static and looks:
        ids = needed_TE[0].cpu().nonzero().flatten()
        if len(ids):  # every slot is needed: none is inactive
            index = ids[None].to(needed_TE.device)
            weight = torch.ones_like(index, dtype=torch.float)
            return Work(Routing(index=index, weight=weight, by="all", **words), ids)
    most = int(needed_TE.sum(1).max()) if looks else _most(routings)
    # Stable: experts stay in the order of their ids, the ones nobody needs come last.
    order_TE = torch.sort((~needed_TE).to(torch.uint8), dim=1, stable=True).indices
    index_TU = order_TE[:, : max(most, 1)]
    active_TU = needed_TE.gather(1, index_TU)
    by: Literal["token", "all"] = "all" if static else "token"
    weight = active_TU.float()
    return Work(Routing(index=index_TU, weight=weight, active=active_TU, by=by, **words))


def _most(routings: Sequence[Routing]) -> int:
    """The most experts that the gates could ask for on one token."""
    experts = routings[0].experts
    if any(r.by == "expert" for r in routings):
        return experts
    return min(experts, sum(r.index.shape[1] for r in routings))


def can_look(t: Tensor) -> bool:
    """Whether values may be read: not in compiled or vmapped code or while a graph is captured.

    On a GPU this waits for what is queued. One wait a call buys that rows nobody needs are never
    laid out, which for a binary static gate is most of them.
    """
    if torch.compiler.is_compiling() or in_vmap():
        return False
    return t.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
