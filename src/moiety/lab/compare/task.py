"""A problem as a model meets it: inputs by name, the loss of a batch, what is measured.

One trunk answers all targets: its output `[B, sum of widths]` holds the logits of each target in
turn, one column for a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...data.problem import Problem, Split, Target
from ..study import Metric

BATCH = 512  # of an evaluation

# Texts -> token ids and mask, [N, L] each.
Reader = Callable[[Sequence[str]], dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """Inputs and targets of every split on one device, and how answers are scored."""

    targets: list[Target]
    splits: dict[str, Split]

    @classmethod
    def of(cls, problem: Problem, reader: Reader | None) -> Task:
        """The task of a problem; `reader` turns texts into tensors."""
        splits = problem.splits
        if reader is not None:
            splits = {name: _read(split, reader) for name, split in splits.items()}
            # Texts of like length side by side: an evaluation meets little padding.
            for name in ("validation", "test"):
                lengths = splits[name].inputs["attention_mask"].sum(1)
                splits[name] = splits[name].take(lengths.argsort(stable=True))
        return cls(problem.targets, splits)

    def to(self, device: torch.device) -> Task:
        """The same task on another device."""

        def move(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: t.to(device) for name, t in tensors.items()}

        splits = {n: Split(move(s.inputs), move(s.targets)) for n, s in self.splits.items()}
        return replace(self, splits=splits)

    @property
    def widths(self) -> list[int]:
        """Columns of the answer, by target."""
        return [len(t.classes) if t.kind == "classes" else 1 for t in self.targets]

    def answer(self, model: nn.Module, split: str, rows: Tensor | slice) -> Tensor:
        """The logits `[B, sum of widths]` of some examples of a split."""
        inputs = {name: values[rows] for name, values in self.splits[split].inputs.items()}
        found = model(**trim(inputs))
        return found if isinstance(found, Tensor) else found.logits

    def answers(self, model: nn.Module, split: str) -> Tensor:
        """The logits of all examples of a split."""
        starts = range(0, len(self.splits[split]), BATCH)
        with torch.no_grad():
            parts = [self.answer(model, split, slice(i, i + BATCH)) for i in starts]
        return torch.cat(parts)

    def batch_loss(self, model: nn.Module, split: str, rows: Tensor | slice) -> Tensor:
        """The loss of a model on some examples of a split, without that of routers."""
        return self.loss(self.answer(model, split, rows), split, rows)

    def loss(self, logits: Tensor, split: str, rows: Tensor | slice) -> Tensor:
        """The sum over targets of cross-entropy, or squared error of standardised values."""
        total = logits.new_zeros(())
        for target, own in zip(self.targets, logits.split(self.widths, 1)):
            truth = self.splits[split].targets[target.name][rows]
            if target.kind == "classes":
                total = total + F.cross_entropy(own.float(), truth)
            else:
                total = total + F.mse_loss(own[:, 0].float(), truth)
        return total

    # -- measures --------------------------------------------------------------------------------

    @property
    def main(self) -> str:
        """The main metric: a mean over the targets."""
        kinds = {target.kind for target in self.targets}
        return {"classes": "accuracy", "number": "r2"}[kinds.pop()] if len(kinds) == 1 else "score"

    def metrics(self) -> dict[str, Metric]:
        """What every trial reports, the main one first."""
        several = len(self.targets) > 1
        over = f", mean of {len(self.targets)} targets" if several else ""
        said = {"accuracy": "Accuracy", "r2": "R²", "score": "Score (accuracy or R²)"}[self.main]
        style = ".3f" if self.main == "r2" else ".1%"
        found = {self.main: Metric(said + over, format=style)}
        if named := [t.name for t in self.targets if t.kind == "classes"]:
            # Numbers have no F1: the mean may be of fewer targets than the main metric's.
            one = f" of {named[0]}" if several else ""
            of = f", mean of {len(named)} targets" if len(named) > 1 else one
            found["macro_f1"] = Metric("Macro-F1" + of, format=".3f")
        for target in self.targets:
            if target.kind == "number":
                found[f"rmse of {target.name}"] = Metric(
                    f"RMSE of {target.name}", better="lower", format=".4g"
                )
            if several:
                classes = target.kind == "classes"
                found[f"{'accuracy' if classes else 'r2'} of {target.name}"] = Metric(
                    f"{'Accuracy' if classes else 'R²'} of {target.name}",
                    format=".1%" if classes else ".3f",
                )
        found[f"validation {self.main}"] = Metric(
            f"{said}{over}, validation", format=style, split="validation"
        )
        return found

    def measure(self, logits: Tensor, split: str) -> dict[str, float]:
        """The metrics of these answers to a split."""
        found, scores, f1 = {}, [], []
        for target, own in zip(self.targets, logits.float().split(self.widths, 1)):
            truth = self.splits[split].targets[target.name]
            if target.kind == "classes":
                chosen = own.argmax(1)
                scores.append(float((chosen == truth).double().mean()))
                f1.append(macro_f1(chosen, truth))
                found[f"accuracy of {target.name}"] = scores[-1]
            else:
                scores.append(r_squared(own[:, 0], truth))
                found[f"r2 of {target.name}"] = scores[-1]
                error = F.mse_loss(own[:, 0].double(), truth.double()) ** 0.5
                found[f"rmse of {target.name}"] = float(error) * target.std
        found[self.main] = sum(scores) / len(scores)
        if f1:
            found["macro_f1"] = sum(f1) / len(f1)
        return found


def _read(split: Split, reader: Reader) -> Split:
    return replace(split, inputs=reader(split.texts), texts=[])


def trim(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut texts to the longest of these; other inputs stay as they are."""
    if "attention_mask" not in inputs:
        return dict(inputs)
    longest = int(inputs["attention_mask"].sum(1).max())
    return {name: values[:, :longest] for name, values in inputs.items()}


def macro_f1(chosen: Tensor, truth: Tensor) -> float:
    """The mean of F1 over the classes that occur in either."""
    classes = int(torch.maximum(chosen.max(), truth.max())) + 1
    hits, said, there = (
        torch.bincount(ids, minlength=classes).double()
        for ids in (truth[chosen == truth], chosen, truth)
    )
    occurs = said + there > 0
    return float((2 * hits[occurs] / (said + there)[occurs]).mean())


def r_squared(answer: Tensor, truth: Tensor) -> float:
    """The share of the variance that is explained; 0 is the mean, less is worse than that."""
    answer, truth = answer.double(), truth.double()
    spread = ((truth - truth.mean()) ** 2).sum()
    return float(1 - ((answer - truth) ** 2).sum() / spread.clamp(min=1e-12))
