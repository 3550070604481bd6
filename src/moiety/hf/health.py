"""What the experts of a model do on some data: measured once, shown on one page.

health = measure(model, batches, tokenizer=tokenizer)
health.findings                     # sentences, worst first; empty: no problem found
health.page("health.html")

docs/health.md defines every number.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..io import write_atomic
from ..modes import at_rest
from ..report import health_page
from ..routing import Routing
from ..routing.base import keep_real
from ..watch import Routes, watch
from .findings import Finding, find
from .tally import Pair, Tally, Typical, Vocabulary, written

# A larger table of pairs is neither shown nor kept.
TABLE = 64
MOST = 0.75  # of the slots of padding: what its preferred experts take
STACKS = ("", "decoder_")  # what their words in a batch begin with
UNNEEDED = {"use_cache": False, "logits_to_keep": 1}  # nobody reads what these would make


@dataclass(frozen=True)
class Padding:
    """What padding does to a layer's balance; all zero where it takes no slot."""

    share: float  # of all slots
    load: list[float]  # share of the padding's slots of each expert
    effective: float  # effective experts, padding counted
    peak: float  # largest load ÷ even share, padding counted
    preferred: list[int]  # the fewest experts that take three quarters of the padding's slots
    to_preferred: float  # share of the padding's slots that go there
    real_there: float  # share of the real tokens' slots that go there
    distance: float  # total variation between where padding goes and where real tokens go
    shift: float  # share × distance: the load that goes elsewhere once padding is counted


@dataclass(frozen=True)
class LayerHealth:
    """One layer, on real tokens unless it says padding."""

    name: str
    experts: int
    tokens: int
    slots: int
    load: list[float]
    effective: float
    peak: float  # largest load ÷ even share
    entropy: float | None  # mean entropy of a token's gate, in nats; None: there is no gate
    relative_entropy: float | None  # ÷ log E: one is undecided, zero is certain
    dead: list[int]
    drop_rate: float
    static: bool  # the same choice for every token
    by_expert: bool  # experts choose tokens
    padding: Padding
    pairs: list[Pair]
    together: list[list[float | None]] | None  # None: one expert a token, or too many experts
    typical: list[list[Typical]] | None  # None: token ids are not known


@dataclass(frozen=True)
class Health:
    """What `measure` found."""

    layers: list[LayerHealth]
    findings: list[Finding]
    examples: int
    notes: list[str] = field(default_factory=list)  # what the model was given

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def page(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "Routing health",
        settings: Mapping[str, str] | None = None,
        command: str = "",
    ) -> Path:
        """Write the page in one step."""
        html = health_page(self.as_dict(), title=title, settings=settings or {}, command=command)
        return write_atomic(path, html)


