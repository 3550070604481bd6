"""One run of a study in its folder: its plan, its trials, its result."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import io
from ..data.named import MissingData
from .executors import Executor, Job, Outcome
from .looks import now
from .plan import (
    PILOT_SEED,
    Plan,
    asked_by_pilot,
    check_pilot,
    fix_budget,
    fix_seeds,
    seeds_from_pilot,
)
from .progress import Course
from .shapes import LOOK, check, one_or_more, plain, text
from .store import Store, Trial
from .study import Study
from .trials import Maker

ABOUT = dict.fromkeys(("name", "reference", "scale", "device", "command", "created", "code"), text)
ABOUT |= {"seeds": one_or_more}


def read_looks(folder: Path) -> list[dict[str, Any]]:
    """Each time that verdicts were seen."""
    return _read(folder / "looks.json", [LOOK]) or []


def read_plan(folder: Path) -> Plan:
    """The plan that a folder is fixed to, if any."""
    return _read(folder / "plan.json", plain) or {}


def read_about(folder: Path) -> dict[str, Any]:
    """What runs in a folder, if anything."""
    return _read(folder / "study.json", ABOUT) or {}


def _read(path: Path, shape: Any) -> Any:
    """Read a file that a run wrote; None where there is none."""
    if not path.exists():
        return None
    value = io.read_json(path)
    try:
        check(value, shape, path.name)
    except ValueError as error:
        raise ValueError(f"{path} is not as a run wrote it ({error}); restore it") from error
    return value


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
        executor: Executor,
    ) -> None:
        if reference.endswith((".py", ".toml")):
            reference = str(Path(reference).resolve())  # a worker may be in another folder
        self.study, self.reference, self.scale, self.folder = study, reference, scale, folder
        self.device, self.arms, self.console, self.executor = device, arms, console, executor
        self.command = ""  # that continues this run
        self.store = Store(folder)
        self.plan: Plan = {}
        self.make = Maker(study, scale, device, self.plan)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    # -- before the trials -----------------------------------------------------------------------

    def check_folder(self) -> dict[str, Any]:
        """Refuse a folder of another study or scale; return what study.json says."""
        if self.folder.is_file():
            raise ValueError(f"{self.folder} is a file; give a folder for the run with --out")
        before = read_about(self.folder)
        for name, value in (("name", self.study.name), ("scale", self.scale)):
            if before and before[name] != value:
                raise ValueError(
                    f"{self.folder} holds a run of {name} {before[name]}, not {value}; "
                    "choose another folder with --out"
                )
        return before

    def begin(self) -> None:
        """Say in the folder what is planned and what runs here, before the first trial."""
        before, code = self.check_folder(), self._code()
        if before and before["code"] != code and self.store.finished():
            self.say(
                f"The file of {self.study.name} has changed since the trials in {self.folder} were "
                "run; those whose settings are the same are kept. If the change matters to them, "
                "choose another folder with --out."
            )
        self.store_plan()
        created = before.get("created") or now()
        about = {"name": self.study.name, "reference": self.reference, "scale": self.scale}
        about |= {"device": self.device, "command": self.command, "created": created, "code": code}
        io.write_json(self.folder / "study.json", {**about, "seeds": self.plan["seeds"]})

    def _code(self) -> str:
        """A hash of the file that holds the code of a trial."""
        run = inspect.unwrap(self.study.run or self.study.run_block)  # type: ignore[arg-type]
        try:
            file = Path(inspect.getfile(run))
        except TypeError:  # an object with a method, as in a comparison: its settings say it all
            return ""
        return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.exists() else ""

    def draft_plan(
        self, seeds: int | None, pilot: int | None, seconds: float | None, equal: str | None
    ) -> None:
        """Settle seeds and examples: as stored, and else as asked or as the scale says."""
        plan, looks, scale = self.plan, read_looks(self.folder), self.study.scale(self.scale)
        plan.update(read_plan(self.folder))
        if pilot is not None and not self._piloted(pilot):
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
            executor=self.executor,
            job=self.job([]),
            tune=search.count(self.scale) * search.seeds if search else 0,
        )

    def store_plan(self) -> None:
        io.write_json(self.folder / "plan.json", self.plan)

    def pilot(self, seeds: int, most: int | None) -> None:
        """Run a pilot, and fix the number of seeds by its spread, if that has not been done."""
        from .ledger import family_size

        if self._piloted(seeds):
            return
        blocks = self._blocks(self.arms, seeds, "pilot", PILOT_SEED)
        wanted = [t for block in blocks for t in block if t.seed < PILOT_SEED + seeds]
        self.run("pilot", blocks, wanted)
        done = self.store.finished()
        lost = [trial.key for trial in wanted if trial.key not in done]
        if lost:
            raise ValueError(
                f"{len(lost)} trials of the pilot failed, such as {self.folder}/trials/{lost[0]}"
                ".json; mend the study and run again"
            )
        records, family = [done[trial.key] for trial in wanted], family_size(self.study)
        self.plan.update(seeds_from_pilot(self.study, records, seeds, family, most))
        self.store_plan()
        asked = asked_by_pilot(self.plan) or "more than 1000"
        less = f"; --most makes it {most}" if asked != self.plan["seeds"] else ""
        self.say(f"The pilot asks for {asked} seeds{less}.")

    def _piloted(self, seeds: int) -> bool:
        return (self.plan.get("pilot") or {}).get("seeds") == seeds

    # -- the trials ------------------------------------------------------------------------------

    def to_the_end(self, pilot: int | None = None, most: int | None = None) -> dict[str, Any]:
        """Tune, fix the number of seeds by a pilot if wanted, run what is pending, and finish."""
        if self.study.search:
            tuner = self.tuner(self.arms)
            while blocks := tuner.next(self.store):
                self.run("search", blocks, [t for block in blocks for t in block], retry=False)
            self._tell_lost()
        if pilot is not None:
            self.pilot(pilot, most)
        blocks = self._blocks(self.arms, self.plan["seeds"], "main")
        self.run("trials", blocks, self.planned(self.arms) or [])
        return self._finish()

    def _tell_lost(self) -> None:
        """Say which arms the search left without settings; without any arm, that is the end."""
        lost = self.without_settings(self.arms)
        if len(lost) == len(self.arms):
            raise ValueError(" ".join(lost.values()))
        for arm, reason in lost.items():
            self.say(f"{arm} is not measured: {reason}")

    def without_settings(self, arms: Sequence[str]) -> dict[str, str]:
        """Why there is nothing to run, for each arm that a search that has ended left so."""
        if not self.study.search or self.tuner(arms).next(self.store):
            return {}
        from .tuning import without_settings

        return without_settings(self.tuner(arms).account(self.store))

    def _finish(self) -> dict[str, Any]:
        """Compute the verdicts, if every trial of the plan has ended."""
        from .result import summarise

        trials = self.planned(self.plan["arms"])
        if trials is None or self.store.pending(trials, retry=False):
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
            tuning=self.tuner(self.plan["arms"]).account(self.store) if self.study.search else None,
        )
        io.write_json(self.folder / "looks.json", result["looks"])  # first: it is paid for
        io.write_json(self.folder / "result.json", result)
        if apart := len(self.study.claims) - len(result["claims"]):
            self.say(f"{apart} claims of the study are on arms that were not run.")
        return result

    def _unfinished(self) -> dict[str, Any]:
        """What there is to say when some arms of the plan were not asked for this time."""
        self.say("Verdicts wait for the other arms of the plan: run again without --arm.")
        failed, mine = self.store.failed(), self.planned(self.arms) or []
        failures = [{"arm": t.arm, "seed": t.seed} for t in mine if t.key in failed]
        return {"study": self.study.name, "failures": failures}

    def run(
        self, title: str, blocks: list[list[Trial]], wanted: list[Trial], retry: bool = True
    ) -> None:
        """Run the blocks that hold a pending trial of `wanted`, and record each as it ends."""
        pending = self.store.pending(wanted, retry=retry)
        keys = {trial.key for trial in pending}
        jobs = [self.job(block) for block in blocks if any(trial.key in keys for trial in block)]
        with Course(self.console, self.study, title, pending) as course:
            outcomes = self.executor.run(jobs, self.store, course.tick)
            with contextlib.closing(outcomes):  # type: ignore[type-var]  # ends the workers at once
                for outcome in outcomes:
                    if said := missing_data(outcome.traceback):  # for all trials alike
                        raise ValueError(said)
                    if outcome.trial.key in keys:
                        self._record(outcome)
                        course.end(outcome)
                    else:  # ran along in its block, and is recorded already or not asked for
                        self.store.checkpoint(outcome.trial).remove()

    def job(self, trials: list[Trial]) -> Job:
        """What one worker runs at once."""
        return Job(self.reference, trials, self.device, self.study.threads)

    def _record(self, outcome: Outcome) -> None:
        """Write how a trial ended."""
        trial, duration, versions = outcome.trial, outcome.duration, outcome.versions
        if outcome.metrics is None:
            said = outcome.traceback or "no metrics"
            self.store.fail(trial, said, duration=duration, versions=versions, extra=outcome.extra)
            return
        if trial.settings["stage"] == "tune":  # nobody, not even a reader, chooses by the test
            kinds, found = self.study.metrics, outcome.metrics
            outcome.metrics = {n: v for n, v in found.items() if kinds[n].split == "validation"}
        metrics, extra = outcome.metrics, outcome.extra
        self.store.finish(trial, metrics, duration=duration, versions=versions, extra=extra)

    def tuner(self, arms: Sequence[str]) -> Any:
        """The search of the study for these arms."""
        from .tuning import Tuner

        def make(arm: str, seed: int, tuned: Any) -> Trial:
            return self.make.trial(arm, seed, "tune", tuned)

        return Tuner(self.study, scale=self.scale, make=make, arms=arms)

    def planned(self, arms: Sequence[str]) -> list[Trial] | None:
        """The main trials of these arms; None while the search has not found their settings."""
        if self.study.search and self.tuner(arms).next(self.store):
            return None
        seeds = self.plan["seeds"]
        trials = [trial for block in self._blocks(arms, seeds, "main") for trial in block]
        return [trial for trial in trials if trial.seed < seeds]

    def _blocks(
        self, arms: Sequence[str], seeds: int, stage: str, first: int = 0
    ) -> list[list[Trial]]:
        """Blocks of trials with tuned settings, without the arms that a search found none for."""
        tuned = self.tuner(arms).chosen(self.store) if self.study.search else {}
        left = [arm for arm in arms if tuned.get(arm, {}) is not None]
        return self.make.blocks(left, seeds, stage, tuned, first)


def missing_data(said: str | None) -> str | None:
    """What a trial said that ended for want of its data set, by its traceback."""
    name, _, sentence = (said or "").rstrip().rpartition("\n")[2].partition(": ")
    return sentence if name.endswith("." + MissingData.__name__) else None
