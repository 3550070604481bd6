"""Run a study: fix the plan, tune, run what is pending, and end in verdicts and a page.

result = run_study("lab/routers", scale="smoke", out="runs/routers")

One process at a time works in the folder. It can be stopped at any moment, by Ctrl-C or `kill -9`;
the same call continues. Each trial is recorded as it ends, and verdicts are computed only when all
have ended.
"""

from __future__ import annotations

import errno
import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import io
from ..report import study_page
from ..train import find_device
from .executors import Executor, InProcess, Processes
from .executors.local import wait_for_workers
from .loading import load_study
from .plan import parse_time
from .run import Run
from .study import Study


def run_study(
    reference: str,
    *,
    scale: str = "small",
    seeds: int | None = None,
    out: str | Path | None = None,
    device: str = "cpu",
    workers: int = 1,
    ray: str | None = None,
    equal: str | None = None,
    budget: str | float | None = None,
    arms: Sequence[str] | None = None,
    pilot: int | None = None,
    most: int | None = None,
    wait: float | None = None,
    console: Console | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Run a study to its end, or continue it; return what is in result.json.

    budget: seconds, or text such as "10m". equal: what a budget gives every trial the same of:
    "flops" (the default), "examples" or "time". arms: some of the study's. pilot: seeds of a pilot
    that fixes the number of seeds. most: where it asks for more, this number. command: what to
    print as the command that continues.
    """
    asked: dict[str, Any] = {"seeds": seeds, "device": device, "workers": workers, "ray": ray}
    asked |= {
        "equal": equal,
        "budget": budget,
        "arm": list(arms or ()),
        "pilot": pilot,
        "most": most,
    }
    if most is not None and pilot is None:
        raise ValueError("--most goes with --pilot; without a pilot say --seeds")
    run = open_run(
        reference,
        scale=scale,
        out=out,
        device=device,
        arms=arms,
        console=console,
        executor=choose_executor(workers, ray, device),
    )
    seconds = None if budget is None else parse_time(budget)
    run.command = command or command_line(reference, scale, run.folder, asked)
    with io.lease(run.folder, wait=wait):
        wait_for_workers(run.folder)
        try:
            run.draft_plan(seeds, pilot, seconds, equal)
            run.begin()
            result = run.to_the_end(pilot, most)
            write_page(run, result)
        except KeyboardInterrupt:
            done = len(run.store.finished())
            run.say(f"Stopped; {done} trials are done and kept. To continue: {run.command}")
            raise
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise OSError(
                f"the disk of {run.folder} is full; what is done is kept. Make room, and continue: "
                f"{run.command}"
            ) from error
        tell_failures(run, result)
    return result


def open_run(
    reference: str,
    *,
    scale: str = "small",
    out: str | Path | None = None,
    device: str = "cpu",
    arms: Sequence[str] | None = None,
    console: Console | None = None,
    executor: Executor | None = None,
) -> Run:
    """A run as it stands in its folder; nothing is written."""
    study = load_study(reference)
    study.scale(scale)
    run = Run(
        study=study,
        reference=reference,
        scale=scale,
        folder=default_folder(study.name, scale) if out is None else Path(out),
        device=device,
        arms=choose_arms(study, arms),
        console=console or Console(),
        executor=executor or InProcess(),
    )
    run.check_folder()
    return run


def default_folder(name: str, scale: str) -> Path:
    """Where a study runs unless told otherwise."""
    return Path("runs") / name.replace("/", "--") / scale


def choose_arms(study: Study, names: Sequence[str] | None) -> list[str]:
    """The arms of that name, in the order of the study; all where none is named."""
    for name in names or ():
        if name not in study.arms:
            raise ValueError(
                f"study {study.name!r} has no arm {name!r}; it has {', '.join(study.arms)}"
            )
    return [arm for arm in study.arms if not names or arm in names]


def choose_executor(workers: int, ray: str | None, device: str) -> Executor:
    """In this process for one worker, else in several; on a cluster where there is an address."""
    if workers < 1:
        raise ValueError(f"there must be at least one worker, not {workers}")
    if ray is not None:
        from .executors.ray import RayExecutor

        if workers > 1:
            raise ValueError("give local workers or a Ray cluster, which has its own, not both")
        if device.partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"a Ray cluster computes on cpu or cuda, not {device!r}")
        return RayExecutor(ray)  # whose nodes need the device, and we do not
    find_device(device)
    return InProcess() if workers == 1 else Processes(workers)


def command_line(reference: str, scale: str, folder: Path, asked: Mapping[str, Any]) -> str:
    """The command that continues a run and, elsewhere, reproduces it."""
    words = ["moiety", "study", "run", reference, "--scale", scale, "--out", str(folder)]
    for name, value in asked.items():
        values = value if isinstance(value, list) else [value]
        default = {"device": "cpu", "workers": 1}.get(name)
        if name == "budget" and isinstance(value, int | float):
            values = [f"{value:g}s"]
        for each in values:
            if each is not None and each != default:
                words += [f"--{name}", str(each)]
    return shlex.join(words)


def write_page(run: Run, result: Mapping[str, Any]) -> None:
    """Write report.html, where all trials have ended."""
    from .headline import answers  # scipy, which a run needs only at its end

    if "schema" not in result:
        return
    again = f"moiety report {shlex.quote(str(run.folder))}"
    try:
        page = study_page(result, answers(result))
        path = io.write_atomic(run.folder / "report.html", page)
    except Exception as error:  # the trials are done and their result is written: they count
        said = f"{type(error).__name__}: {error}"
        run.say(f"The result is written, but its page failed ({said}); to make it: {again}")
        return
    run.say(f"The page: {path}")
    if importlib.util.find_spec("plotly") is None:
        run.say(
            "It is written without plots, because plotly is missing: pip install 'moiety[lab]', "
            f"then {again}"
        )


def tell_failures(run: Run, result: Mapping[str, Any]) -> None:
    """Say how many trials failed, and where their tracebacks are."""
    failures = result["failures"]
    if failures:
        arms = ", ".join(sorted({failure["arm"] for failure in failures}))
        run.say(
            f"{len(failures)} trials failed (of {arms}); their tracebacks are in "
            f"{run.folder / 'trials'}; to try them again: {run.command}"
        )
