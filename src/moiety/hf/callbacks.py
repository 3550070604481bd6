"""`RoutingHealth`: what the experts do while a `transformers.Trainer` trains.

trainer = Trainer(..., callbacks=[moiety.RoutingHealth(every=100)])
trainer.train()                     # routing_health.jsonl and .html in the output folder
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
import weakref
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ..io import append_line, read_lines, write_atomic
from ..report import course_page
from ..watch import Routes, watch

NAME = "routing_health"


class RoutingHealth(TrainerCallback):
    """Summarise the routing of every `every` optimizer steps: to a file, to the logs, to a page.

    every        optimizer steps of a window
    out          folder of routing_health.jsonl and .html; None: the trainer's output folder
    dead_after   warn, once, of an expert without a token for as many windows in a row

    Only batches of training count, only of the first process, and only counts are kept.
    """

    def __init__(
        self, every: int = 100, out: str | Path | None = None, dead_after: int = 3
    ) -> None:
        for name, value in (("every", every), ("dead_after", dead_after)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
        self.every, self.out, self.dead_after = every, out, dead_after
        self._routes: Routes | None = None
        self._leave = lambda: None

    # -- begin and end --------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._leave()
        self._routes = None
        if not state.is_world_process_zero:
            return
        self._go_first(inspect.currentframe())
        self._folder = Path(self.out or args.output_dir)
        with ExitStack() as watching:
            routes = watching.enter_context(watch(kwargs["model"], keep="load"))
            routes.collects = False  # who trains still has to see to the balance losses
            self._rows = self._resume(state.global_step)
            # Training that raises never comes to its end: then the watch goes with this object.
            self._leave = weakref.finalize(self, watching.pop_all().close)
        self._routes = routes
        self._ranks = args.world_size
        self._load: dict[str, list[float]] = {}
        self._since, self._counted = state.global_step, 0
        self._streak: Counter[tuple[str, int]] = Counter()
        self._pending: dict[str, float] = {}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._routes is None:
            return
        self._forget_evaluation()
        if state.global_step > self._since:
            self._close_window(state.global_step)
        self._page()
        self._leave()
        self._routes = None

    def _go_first(self, frame: Any) -> None:
        """Come before the callbacks that write logs away, which see only what is there by then.

        A callback is told everything but who calls it, so that the caller is read off the stack.
        """
        while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
            frame = frame.f_back
        if frame is not None:
            caller = frame.f_locals["self"]
            caller.callbacks = [self, *(each for each in caller.callbacks if each is not self)]

    # -- steps ----------------------------------------------------------------------------------

    # What a model sees between the end of a step and the begin of the next is not training.

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._forget_evaluation()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._forget_evaluation()  # now, and not at the end of a long evaluation

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count()
        if self._routes is not None and state.global_step % self.every == 0:
            self._close_window(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._routes is not None:
            self._page()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any
    ) -> None:
        if self._routes is None or logs is None:
            return
        logs.update(self._pending)
        if state.log_history:  # a copy was stored before any callback could add to it
            state.log_history[-1].update(self._pending)
        self._pending = {}

    def _count(self) -> None:
        if self._routes is not None:
            self._counted = len(self._routes.records)

    def _forget_evaluation(self) -> None:
        if self._routes is not None:
            del self._routes.records[self._counted :]

    # -- windows --------------------------------------------------------------------------------

    def _close_window(self, step: int) -> None:
        assert self._routes is not None
        layers = {name: dataclasses.asdict(s) for name, s in self._routes.summary().items()}
        row = {"step": step, "steps": step - self._since, "layers": layers}
        self._routes.clear()
        self._since, self._counted = step, 0
        append_line(self._file, json.dumps(row))
        self._load = {name: layer["load"] for name, layer in layers.items()}
        self._rows.append(_slim(row))
        self._pending = _for_logs(layers)
        self._warn_of_the_dead(step, layers)

    def _warn_of_the_dead(self, step: int, layers: dict[str, dict]) -> None:
        dead = {(name, expert) for name, layer in layers.items() for expert in layer["dead"]}
        self._streak = Counter({each: self._streak[each] + 1 for each in dead})
        for name, expert in sorted(dead):
            if self._streak[name, expert] == self.dead_after:
                warnings.warn(
                    f"step {step}, layer {name}: expert {expert} got no token for "
                    f"{self.dead_after} windows of {self.every} steps in a row",
                    stacklevel=2,
                )

    # -- files ----------------------------------------------------------------------------------

    @property
    def _file(self) -> Path:
        return self._folder / f"{NAME}.jsonl"

    def _resume(self, step: int) -> list[dict]:
        """The windows before `step`; what a run that is repeated from there wrote after it goes.

        The file is there from now on, so that a folder nobody may write to is known at the start.
        """
        rows = [json.loads(line) for line in read_lines(self._file)]
        rows = [row for row in rows if row["step"] <= step]
        write_atomic(self._file, "".join(f"{json.dumps(row)}\n" for row in rows))
        return [_slim(row) for row in rows]

    def _page(self) -> None:
        if self._rows:
            html = course_page(self._rows, self._load, every=self.every, ranks=self._ranks)
            write_atomic(self._folder / f"{NAME}.html", html)


def _slim(row: dict) -> dict:
    """A window without the load of every expert: what the time course needs."""
    layers = {
        name: {key: value for key, value in layer.items() if key not in ("load", "padding")}
        for name, layer in row["layers"].items()
    }
    return {**row, "layers": layers}


def _for_logs(layers: dict[str, dict]) -> dict[str, float]:
    """Effective experts of every layer, and the worst of what should be zero everywhere."""
    out = {f"routing/{name}/effective": layer["effective"] for name, layer in layers.items()}
    out["routing/dead"] = float(sum(len(layer["dead"]) for layer in layers.values()))
    out["routing/drop_rate"] = max((layer["drop_rate"] for layer in layers.values()), default=0.0)
    return out