def measure(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Health:
    """Run a model over batches, in eval mode and without gradients, and count what its experts do.

    A batch holds what the model takes: `input_ids` and `attention_mask`, or `pixel_values`. With a
    `tokenizer`, typical tokens are shown as text. `progress` is called after every batch with its
    number. Memory does not grow with the data but for the token ids that appear in it.
    """
    words, vocabulary, examples = _Words(model), Vocabulary(), 0
    tallies: dict[str, Tally] = {}
    with watch(model, keep="all") as routes, at_rest(model), torch.no_grad():
        for number, batch in enumerate(batches, start=1):
            inputs = words.complete(_named(batch, model))
            model(**inputs)
            examples += len(next(iter(inputs.values())))
            _count(routes, [_Text(inputs, stack, vocabulary) for stack in STACKS], tallies)
            routes.clear()
            if progress is not None:
                progress(number)
    if not examples:
        raise ValueError("there is no example to measure: the data gave no batch")
    layers = [
        _layer(name, tallies[name], vocabulary, tokenizer)
        for name in routes.layers
        if name in tallies
    ]
    return Health(layers, find(layers), examples, words.notes)


def _named(batch: Any, model: nn.Module) -> Mapping[str, Any]:
    """A batch by names; a tensor alone is the model's main input."""
    if isinstance(batch, torch.Tensor):
        batch = {getattr(model, "main_input_name", "input_ids"): batch}
    tensors = isinstance(batch, Mapping) and [v for v in batch.values() if torch.is_tensor(v)]
    if not tensors or any(t.dim() < 2 for t in tensors[:1]):
        raise ValueError(
            "a batch is a dict of tensors [batch, …] that the model takes, such as a DataLoader "
            f"gives, got {type(batch).__name__}"
        )
    return batch


def _count(routes: Routes, texts: list[_Text], tallies: dict[str, Tally]) -> None:
    """Add one batch to the counts."""
    real = Routes(list(routes.layers), "load")
    for name, record in routes.records:
        routing, padding_E, rows_T = _real(record, texts)
        tallies.setdefault(name, Tally(routing.experts)).add(routing, padding_E, rows_T)
        real.add(name, routing, {})
    for name, summary in real.summary().items():
        tallies[name].add_summary(summary)


# -- what goes in -------------------------------------------------------------------------------


class _Words:
    """What a model's forward is given besides the batch."""

    def __init__(self, model: nn.Module) -> None:
        taken = inspect.signature(model.forward).parameters
        self.extra = {word: value for word, value in UNNEEDED.items() if word in taken}
        self.like = next(model.parameters(), torch.empty(()))
        self.config = getattr(model, "config", None)
        self.two_stacks = bool(getattr(self.config, "is_encoder_decoder", False))
        self.notes: list[str] = []

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        batch = {word: self._to(value) for word, value in given.items()}
        if self.two_stacks and "input_ids" in batch and "decoder_input_ids" not in batch:
            batch = {**batch, **self._decoder(batch)}
            self.notes = [
                "The decoder got the encoder's input, one place later behind its start token."
            ]
        return {**batch, **self.extra}

    def _to(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        dtype = self.like.dtype if value.is_floating_point() else value.dtype
        return value.to(self.like.device, dtype)

    def _decoder(self, batch: dict[str, Any]) -> dict[str, Any]:
        # One token longer than the encoder's input: so the number of tokens tells whose they are.
        known = (getattr(self.config, f"{w}_token_id", None) for w in ("decoder_start", "pad"))
        start = next((id for id in known if id is not None), 0)
        given = {"decoder_input_ids": (batch["input_ids"], start)}
        if "attention_mask" in batch:
            given["decoder_attention_mask"] = (batch["attention_mask"], 1)
        return {word: nn.functional.pad(t, (1, 0), value=v) for word, (t, v) in given.items()}


class _Text:
    """The token ids and the mask that one stack of the model got, flat, if it got any."""

    def __init__(self, inputs: Mapping[str, Any], prefix: str, vocabulary: Vocabulary) -> None:
        ids, mask = inputs.get(f"{prefix}input_ids"), inputs.get(f"{prefix}attention_mask")
        self.tokens = -1 if ids is None else ids.numel()
        self.rows_T = None if ids is None else vocabulary.rows(ids.flatten().cpu())
        self.mask_T = None
        if mask is not None and ids is not None and mask.shape == ids.shape:
            self.mask_T = mask.flatten().bool()


def _real(record: Any, texts: list[_Text]) -> tuple[Routing, Tensor, Tensor | None]:
    """A decision without its padding, the slots that padding took, and the rows of its ids."""
    routing = record.routing
    fits = [text for text in texts if text.tokens == routing.tokens]
    text = fits[0] if len(fits) == 1 else None
    padding_E = record.padded_E
    if routing.mask is None and text is not None and text.mask_T is not None:
        # The layer was not told about padding and treated it as text.
        mask_T = text.mask_T.to(routing.index.device)
        padding_E = routing.choice()[~mask_T].sum(0)
        routing = keep_real(routing, mask_T)
    return routing, padding_E, None if text is None else text.rows_T


# -- what comes out -----------------------------------------------------------------------------


def _layer(name: str, tally: Tally, vocabulary: Vocabulary, tokenizer: Any) -> LayerHealth:
    experts, slots, tokens = tally.experts, int(tally.load().sum()), max(tally.tokens, 1)
    load_E = tally.load() / max(slots, 1)
    entropy = None if tally.entropy is None else tally.entropy / tokens
    together_EE = tally.together() if experts <= TABLE else None
    return LayerHealth(
        name=name,
        experts=experts,
        tokens=tally.tokens,
        slots=slots,
        load=load_E.tolist(),
        effective=_effective(load_E),
        peak=float(load_E.max()) * experts,
        entropy=entropy,
        relative_entropy=None if entropy is None or experts < 2 else entropy / math.log(experts),
        dead=(load_E == 0).nonzero().flatten().tolist(),
        drop_rate=tally.dropped / tokens,
        static=tally.by == "all",
        by_expert=tally.by == "expert",
        padding=_padding(load_E, slots, tally.padding_E),
        pairs=tally.top_pairs(),
        together=None if together_EE is None else _plain(together_EE),
        typical=written(tally.typical(vocabulary), tokenizer),
    )


def _effective(share_E: Tensor) -> float:
    """e to the entropy: as many equally busy experts."""
    return math.exp(float(torch.special.entr(share_E).sum()))


def _padding(load_E: Tensor, slots: int, padding_E: Tensor) -> Padding:
    """Compare the load of real tokens with that of padding."""
    taken = int(padding_E.sum())
    share = taken / max(taken + slots, 1)
    pad_E = padding_E.double() / max(taken, 1)
    both_E = load_E * (1 - share) + pad_E * share
    distance = float((pad_E - load_E).abs().sum()) / 2 if taken and slots else 0.0
    preferred = _fewest(pad_E, MOST) if taken else []
    return Padding(
        share=share,
        load=pad_E.tolist(),
        effective=_effective(both_E),
        peak=float(both_E.max()) * len(load_E),
        preferred=preferred,
        to_preferred=float(pad_E[preferred].sum()),
        real_there=float(load_E[preferred].sum()),
        distance=distance,
        shift=share * distance,
    )


def _fewest(share_E: Tensor, part: float) -> list[int]:
    """The fewest experts that have this part together, in order of their numbers."""
    by_share, order = share_E.sort(descending=True, stable=True)
    # Rounding must not ask for one more expert than the part needs.
    count = int((by_share.cumsum(0) < part - 1e-9).sum()) + 1
    return sorted(order[:count].tolist())


def _plain(table_EE: Tensor) -> list[list[float | None]]:
    """Rounded numbers, and none for what is not one."""
    return [[None if math.isnan(v) else round(v, 3) for v in row] for row in table_EE.tolist()]
