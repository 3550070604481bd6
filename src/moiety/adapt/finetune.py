"""`finetune`: a masked encoder becomes a classifier, plainly or by one of three other methods.

    tuned = finetune("adapted/", "chemprot/")           # train.jsonl, dev.jsonl, test.jsonl
    tuned = finetune(encoder, train, validation=held, test=lambda: read("test.csv"), seed=0)
    tuned.scores["test"]["macro_f1"]; tuned.save("classifier/")

Labelled examples are what `read_labelled` reads, or rows with a length, `take` and `labels`. The
test split is read once, when the training is over. AdamW, a linear warm-up and a linear decay,
gradients clipped at 1 (digest 3, §6).

    recadam   k, t0 (a quarter of the steps), strength (at most 5000)     see `recadam`
    mars      radius                                                     see `mars`
    r3f       weight, noise                                              see `r3f`

With `out` it may be killed at any moment and goes on to the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .. import io
from ..train.state import read_state, state_bytes
from .cache import look_through
from .classifier import Classifier
from .encoders import Encoder
from .follow import Chosen
from .labelled import Labelled, read_labelled
from .loading import open_encoder
from .rows import Rows, are_rows, repeated
from .scores import answers, check_labels, score
from .together import Member
from .tuning import Method, TuneRecipe, Tuning

# By kind, from Table 9 of digest 3.
RATES = {"image": 1e-4, "text": 2e-5}
BATCHES = {"image": 32, "text": 16}
SAMPLE = 8  # training examples whose logits are told, for whoever loads the classifier


@dataclass(frozen=True)
class Tuned:
    """A fine-tuned classifier and what is known of it."""

    classifier: Classifier
    recipe: TuneRecipe
    # Of "train" and, where given, "validation" and "test"; where some examples of the test are also
    # trained on, "test" says how many are "repeated", and "test_new" is without them.
    scores: dict[str, dict[str, float]]
    distance: float  # l2, of the trunk from the encoder it was
    history: list[dict[str, Any]]  # by check: step, loss of the training, scores of "validation"
    sample: list[list[float]]  # logits of the first training examples
    seconds: float = 0.0

    @property
    def gap(self) -> float | None:
        """Test loss less training loss, the generalisation gap; None without a test."""
        if "test" not in self.scores:
            return None
        return self.scores["test"]["loss"] - self.scores["train"]["loss"]

    def logits(self, rows: Any, tick: Callable[[float], None] | None = None) -> Tensor:
        """`[N, C]` of labelled or unlabelled rows, on the CPU; `tick` hears the share so far."""
        return answers(self.classifier, rows, self.recipe.batch, tick)

    def save(self, folder: str | Path) -> None:
        """Write the classifier with its processor, for transformers alone to load."""
        self.classifier.save(folder)


def finetune(
    model: str | Path | nn.Module | Encoder,
    data: Any,
    *,
    method: Method = "plain",
    options: Mapping[str, float] | None = None,
    validation: Any = None,
    test: Callable[[], Any] | Any = None,
    classes: int | Sequence[str] | None = None,
    steps: int | None = None,
    epochs: int = 10,
    batch: int | None = None,
    lr: float | None = None,
    weight_decay: float = 0.01,
    warmup: float = 0.05,
    dropout: float | None = None,
    checks: int = 1,
    precision: Literal["float32", "bfloat16"] = "float32",
    processor: Any = None,
    seed: int = 0,
    out: str | Path | None = None,
    save_every: float = 30.0,
    save_classifier: bool = True,
    capture: bool = False,
    crew: Member | None = None,
    tick: Callable[[float], None] | None = None,
    scored: Callable[[str, float], None] | None = None,
) -> Tuned:
    """Train trunk and a fresh head on labelled examples, and score the last weights.

    data         training rows; or what `read_labelled` reads or gave: a path, `TensorDataset`s by
                 split, … with a validation and a test split, drawn by `seed` where there are none
    options      of the method, see above
    test         rows, or what reads them, which is called once and after all training
    classes      their number or their names; None: those of the training labels
    steps        None: `epochs` times as many batches as the examples make
    batch, lr    None: 32 and 1e-4 for images, 16 and 2e-5 for text
    out          a folder for the state in flight, `result.json` and, with `save_classifier`,
                 `classifier/`
    capture      on a GPU, repeat a step as one CUDA graph; it rounds a little
                 differently
    crew         its place among trainings that take their steps together (see `together`)
    tick         hears which share of the steps is done; then `scored`, of which split which share
    """
    encoder = open_encoder(model, processor)
    data, validation, test = _splits(data, validation, test, encoder, seed)
    labels = check_labels(data, "training", classes)
    size = batch_size(encoder.kind, batch, len(labels))
    recipe = TuneRecipe(
        steps=epochs * (len(labels) // max(size, 1)) if steps is None else steps,
        batch=size,
        lr=RATES[encoder.kind] if lr is None else lr,
        weight_decay=weight_decay,
        warmup=warmup,
        dropout=dropout,
        checks=checks,
        precision=precision,
        method=method,
        options=dict(options or {}),
    )
    asked = classes if classes is not None else getattr(data, "classes", None)
    classifier = Classifier.build(
        encoder,
        asked if asked is not None else int(labels.max()) + 1,
        seed=seed,
        dropout=dropout,
    )
    tuning = Tuning(classifier, data, labels, recipe, seed, validation, capture, crew)
    folder = Path(out) if out is not None else None
    with io.lease(folder) if folder else nullcontext():
        if folder:
            tuning.keep(folder, key_of(tuning, encoder), save_every)
            if (told := _finished(folder, tuning.key)) is not None:
                tuning.forget()
                classifier.model.load_state_dict(told.pop("state"))
                classifier.model.eval()
                if test is not None and "test" not in told["scores"]:  # it was not asked for before
                    told["scores"] |= _tested(tuning, test, scored)
                    _write(folder, tuning, told, save_classifier)
                return Tuned(classifier, recipe, **told)
        owner = getattr(test, "__self__", None)
        if isinstance(owner, Labelled):  # now, and not after the training
            owner.check_closed()
        tuning.run(tick)
        told = _told(tuning, encoder, test, scored)
        if folder:
            _write(folder, tuning, told, save_classifier)
        return Tuned(classifier, recipe, **told)


def batch_size(kind: str, asked: int | None, rows: int) -> int:
    """Examples of a step: as asked for, or as usual, and no more than there are."""
    return min(BATCHES[kind] if asked is None else asked, rows)


def _splits(
    data: Any, validation: Any, test: Any, encoder: Encoder, seed: int
) -> tuple[Any, Any, Any]:
    """Training and validation rows, and what reads the test split."""
    if not are_rows(data):
        if not isinstance(data, Labelled):
            data = read_labelled(data, encoder, seed=seed)
        later = data.test if data.read_test is not None else None
        validation = data.validation if validation is None else validation
        data, test = data.train, later if test is None else test
    given = {"data": data, "validation": validation, "test": None if callable(test) else test}
    for name, rows in given.items():
        if rows is not None and not are_rows(rows):
            raise ValueError(
                f"{name} must be rows, such as those of read_labelled, not {rows!r:.60}"
            )
        encoder.check_reads(rows)
    return data, validation, test


def _told(
    tuning: Tuning,
    encoder: Encoder,
    test: Callable[[], Any] | Any,
    scored: Callable[[str, float], None] | None,
) -> dict[str, Any]:
    """What is known of the classifier at the end; only now the test split is read."""
    classifier, batch = tuning.classifier, tuning.recipe.batch
    first = Chosen(tuning.data, torch.arange(min(SAMPLE, len(tuning.data))))
    found = {"train": _scored(tuning, tuning.data, "train", scored)}
    # The last step may have broken what no loss before it tells.
    tuning.check_finite(found["train"]["loss"])
    if tuning.validation is not None:  # it was scored after the last step
        found["validation"] = tuning.history[-1]["validation"]
    if test is not None:
        found |= _tested(tuning, test, scored)
    return {
        "scores": found,
        "distance": classifier.distance(encoder),
        "history": tuning.history,
        "sample": answers(classifier, first, batch).tolist(),
        "seconds": tuning.seconds,
    }


def _tested(
    tuning: Tuning,
    test: Callable[[], Any] | Any,
    scored: Callable[[str, float], None] | None,
) -> dict[str, dict[str, float]]:
    """The scores of the test split, and of what in it is new, where some is not."""
    rows = test() if callable(test) else test
    found = {"test": _scored(tuning, rows, "test", scored)}
    if isinstance(rows, Rows) and isinstance(tuning.data, Rows):
        known = repeated(rows, tuning.data)
        if known.any():
            found["test"]["repeated"] = int(known.sum())
        if known.any() and not known.all():
            new = rows.part(np.flatnonzero(~known))
            found["test_new"] = _scored(tuning, new, "test", scored)
    return found


def _scored(
    tuning: Tuning, rows: Any, split: str, scored: Callable[[str, float], None] | None
) -> dict[str, float]:
    tick = partial(scored, split) if scored else None
    return score(tuning.classifier, rows, tuning.recipe.batch, split, tick)


def _write(out: Path, tuning: Tuning, told: dict[str, Any], classifier: bool) -> None:
    """Keep it; `final.safetensors` comes last, and says that all is there."""
    if classifier:
        tuning.classifier.save(out / "classifier")
    said = {**told, **asdict(tuning.recipe)}
    options = tuning.recipe.options.items()  # JSON has no infinity
    said["options"] = {name: v if math.isfinite(v) else str(v) for name, v in options}
    io.write_json(out / "seconds.json", said.pop("seconds"))  # no two runs take the same
    io.write_json(out / "result.json", said)
    whole = {**told, "seconds": 0.0, "key": tuning.key}
    whole["state"] = tuning.classifier.model.state_dict()
    io.write_atomic(out / "final.safetensors", state_bytes(whole))
    tuning.forget()


def _finished(out: Path, key: str) -> dict[str, Any] | None:
    """What an earlier call left in the folder, if it came to its end."""
    if not (out / "final.safetensors").exists():
        return None
    told = read_state(out / "final.safetensors")
    if told.pop("key") != key:
        raise ValueError(f"{out} holds another fine-tuning; choose another folder")
    return {**told, "seconds": float(io.read_json(out / "seconds.json"))}


def key_of(tuning: Tuning, encoder: Encoder) -> str:
    """What the bits of a fine-tuning depend on."""
    given = [rows for rows in (tuning.data, tuning.validation) if rows is not None]
    read = [look_through(encoder, rows).digest for rows in given]
    labels, head = tuning.labels.tolist(), tuning.classifier.model.config.id2label
    said = f"{encoder.weights_key()} {read} {labels} {head} {tuning.recipe} {tuning.seed}"
    return hashlib.sha256(said.encode()).hexdigest()
