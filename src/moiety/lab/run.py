"""One run of a study in its folder: its plan, its trials, its result."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import io
from .executors import Executor, Job, Outcome
from .plan import PILOT_SEED, Plan, check_pilot, fix_budget, fix_seeds, seeds_from_pilot
from .progress import Course
from .store import Store, Trial
from .study import Study
from .trials import Maker


def read_looks(folder: Path) -> list[dict[str, Any]]:
    """Each time that verdicts were seen."""
    path = folder / "looks.json"
    return io.read_json(path) if path.exists() else []


class Run:
    """One run of a study in its folder, whose lease the caller holds."""

    def __init__(
        self,
        *,
        study: Study,
        reference: str,
        scale: str,
        folder: Path,
        device: str,
        arms: list[str],
        console: Console,
        command: str,
        executor: Executor,
        workers: int,
    ) -> None:
        if reference.endswith((".py", ".toml")):
            reference = str(Path(reference).resolve())  # a worker may be in another folder
        self.study, self.reference, self.scale, self.folder = study, reference, scale, folder
        self.device, self.arms, self.console, self.command = device, arms, console, command
        self.executor, self.workers = executor, workers
        self.store = Store(folder)
        self.plan: Plan = {}
        self.make = Maker(study, scale, device, self.plan)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    # -- before the trials -----------------------------------------------------------------------

    def begin(self) -> None:
        """Say in the folder what runs here; refuse a folder of another study or scale."""
        self.study.scale(self.scale)
        path = self.folder / "study.json"
        before = io.read_json(path) if path.exists() else {}
        for name, value in (("name", self.study.name), ("scale", self.scale)):
            if before and before[name] != value:
                raise ValueError(
                    f"{self.folder} holds a run of {name} {before[name]}, not {value}; "
                    "choose another folder with --out"
                )
        now = datetime.now().astimezone().isoformat("T", "seconds")
        about = {"name": self.study.name, "reference": self.reference, "scale": self.scale}
        about |= {"device": self.device, "command": self.command}
        io.write_json(path, {**about, "created": before.get("created", now)})

    def fix_plan(
        self, seeds: int | None, pilot: int | None, seconds: float | None, equal: str | None
    ) -> None:
        """Settle seeds and examples, and store them before the first trial that counts."""
        plan, looks = self.plan, read_looks(self.folder)
        path, scale = self.folder / "plan.json", self.study.scale(self.scale)
        if path.exists():
            plan.update(io.read_json(path))
        if pilot is not None:
            check_pilot(self.study, looks, pilot, seeds)
        fix_seeds(plan, looks, seeds, scale.seeds)
        known = {*plan.get("arms", []), *self.arms}
        plan["arms"] = [arm for arm in self.study.arms if arm in known]
        search = self.study.search
        fix_budget(
            plan,
            self.study,
            {arm: self.make.settings(arm) for arm in plan["arms"]},
            seconds=scale.budget if seconds is None and not plan.get("budget") else seconds,
            equal=equal,
            device=self.device,
            workers=self.workers,
            tune=search.count(self.scale) * search.seeds if search else 0,
        )
        io.write_json(path, plan)
        if pilot is not None and (plan.get("pilot") or {}).get("seeds") != pilot:
            plan.update(self._pilot(pilot))
            io.write_json(path, plan)
            self.say(f"The pilot asks for {plan['seeds']} seeds.")

    def _pilot(self, seeds: int) -> Plan:
        """Run a pilot, and plan with its spread."""
        blocks = self.make.blocks(self.arms, seeds, "pilot", first=PILOT_SEED)
        wanted = [t for block in blocks for t in block if t.seed < PILOT_SEED + seeds]
        self.run("pilot", blocks, wanted)
        done = self.store.finished()
        lost = [trial.key for trial in wanted if trial.key not in done]
        if lost:
            raise ValueError(
                f"{len(lost)} trials of the pilot failed, such as {self.folder}/trials/{lost[0]}"
                ".json; mend the study and run again"
            )
        return seeds_from_pilot(self.study, [done[trial.key] for trial in wanted], seeds)

    # -- the trials ------------------------------------------------------------------------------

    def to_the_end(self) -> dict[str, Any]:
        """Tune, run every pending trial, and finish."""
        if self.study.search:
            tuner = self._tuner(self.arms)
            while blocks := tuner.next(self.store):
                self.run("search", blocks, [t for block in blocks for t in block], retry=False)
        tuned = self._tuned(self.arms)
        arms = [arm for arm in self.arms if tuned.get(arm, {}) is not None]
        blocks = self.make.blocks(arms, self.plan["seeds"], "main", tuned)
        self.run("trials", blocks, self._counted(blocks))
        return self._finish()

    def _finish(self) -> dict[str, Any]:
        """Compute the verdicts, if every trial of the plan has ended."""
        from .result import summarise

        arms, account = self.plan["arms"], None
        if self.study.search:
            tuner = self._tuner(arms)
            if tuner.next(self.store):
                return self._unfinished()
            account = tuner.account(self.store)
        tuned = self._tuned(arms)
        arms = [arm for arm in arms if tuned.get(arm, {}) is not None]
        blocks = self.make.blocks(arms, self.plan["seeds"], "main", tuned)
        trials = self._counted(blocks)
        if self.store.pending(trials, retry=False):
            return self._unfinished()
        result = summarise(
            self.study,
            self.store,
            trials,
            scale=self.scale,
            plan=self.plan,
            looks=read_looks(self.folder),
            command=self.command,
            device=self.device,
            tuning=account,
        )
        io.write_json(self.folder / "looks.json", result["looks"])  # first: it is paid for
        io.write_json(self.folder / "result.json", result)
        return result

    def _unfinished(self) -> dict[str, Any]:
        """What there is to say when some arms of the plan were not asked for this time."""
        self.say("Verdicts wait for the other arms of the plan: run again without --arm.")
        wanted = [{"arm": r["arm"], "seed": r["seed"]} for r in self.store.failed().values()]
        return {"study": self.study.name, "failures": [f for f in wanted if f["arm"] in self.arms]}

    def run(
        self, title: str, blocks: list[list[Trial]], wanted: list[Trial], retry: bool = True
    ) -> None:
        """Run the blocks that hold a pending trial of `wanted`, and record each as it ends."""
        pending = self.store.pending(wanted, retry=retry)
        keys = {trial.key for trial in pending}
        jobs = [
            Job(self.reference, block, self.device, self.study.threads)
            for block in blocks
            if any(trial.key in keys for trial in block)
        ]
        with Course(self.console, self.study, title, pending) as course:
            outcomes = self.executor.run(jobs, self.store, course.tick)
            with contextlib.closing(outcomes):  # type: ignore[type-var]  # ends the workers at once
                for outcome in outcomes:
                    if outcome.trial.key in keys:
                        self._record(outcome)
                        course.end(outcome)
                    else:  # ran along in its block, and is recorded already or not asked for
                        self.store.checkpoint(outcome.trial).remove()

    def _record(self, outcome: Outcome) -> None:
        trial = outcome.trial
        about = {"duration": outcome.duration, "versions": outcome.versions, "extra": outcome.extra}
        if outcome.traceback is not None or outcome.metrics is None:
            self.store.fail(trial, outcome.traceback or "no metrics", **about)  # type: ignore[arg-type]
            return
        metrics = dict(outcome.metrics)
        if trial.settings["stage"] == "tune":  # what a test says must not be there to choose by
            kinds = self.study.metrics
            metrics = {n: v for n, v in metrics.items() if kinds[n].split == "validation"}
        self.store.finish(trial, metrics, **about)  # type: ignore[arg-type]

    def _tuner(self, arms: Sequence[str]) -> Any:
        from .tuning import Tuner

        def make(arm: str, seed: int, tuned: Any) -> Trial:
            return self.make.trial(arm, seed, "tune", tuned)

        return Tuner(self.study, scale=self.scale, make=make, arms=arms)

    def _tuned(self, arms: Sequence[str]) -> dict[str, Any]:
        return self._tuner(arms).chosen(self.store) if self.study.search else {}

    def _counted(self, blocks: list[list[Trial]]) -> list[Trial]:
        """The trials of blocks that are within the planned seeds."""
        return [t for block in blocks for t in block if t.seed < self.plan["seeds"]]
