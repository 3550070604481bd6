"""What `moiety adapt` is asked for, as one value that JSON can hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from .recipe import WARM_STEPS

Way = Literal["self-distill", "further", "fine-tune", "compare"]
PRETRAINING = (
    *("steps", "batch", "lr", "checks", "stop", "patience", "precision", "warm_steps"),
    "lora",
)
DISTILLATION = (
    *("rounds", "match", "mae_weight", "distill_weight", "distill_every", "match_routing"),
    *("cache", "cache_limit"),
)
POSITIVE, WEIGHTS = ("lr", "tune_lr"), ("mae_weight", "distill_weight", "match_routing")
TUNING = ("tune", "epochs", "tune_batch", "tune_lr")
JUDGING = ("seeds", "metric", "margin")  # what may change when a comparison is over
ARMS = ("fine-tune", "further", "self-distill")  # of a comparison, by what they cost


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is wanted: the words of `moiety adapt`, and what decides the bits of its result."""

    model: str
    unlabelled: str | None = None  # none to fine-tune alone
    labelled: str | None = None
    source: str | None = None
    method: Way = "self-distill"
    # pre-training
    steps: int = 2000
    batch: int | None = None
    lr: float | None = None
    checks: int = 8
    stop: Literal["probe"] | None = None
    patience: int = 3
    precision: Literal["float32", "bfloat16"] = "float32"
    warm_steps: int = WARM_STEPS
    lora: int | None = None
    # self-distillation
    rounds: int = 1
    match: Literal["hidden", "cls", "prediction", "weights"] | None = None
    mae_weight: float = 1.0
    distill_weight: float = 1.0
    distill_every: int = 1
    match_routing: float = 0.0
    cache: bool = True
    cache_limit: int | None = None
    # fine-tuning
    tune: Literal["plain", "recadam", "mars", "r3f"] = "plain"
    epochs: int = 10
    tune_batch: int | None = None
    tune_lr: float | None = None
    # reading
    text: str | None = None
    labelled_text: str | None = None  # where it is another column than that of the unlabelled
    target: str | None = None
    length: int | None = None
    fit: bool = False
    data_dir: str | None = None
    # of a comparison alone
    seeds: int = 5
    labels: int | None = None
    metric: Literal["accuracy", "macro_f1"] = "accuracy"
    margin: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "unlabelled", "labelled", "source"):
            if (given := getattr(self, name)) is not None:  # as a shell completes a folder
                object.__setattr__(self, name, given.rstrip("/") or given)
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{name.replace('_', '-')} must be a number, got {value}")
            if name in POSITIVE and value is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
            if name in WEIGHTS and value < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {value:g}")
        alone = self.method == "fine-tune"
        if alone != (self.unlabelled is None):
            needs = "does nothing with" if alone else "is needed, but for"
            raise ValueError(f"--unlabelled {needs} --method fine-tune")
        if self.labelled is None and alone:
            raise ValueError("--method fine-tune needs --labelled, to fine-tune on")
        if self.labelled is None and self.stop == "probe":
            raise ValueError("--stop probe needs --labelled, whose training split it probes on")
        if self.labelled is None and self.method == "compare":
            raise ValueError("--method compare needs --labelled, to fine-tune on and to score")
        if self.method == "compare" and self.seeds < 5:
            raise ValueError(f"--seeds must be at least 5 to compare, got {self.seeds}")
        if self.labels is not None and self.stop == "probe":
            raise ValueError(
                "--stop probe chooses by all training labels, and --labels says how many there "
                "are: choose one"
            )
        if self.lora is not None and self.match == "weights":
            raise ValueError("--match weights compares weights, which --lora leaves: choose one")
        if not 0 < self.margin < 1:
            raise ValueError(f"--margin must be between 0 and 1, got {self.margin:g}")

    def words(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}
