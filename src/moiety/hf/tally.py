"""Count, batch by batch, what the experts of one layer worked on.

Nothing but counts is kept: E × E for pairs of experts, and E for every token id that was seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..record import LayerSummary
from ..routing import Routing

# A token counts as typical of an expert, and a pair as a pair, from this many tokens on.
LEAST = 5
SHOWN = 8


@dataclass(frozen=True)
class Pair:
    """Two experts that work for the same token more often than their loads make them."""

    experts: list[int]
    tokens: int  # for how many tokens both work
    lift: float  # that number, relative to chance


@dataclass(frozen=True)
class Typical:
    """A token that an expert gets more often than the layer does."""

    id: int
    text: str | None  # as the tokenizer writes it
    count: int
    lift: float  # its share of the expert's tokens, relative to its share of all tokens


class Vocabulary:
    """The token ids seen so far, numbered in order of appearance, so that rare models of large
    vocabularies cost only what they use."""

    def __init__(self) -> None:
        self.row_V = torch.empty(0, dtype=torch.long)
        self.ids: list[int] = []

    def rows(self, ids_T: Tensor) -> Tensor:
        """The row of each token; new ids get the next ones."""
        new = int(ids_T.max()) + 1 - len(self.row_V) if len(ids_T) else 0
        if new > 0:
            self.row_V = torch.cat([self.row_V, torch.full((new,), -1)])
        seen = ids_T.unique()
        fresh = seen[self.row_V[seen] < 0]
        self.row_V[fresh] = torch.arange(len(fresh)) + len(self.ids)
        self.ids += fresh.tolist()
        return self.row_V[ids_T]


class Tally:
    """The counts of one layer, over real tokens."""

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.by = "token"
        self.tokens, self.dropped = 0, 0.0  # dropped and entropy: summed over tokens
        self.entropy: float | None = 0.0
        self.padding_E = torch.zeros(experts, dtype=torch.long)
        self.pairs_EE = torch.zeros(experts, experts, dtype=torch.float64)
        self.ids_VE = torch.zeros(0, experts, dtype=torch.int32)  # by row of the vocabulary
        self.seen_V = torch.zeros(0, dtype=torch.long)

    def add(self, routing: Routing, padding_E: Tensor, rows_T: Tensor | None) -> None:
        """Count a decision without its padding; `rows_T` are the rows of its token ids."""
        self.by = routing.by
        self.padding_E += padding_E.cpu()
        chosen_TE = routing.choice().cpu()
        one_TE = chosen_TE.float()  # exact: a batch has far fewer than 2^24 tokens
        self.pairs_EE += (one_TE.t() @ one_TE).double()
        if rows_T is not None:
            real = torch.ones_like(rows_T).bool() if routing.mask is None else routing.mask.cpu()
            self._add_ids(chosen_TE[real], rows_T[real])

    def add_summary(self, summary: LayerSummary) -> None:
        """Count what a batch's summary knows of these tokens."""
        self.tokens += summary.tokens
        self.dropped += summary.drop_rate * summary.tokens
        if summary.entropy is None or self.entropy is None:
            self.entropy = None
        else:
            self.entropy += summary.entropy * summary.tokens

    def _add_ids(self, chosen_TE: Tensor, rows_T: Tensor) -> None:
        size = max(int(rows_T.max()) + 1 if len(rows_T) else 0, len(self.seen_V))
        more = size - len(self.seen_V)
        if more:
            self.ids_VE = F.pad(self.ids_VE, (0, 0, 0, more))
            self.seen_V = F.pad(self.seen_V, (0, more))
        self.ids_VE.index_add_(0, rows_T, chosen_TE.int())
        self.seen_V += torch.bincount(rows_T, minlength=size)

    # -- what the counts say --------------------------------------------------------------------

    def load(self) -> Tensor:
        """`[E]`: how many tokens each expert worked on."""
        return self.pairs_EE.diagonal()

    def together(self) -> Tensor | None:
        """`[E, E]`: how often two experts share a token, relative to chance; None: they never do.

        Chance is *quasi-independence*: expected counts a_i·a_j off the diagonal, with the row sums
        that were counted. The plain product of loads would call every pair rare, since a token
        cannot choose the same expert twice. NaN where chance expects nothing.
        """
        counts_EE = self._pairs()
        return counts_EE / _by_chance(counts_EE.sum(1)) if counts_EE.any() else None

    def top_pairs(self) -> list[Pair]:
        """The pairs that stand out, strongest evidence first: z = (n - chance) / √chance > 3."""
        n_EE = self._pairs()
        chance_EE = _by_chance(n_EE.sum(1)).clamp(min=1e-30)
        z_EE, lift_EE = (n_EE - chance_EE) / chance_EE.sqrt(), n_EE / chance_EE
        found = ((z_EE > 3) & (lift_EE > 1.2) & (n_EE >= LEAST)).triu(1).nonzero().tolist()
        found.sort(key=lambda pair: -float(z_EE[pair[0], pair[1]]))
        return [Pair([i, j], int(n_EE[i, j]), float(lift_EE[i, j])) for i, j in found[:SHOWN]]

    def typical(self, vocabulary: Vocabulary) -> list[list[Typical]] | None:
        """For every expert its tokens by lift, of equal ones the more frequent first."""
        if not len(self.seen_V):
            return None
        overall_V = self.seen_V.double() / self.seen_V.sum().clamp(min=1)
        out = []
        for count_V in self.ids_VE.t().double():
            lift_V = count_V / count_V.sum().clamp(min=1) / overall_V.clamp(min=1e-30)
            rows = ((count_V >= LEAST) & (lift_V > 1)).nonzero().flatten().tolist()
            rows.sort(key=lambda v: (-round(float(lift_V[v]), 2), -float(count_V[v])))
            out.append(
                [
                    Typical(vocabulary.ids[v], None, int(count_V[v]), float(lift_V[v]))
                    for v in rows[:SHOWN]
                ]
            )
        return out

    def _pairs(self) -> Tensor:
        return self.pairs_EE - torch.diag(self.pairs_EE.diagonal())


def _by_chance(sum_E: Tensor, rounds: int = 200) -> Tensor:
    """The symmetric table a_i·a_j with an empty diagonal and these row sums."""
    a_E = sum_E / sum_E.sum().clamp(min=1).sqrt()
    for _ in range(rounds):
        others_E = (a_E.sum() - a_E).clamp(min=1e-30)
        a_E = (a_E * sum_E / others_E).sqrt()  # the mean of old and new: it does not oscillate
    chance_EE = a_E[:, None] * a_E[None, :]
    return chance_EE.fill_diagonal_(0.0)


def written(typical: list[list[Typical]] | None, tokenizer: Any) -> list[list[Typical]] | None:
    """Typical tokens with their texts, where there is a tokenizer."""
    if typical is None or tokenizer is None:
        return typical
    return [[replace(token, text=_text(token.id, tokenizer)) for token in each] for each in typical]


def _text(id: int, tokenizer: Any) -> str:
    text = tokenizer.decode([id])
    # SentencePiece leaves out the space before the first word of a text, which a lone token is.
    if str(tokenizer.convert_ids_to_tokens(id)).startswith("▁") and not text.startswith(" "):
        text = f" {text}"
    return text.encode("utf-8", "replace").decode()  # no file holds half a pair of surrogates
