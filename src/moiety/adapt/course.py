"""What the stages of one adaptation share: the initial weights, the data, and a folder.

plan.json             the settings; a folder that was begun with others is refused
corpus/  source/      token ids of texts (see `tokens`)
warm-up/              of a head that the model lacks (see `heads`)
initial.safetensors   the weights that every stage starts from
further/  round-1/    the stages (see `stage`); a cache lives in that of its round, while needed
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import cost, io
from ..modes import at_rest
from ..train.draws import step_seed
from ..train.fit import seeded
from ..train.state import read_state, state_bytes
from .cache import Inputs, check_room, look_through
from .encoders import MASK
from .follow import Follow
from .heads import warm_up
from .lora import with_adapters
from .objective import Objective
from .recipe import WARM_STEPS, Recipe
from .stage import FURTHER, Stage
from .teachers import cache_key, frozen, make_teacher, why_online
from .together import Member
from .trained import State, Trained, read_trained, to_cpu, whole_state

if TYPE_CHECKING:
    from .encoders import Batch, Encoder

Tick = Callable[[str, float], None]


@dataclass(kw_only=True)
class Course:
    """One adaptation: `prepare` it once, then run its stages in order."""

    encoder: Encoder
    rows: Any
    seed: int
    follow: Follow
    out: Path | None = None
    cache: bool = True
    cache_limit: int | None = None
    cache_dtype: str = "float32"
    save_every: float = 30.0
    tick: Tick | None = None
    capture: bool = False
    crew: Member | None = None
    warm_steps: int = WARM_STEPS  # of a head that had to be made
    initial: State = dataclasses.field(default_factory=dict)
    inputs: Inputs = dataclasses.field(default_factory=lambda: Inputs(None, 0))

    def prepare(
        self, plan: Mapping[str, Any], recipe: Recipe | None = None, objective: Objective = FURTHER
    ) -> None:
        """Settle the plan and the initial weights; a cache has to have room on the disk."""
        self.inputs = look_through(self.encoder, self.rows)
        if self.out is not None:
            if recipe is not None and not (self.out / "plan.json").exists():
                self._check_room(recipe, objective)
            key = self.encoder.weights_key(whole=True)  # a head that is made follows from the seed
            same = {
                "model": key,
                "input": self.inputs.digest,
                "seen": self.follow.key(self.encoder),
            }
            warm = {"warm_steps": self.warm_steps} if self.encoder.made else {}
            settle(self.out, {**plan, **same, **warm})
        self.initial = self._initial()
        self.encoder.made = []

    def _check_room(self, recipe: Recipe, objective: Objective) -> None:
        assert self.out is not None
        with at_rest(self.encoder.model):  # a router that counts is not to see this
            key = cache_key(self.encoder, objective, self.rows, self.inputs, self.cache_dtype)
        if objective.distill_weight and not why_online(
            self.encoder, objective, key, **self.caching(recipe, objective)
        ):
            check_room(self.out, key.bytes)

    def caching(self, recipe: Recipe, objective: Objective) -> dict[str, Any]:
        """What decides whether a teacher is cached, see `why_online`."""
        asked = recipe.steps * min(recipe.batch, len(self.rows)) // objective.distill_every
        return {"cache": self.cache, "limit": self.cache_limit, "uses": asked}

    @property
    def weights(self) -> State:
        """The initial weights as `load_state_dict` takes them."""
        return {name: self.initial[name] for name in self.encoder.model.state_dict()}

    def _initial(self) -> State:
        """The weights of the start, with a head that is warm; the same for all stages."""
        path = None if self.out is None else self.out / "initial.safetensors"
        if path is not None and path.exists():
            return read_state(path)
        warm_up(
            self.encoder,
            self.rows,
            steps=self.warm_steps,
            seed=self.seed,
            folder=self._folder("warm-up"),
            save_every=self.save_every,
            tick=self.tick,
        )
        initial = to_cpu(whole_state(self.encoder.model))
        if path is not None:
            io.write_atomic(path, state_bytes(initial))
        return initial

    # -- stages --------------------------------------------------------------------------------

    def further(self, recipe: Recipe) -> Trained:
        """Further pre-training: eq. 2 alone."""
        return self._stage("further", recipe, folder=self._folder("further")).run()

    def distil(
        self, number: int, recipe: Recipe, objective: Objective, teacher: Mapping[str, Tensor]
    ) -> Trained:
        """A round: the student starts from the initial weights, the teacher has these."""
        name = f"round-{number}"
        folder = self._folder(name)
        done = read_trained(folder)
        if done is not None:
            assert folder is not None
            shutil.rmtree(folder / "cache", ignore_errors=True)  # of a process killed in between
            return done
        if not objective.distill_weight:
            return self._stage(name, recipe, objective=objective, folder=folder).run()
        with tempfile.TemporaryDirectory() as made:
            return self._taught(name, recipe, objective, teacher, folder, Path(made))

    def _taught(
        self,
        name: str,
        recipe: Recipe,
        objective: Objective,
        state: Mapping[str, Tensor],
        folder: Path | None,
        made: Path,
    ) -> Trained:
        encoder = self.encoder.copy()
        encoder.model.load_state_dict(dict(state))
        teacher = make_teacher(
            encoder,
            objective,
            self.rows,
            self.inputs,
            (folder or made) / "cache",
            dtype=self.cache_dtype,
            tick=None if self.tick is None else partial(self.tick, f"{name}, cache"),
            **self.caching(recipe, objective),
        )
        done = False
        try:
            words: dict[str, Any] = {"objective": objective, "teacher": teacher}
            trained = self._stage(name, recipe, folder=folder, **words).run()
            done = True
            return trained
        finally:
            teacher.close(done or folder is None)  # nobody goes on in a folder that is lost

    def _stage(self, name: str, recipe: Recipe, **words: Any) -> Stage:
        return Stage(
            name,
            self.encoder,
            self.rows,
            recipe,
            seed=self.seed,
            initial=self.initial,
            follow=self.follow,
            save_every=self.save_every,
            tick=self.tick,
            capture=self.capture,
            crew=self.crew,
            **words,
        )

    def _folder(self, name: str) -> Path | None:
        return None if self.out is None else self.out / name

    # -- what it costs -------------------------------------------------------------------------

    def flops(self, recipe: Recipe, objective: Objective = FURTHER) -> dict[str, float]:
        """Counted FLOPs of a step on the first rows, forward and backward; nothing is trained.

        further          the masked pass alone
        cached, online   with the second term, mean over `distill_every` steps; the teacher's pass
                         is in `online` only
        build            one pass of the teacher over all rows
        """
        size = min(recipe.batch, len(self.rows))
        encoder = self.encoder.copy()
        if recipe.lora is not None:
            encoder = with_adapters(encoder, recipe.lora, self.seed)
        batch, masks, times = few_masked(encoder, self.rows, size, self.seed)
        with seeded(step_seed(self.seed, 0), encoder.device):
            encoder.model.train()
            further = times * cost.flops(lambda: FURTHER.backward(encoder, batch, masks))
            counted = {"further": further}
            if not objective.distill_weight:
                return counted
            other = frozen(self.encoder.copy())
            target = objective.target(other, batch, masks)
            taught = times * cost.flops(lambda: objective.backward(encoder, batch, masks, target))
            teacher = times * cost.flops(lambda: objective.target(other, batch, masks))
            rest = further if objective.mae_weight else 0.0
            every = objective.distill_every
            cached = (taught + (every - 1) * rest) / every
            counted |= {"cached": cached, "online": cached + teacher / every}
            return {**counted, "build": teacher * len(self.rows) / size}


def few_masked(encoder: Encoder, rows: Any, size: int, seed: int) -> tuple[Batch, Tensor, float]:
    """Some of the first rows and their masks, and how many times as many the first `size` are."""
    whole = encoder.batch(rows.take(torch.arange(size)))
    masks = encoder.mask(whole, torch.Generator().manual_seed(seed))
    batch, times = encoder.few({**whole, MASK: masks})
    return batch, batch.pop(MASK), times


def settle(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the settings of a folder down, or raise where it was begun with others."""
    path = folder / "plan.json"
    if not path.exists():
        io.write_json(path, dict(plan))
        return
    found = io.read_json(path)
    other = [name for name in sorted({*plan, *found}) if found.get(name) != plan.get(name)]
    if not other:
        return
    told = [f"{name} {_told(found.get(name))} (now {_told(plan.get(name))})" for name in other]
    said = f"{folder} was begun with {', '.join(told)}"
    if "input" in found:  # digests, not what was asked for
        # Another model may read the same examples differently, so that it is named first.
        if digest := next((name for name in ("model", "teacher") if name in other), ""):
            said = f"{folder} was begun with another {digest}"
        elif "input" in other or "seen" in other:
            said = f"the examples have changed since {folder} was begun"
    raise ValueError(f"{said}: give the same, or another folder")


def _told(value: Any) -> str:
    return "at its default" if value is None else f"{value!r:.40}"
