"""Several gates over the same experts: each expert is computed once for all tasks.

    y_GTD = mix(experts, x_TD, [routing of task 1, routing of task 2, …])

An expert runs on a token if any task has it active there (the union of the decisions); then every
task sums the answers with its own weights. Axis G: tasks (gates); U: slots of the union.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..experts import Experts, by_slot
from ..routing import Routing
from ..routing.value import in_vmap


def mix(
    experts: Experts, x_TD: Tensor, routings: Sequence[Routing], backend: str = "auto"
) -> Tensor:
    """`[G, T, out_dim]`: for each task the sum of expert outputs by its own gate."""
    weight_GTE = weights(routings)
    work = union_of(routings)
    whole = work.by == "all" and work.active is None  # whoever works, works on every token
    if backend == "auto":
        # On a CPU, experts that see all tokens are fastest one after the other: they fill a core.
        by_turns = whole and x_TD.device.type == "cpu"
        backend = "loop" if by_turns else experts.choose(x_TD, work)[0]
    if backend == "dense":
        y_UTD = experts.answers(x_TD, None, "dense")
    elif whole:
        y_UTD = experts.answers(x_TD, work.index[0], backend)
        weight_GTE = weight_GTE.index_select(2, work.index[0])
    else:
        plan = work.plan()
        y_UTD = by_slot(experts.rows(x_TD, plan, backend), plan).transpose(0, 1)
        index_GTU = work.index.expand(len(routings), *work.index.shape)
        rows = max(weight_GTE.shape[1], work.index.shape[0])
        weight_GTE = weight_GTE.expand(-1, rows, -1).gather(2, index_GTU)
    y_GTD = _sum(weight_GTE.to(y_UTD.dtype), y_UTD)
    base_TD = experts.always(x_TD)
    return y_GTD if base_TD is None else base_TD + y_GTD.to(base_TD.dtype)


def _sum(weight_GTU: Tensor, y_UTD: Tensor) -> Tensor:
    if weight_GTU.shape[1] == 1 and y_UTD.shape[1] != 1:  # static: one matrix product for all
        return torch.einsum("gu,utd->gtd", weight_GTU[:, 0], y_UTD)
    return torch.einsum("gtu,utd->gtd", weight_GTU, y_UTD)


def weights(routings: Sequence[Routing]) -> Tensor:
    """`[G, T, E]`, or `[G, 1, E]` where all gates are static: the combine weights."""
    return torch.stack(_same_rows([_row(r).dense() for r in routings]))


def choices(routings: Sequence[Routing]) -> Tensor:
    """`[G, T, E]` bool, or `[G, 1, E]` where all gates are static: who works for whom."""
    return torch.stack(_same_rows([_row(r).choice() for r in routings]))


def union_of(routings: Sequence[Routing]) -> Routing:
    """The pairs of token and expert that some task needs, as one decision.

    Where the host may look, it has just the slots it needs; else as many as the gates could ask
    for. The weights are ones.
    """
    needed_TE = choices(routings).any(0)
    rows, experts = needed_TE.shape
    looks = rows > 0 and can_look(needed_TE)
    most = int(needed_TE.sum(1).max()) if looks else _most(routings)
    # Stable: experts stay in the order of their ids, the ones nobody needs come last.
    order_TE = torch.sort((~needed_TE).to(torch.uint8), dim=1, stable=True).indices
    index_TU = order_TE[:, : max(most, 1)]
    active_TU = needed_TE.gather(1, index_TU)
    static = all(r.by == "all" for r in routings)
    return Routing(
        index=index_TU,
        weight=active_TU.float(),
        active=None if static and looks and most else active_TU,  # then every slot is needed
        experts=experts,
        tokens=routings[0].tokens,
        by="all" if static else "token",
    )


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


def _row(r: Routing) -> Routing:
    """A static decision for one token stands for all."""
    return r.replace(tokens=1, mask=None) if r.by == "all" else r


def _same_rows(each: list[Tensor]) -> list[Tensor]:
    rows = max(t.shape[0] for t in each)
    return [t.expand(rows, -1) for t in each]
