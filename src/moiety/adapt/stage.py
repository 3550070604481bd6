"""One training of a masked encoder from its initial weights, which may be killed at any moment.

    stage = Stage("further", encoder, rows, recipe, seed=0, initial=initial, folder=out / "further")
    trained = stage.run()                # the same bits, however often it was killed

Every lot is drawn from seed and step: the order of the examples, the masks, and dropout. Two stages
with one seed see the same batches with the same masks. AdamW with betas (0.9, 0.95) and a learning
rate that falls linearly to 0 without warm-up (see `recipe`).

    latest.safetensors   the state in flight
    final.safetensors    the weights that were kept, and what was seen on the way
    follow.jsonl         a line for every check
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import io
from ..train.draws import step_seed
from ..train.fit import seeded
from ..train.state import read_state, state_bytes
from .encoders import MASK, Batch, Encoder
from .flight import Flight
from .follow import Follow
from .lora import merge, with_adapters
from .objective import Objective, Target
from .recipe import Diverged, Recipe, adamw, set_rate
from .repeated import Repeated, Tensors
from .teachers import Teacher
from .together import Member
from .trained import (
    State,
    Trained,
    load_whole,
    read_trained,
    to_cpu,
    whole_state,
    write_trained,
)

ORDER, MASKS, NOISE, ADAPTERS = 1, 2, 3, 4  # what a seed is used for
# What a teacher says of its layers and of its parameters, among the tensors of a step.
PROBS, WEIGHTS = "probs ", "weights "
FURTHER = Objective(distill_weight=0.0)  # eq. 2 alone


class Stage(Flight):
    """A training in flight."""

    order_lot = ORDER

    def __init__(
        self,
        name: str,
        encoder: Encoder,
        rows: Any,
        recipe: Recipe,
        *,
        seed: int,
        initial: Mapping[str, Tensor],
        objective: Objective = FURTHER,
        teacher: Teacher | None = None,
        follow: Follow | None = None,
        folder: Path | None = None,
        save_every: float = 30.0,
        tick: Callable[[str, float], None] | None = None,
        capture: bool = False,
        crew: Member | None = None,
    ) -> None:
        if crew and recipe.lora is not None:
            raise ValueError("LoRA is trained alone: leave crew or lora out")
        super().__init__(recipe, len(rows), seed)
        self.name, self.encoder, self.rows = name, encoder, rows
        self.initial, self.folder = dict(initial), folder
        self.student = encoder  # what is trained: with LoRA a copy that has adapters
        self.objective, self.teacher = objective, teacher
        self.follow = follow or Follow(seed=seed)
        self.save_every, self.tick = save_every, tick
        self.captures, self.crew = capture and encoder.device.type == "cuda", crew
        self.repeated: dict[bool, Repeated] = {}  # steps with a teacher, and without
        self.wanted: Target | None = None  # what the teacher says at this step
        self.worse = 0  # checks since the best one
        self.sums: dict[str, Tensor] = {}  # of the terms since the last check, in float64
        self.counts: dict[str, int] = {}
        self.best: tuple[float, int, State] = (-math.inf, 0, {})

    # -- the course ----------------------------------------------------------------------------

    def run(self) -> Trained:
        """Train, or go on, to the end; the model is left with the weights that were kept."""
        done = read_trained(self.folder)
        if done is not None:
            self.encoder.model.load_state_dict(done.state)
            self.encoder.model.eval()
            return done
        self._begin()
        tick = partial(self.tick, self.name) if self.tick else None
        with seeded(step_seed(self.seed, NOISE), self.encoder.device):
            if not self.history:
                self.look()
            if tick:
                tick(self.step / self.recipe.steps)
            self.fly(tick)
        return self._end()

    @property
    def over(self) -> bool:
        out_of_patience = self.recipe.stop == "probe" and self.worse >= self.recipe.patience
        return super().over or out_of_patience

    def advance(self) -> None:
        """Take the next step."""
        rows = self.rows_of(self.step)
        torch.manual_seed(self.lot(NOISE, self.step))
        batch = self.encoder.batch(self.rows.take(rows))
        lots = torch.Generator().manual_seed(self.lot(MASKS, self.step))
        masks = self.encoder.mask(batch, lots)
        if self.captures or self.crew:  # few shapes, each captured once
            batch = self.encoder.rounded({**batch, MASK: masks})
            masks = batch.pop(MASK)
        target = None
        if self.teacher is not None and self.objective.distills(self.step):
            target = self.teacher.ask(rows, batch, masks)
        set_rate(self.optimizer, self.recipe.rate(self.step))
        told = self._update(batch, masks, target)
        self.step += 1
        for name, value in told.items():  # read at the next check: a GPU need not wait
            self.sums[name] = self.sums.get(name, 0.0) + value.double()
            self.counts[name] = self.counts.get(name, 0) + 1
        again = self.step < self.recipe.steps and self.objective.distills(self.step)
        if self.teacher is not None and again:
            self.teacher.expect(self.rows_of(self.step))

    def _update(self, batch: Batch, masks: Tensor, target: Target | None) -> dict[str, Tensor]:
        """Change the weights; with others, or on a GPU as one CUDA graph, where that is wanted."""
        if target is None and not self.objective.mae_weight:  # a step without any term
            return {}
        tensors = {**batch, MASK: masks}
        if target is not None and target.values is not None:
            tensors["target"] = target.values
        if self.crew:
            said = target or Target()
            probs = {f"{PROBS}{layer}": probs_TE for layer, probs_TE in enumerate(said.probs)}
            weights = {f"{WEIGHTS}{name}": weight for name, weight in said.weights.items()}
            return self.crew.step(self, {**tensors, **probs, **weights})
        # The weights of a teacher are the same at every step; its routers' decisions are not.
        if not self.captures or (target is not None and target.probs):
            return self._change(tensors, target)
        self.wanted, taught = target, target is not None
        if taught not in self.repeated:
            change = lambda tensors: self._change(tensors, self.wanted)  # noqa: E731
            self.repeated[taught] = Repeated(self.name, change)
        return self.repeated[taught](tensors)

    def _change(self, tensors: Tensors, target: Target | None) -> dict[str, Tensor]:
        batch = dict(tensors)
        masks, values = batch.pop(MASK), batch.pop("target", None)
        if target is not None:
            target = dataclasses.replace(target, values=values)
        self.optimizer.zero_grad()
        told = self.objective.backward(self.student, batch, masks, target, self.half)
        self.optimizer.step()
        return told

    # -- with others (see `together`) ----------------------------------------------------------

    @property
    def trained_model(self) -> nn.Module:
        return self.student.model

    @property
    def alike(self) -> Hashable:
        return self.objective, self.recipe.precision, self.captures

    def loss(self, tensors: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        batch = dict(tensors)
        masks, values = batch.pop(MASK), batch.pop("target", None)
        probs = [batch.pop(name) for name in tensors if name.startswith(PROBS)]
        weights = {
            name.removeprefix(WEIGHTS): batch.pop(name)
            for name in tensors
            if name.startswith(WEIGHTS)
        }
        taught = values is not None or weights
        target = Target(values=values, probs=probs, weights=weights) if taught else None
        return self.objective.loss(self.student, batch, masks, target, self.half)

    def fit(self, tensors: Tensors, length: int) -> Tensors:
        """Gates `[T, E]` are those of all tokens; a class token and a weight have no length."""
        tensors, size = dict(tensors), tensors["input_ids"].shape
        whole = {"target": tensors.pop("target")} if self.objective.match == "cls" else {}
        whole |= {name: tensors.pop(name) for name in [*tensors] if name.startswith(WEIGHTS)}
        gates = {name: t for name, t in tensors.items() if name.startswith(PROBS)}
        by_token = {n: t.unflatten(0, size) for n, t in gates.items() if len(t) == size.numel()}
        fitted = self.encoder.rounded({**tensors, **by_token}, length)
        flat = {name: fitted[name].flatten(0, 1) for name in by_token}
        static = {name: t for name, t in gates.items() if name not in by_token}
        return {**fitted, **flat, **static, **whole}

    def apply(self) -> None:
        self.optimizer.step()

    def look(self) -> None:
        """Measure the model, and remember it if it is the best so far."""
        line: dict[str, Any] = {"step": self.step}
        line |= {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts = {}, {}
        # The last step may have broken the weights, which the losses before it do not tell.
        weights = nn.utils.get_total_norm(self.student.model.parameters())
        self._check_finite({**line, "weights": float(weights)})
        self._settle()
        line |= self.follow.look(self.encoder, self.initial)
        self._check_finite(line)
        self.history.append(line)
        if self.folder:
            io.append_line(self.folder / "follow.jsonl", json.dumps(line))
        if self.recipe.stop == "probe":
            self.worse += 1
            if line["score"] > self.best[0]:
                self.worse = 0
                self.best = (line["score"], self.step, to_cpu(self.encoder.model.state_dict()))

    def _settle(self) -> None:
        """Bring what the student has learnt into the encoder that is looked at and kept."""
        if self.student is not self.encoder:
            merge(self.student, self.encoder)

    def _check_finite(self, line: dict[str, Any]) -> None:
        if not all(math.isfinite(value) for name, value in line.items() if name != "layers"):
            raise Diverged(
                f"{self.name}: the loss is no longer a number before step {self.step}: lower the "
                f"learning rate ({self.recipe.lr:g})"
            )

    # -- what is on the disk -------------------------------------------------------------------

    def _begin(self) -> None:
        """Start from the initial weights, or from the state in the folder."""
        load_whole(self.encoder.model, self.initial)
        if self.recipe.lora is not None:
            seed = step_seed(self.seed, ADAPTERS)
            self.student = with_adapters(self.encoder, self.recipe.lora, seed)
        self.optimizer = adamw(self.student, self.recipe, self.captures)
        if self.folder and (self.folder / "latest.safetensors").exists():
            self._restore(read_state(self.folder / "latest.safetensors"))
        if self.folder:  # lines that were written after the state are written again
            lines = "".join(f"{json.dumps(line)}\n" for line in self.history)
            io.write_atomic(self.folder / "follow.jsonl", lines)

    def _save(self) -> None:
        assert self.folder is not None
        score, step, state = self.best
        saved = {
            "step": self.step,
            "model": whole_state(self.student.model),
            "optimizer": self.optimizer.state_dict(),
            "sums": self.sums,
            "counts": self.counts,
            "history": self.history,
            "best": {"score": score, "step": step, "state": state},
            "worse": self.worse,
            "seconds": self.seconds,
        }
        io.write_atomic(self.folder / "latest.safetensors", state_bytes(saved))

    def _restore(self, saved: dict[str, Any]) -> None:
        self.step, self.worse, self.seconds = saved["step"], saved["worse"], saved["seconds"]
        load_whole(self.student.model, saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.captures:
            set_rate(self.optimizer, self.recipe.rate(self.step), self.encoder.device)
        device = self.encoder.device
        self.sums = {name: total.to(device) for name, total in saved["sums"].items()}
        self.counts, self.history = saved["counts"], saved["history"]
        best = saved["best"]
        self.best = (best["score"], best["step"], best["state"])

    def _end(self) -> Trained:
        """Keep the best weights, or the last, and write them where there is a folder."""
        self._settle()
        self.repeated = {}  # graphs hold memory
        model, kept = self.encoder.model, self.step
        if self.recipe.stop == "probe":
            _, kept, state = self.best
            model.load_state_dict(state)
        model.eval()
        self.optimizer.zero_grad()
        trained = Trained(
            self.name,
            to_cpu(model.state_dict()),
            kept,
            self.step,
            self.history,
            self.seconds,
            self.teacher.online if self.teacher else None,
        )
        if self.folder:
            write_trained(self.folder, trained)
        return trained
