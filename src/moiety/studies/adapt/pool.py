"""The adapted encoders that the studies of adaptation share; `tunes` has what becomes of them.

    case = case_of(run.settings, run.seed, run.device)
    encoder = adapted(case, plan_of(run.settings))

A `Case` is a source model with the labelled examples of one seed of a target set. An encoder
depends on its case and on its plan: none, further pre-training, or rounds of self-distillation,
each with the plan of its teacher inside. None depends on the study: whoever needs one first makes
it.

    sources.folder()/<source>/<target>-<key>/             a plan: the encoder, adapted.json (last)
    sources.folder()/<source>/<target>-<key>/course/      where its training is now

A source without a head of its own gets one, warmed up once and kept in such a folder, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import io
from ...adapt import further_pretrain, self_distill
from ...adapt.encoders import Encoder
from ...adapt.heads import warm_up
from ...adapt.recipe import WARM_STEPS, Diverged
from ...adapt.rows import Rows
from ...adapt.together import Member, together
from ...train import seeded
from .contrast import contrast
from .corpora import checksums
from .packaged import packaged
from .sources import Source, settings_of, source
from .targets import TARGETS, Examples, Target, load_target

RECIPE = 5  # of what trains here; a change of the code that trains otherwise adds one
CAPTURE = True  # on a GPU, repeat steps as CUDA graphs
Plan = dict[str, Any]  # of an encoder, plain JSON; a teacher's is inside
T = TypeVar("T")

# What a plan takes from the settings of a trial.
TRAINED = ("batch", "lr", "weight_decay", "precision")
MATCHED = ("match", "mae_weight", "distill_every", "match_routing", "norm")


# -- what is asked for -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A source model and the labelled examples of one seed of a target set."""

    source: Source
    target: str
    seed: int
    labels: int | None  # None: as many as the set gives
    length: int | None  # tokens of a text at most
    side: int  # pixels of an image
    parts: int  # of the test, for its own error: see `tables`
    experts: Mapping[str, Any] | None  # words of `upcycle`, where the source becomes a mixture
    device: torch.device
    together: bool = True  # trained with others as one program, where these are alike

    def open(self) -> Target:
        """The target set, its test closed."""
        return load_target(self.target, self.side)

    def rows(self, encoder: Encoder, examples: Examples) -> Rows:
        return examples.rows(encoder, self.length)

    def start(self) -> Encoder:
        """The encoder that every arm starts from, to be read and not to be trained."""
        experts = json.dumps(self.experts, default=dict, sort_keys=True)
        return _start(self.source.path, self.seed, experts, self.device)

    def home(self, plan: Plan | None) -> Path:
        """The folder of an encoder: some words to read, and a hash of all it depends on."""
        asked = {
            "labels": self.labels,
            "length": self.length,
            "files": checksums(self.target),
            "set": asdict(TARGETS[self.target]),
            "experts": None if self.experts is None else dict(self.experts),
            "plan": plan,
            "recipe": RECIPE,
        }
        if not self.together:  # dropout is drawn otherwise
            asked["together"] = False
        return self.source.path / f"{self.target.replace(' ', '-')}-{key_of(asked)}"


@lru_cache(maxsize=8)  # a worker runs block after block of the same sources
def _start(path: Path, seed: int, experts: str, device: torch.device) -> Encoder:
    encoder, words = Encoder.load(path), json.loads(experts)
    if words:
        from ...hf import upcycle

        with seeded(seed):  # of the routers
            encoder.model = upcycle(encoder.model, **words)
    return encoder.to(device)


def each_of(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of an arm for each of its sets."""
    targets = settings["target"]
    names = [targets] if isinstance(targets, str) else list(targets)
    return [{**settings, "target": name} for name in names]


def target_of(settings: Mapping[str, Any]) -> str:
    """The set of a trial; at a small scale another may stand in for the arm's."""
    return settings["sets"].get(settings["target"], settings["target"])


def case_of(settings: Mapping[str, Any], seed: int, device: torch.device) -> Case:
    """The case of a trial."""
    target = target_of(settings)
    kind = kind_of(target)
    if "model" in settings:
        found = packaged(settings["model"], seed)
    else:
        found = source(kind, seed, settings["source"], device=device)
    side = settings_of(kind, settings["source"]).get("side", 0)
    return Case(
        source=found,
        target=target,
        seed=seed,
        labels=labels_of(settings),
        length=settings[kind].get("length"),
        side=side,
        parts=settings["parts"],
        experts=settings.get("experts"),
        device=device,
        together=settings.get("crew", True),
    )


def labels_of(settings: Mapping[str, Any]) -> int | None:
    """How many labels an arm has; None: as many as its set gives anyway."""
    asked = settings.get("labels")
    if asked is None:
        return None
    count = max(round(asked * settings["label_share"]), 2)
    return None if count == TARGETS[target_of(settings)].labels else count


def kind_of(target: str) -> Any:
    """ "image" or "text", from the measure of a set: texts have F1, images accuracy."""
    return "image" if TARGETS[target].measure == "accuracy" else "text"


def plan_of(settings: Mapping[str, Any]) -> Plan | None:
    """What becomes of the source before it is fine-tuned.

    adapt    None, "further", "distil" (with rounds) or "supcon"
    times    of the steps of the scale, for all stages
    """
    if settings["adapt"] is None:
        return None
    own = settings[kind_of(target_of(settings))]
    stage = {word: own[f"adapt_{word}"] for word in TRAINED}
    stage["steps"] = max(round(own["adapt_steps"] * settings.get("times", 1)), 1)
    if "adapt_warm_steps" in own:
        stage["warm_steps"] = own["adapt_warm_steps"]
    if settings["adapt"] == "supcon":
        return {"stage": "supcon", **stage}
    plan = {"stage": "further", **stage}
    if settings["adapt"] == "further":
        return plan
    matched = {word: settings[word] for word in MATCHED if word in settings}
    for _ in range(settings.get("rounds", 1)):
        plan = {"stage": "distil", **stage, **matched, "teacher": plan}
    return plan


# -- encoders --------------------------------------------------------------------------------------


@contextmanager
def quick(device: torch.device, precision: str) -> Iterator[None]:
    """The fast ways of products and attention, whoever trains; afterwards as before.

    On a GPU, products of float32 in TF32. On a CPU, in bfloat16, plain products for attention: what
    is read here is short.
    """
    matmul, plain = torch.backends.cuda.matmul, device.type == "cpu" and precision == "bfloat16"
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
            yield
    finally:
        matmul.allow_tf32 = before


def adapted(case: Case, plan: Plan | None) -> Encoder:
    """The encoder of a plan: loaded where it is, else trained and kept; so its teacher before."""
    if plan is None:
        return case.start()
    make([case], plan)
    home = case.home(plan)
    if io.read_json(home / "adapted.json")["diverged"]:
        raise Diverged(f"{home} holds no encoder: its loss diverged")
    return Encoder.load(home).to(case.device)


def make(cases: Sequence[Case], plan: Plan | None) -> None:
    """Train the encoders of a plan that are not there, as one program where that is possible."""
    lacking = [case for case in cases if not _is_made(case, plan)]
    if plan is None or not lacking:
        return
    make(lacking, plan.get("teacher"))
    # Who wants one at the same time waits, however long that is, and then finds it.
    where = quick(cases[0].device, plan["precision"])
    with held(case.home(plan) for case in lacking), where:
        lacking = [case for case in lacking if not _is_made(case, plan)]
        calls = [partial(_adapt, case, plan) for case in lacking]
        all_of(calls, cases[0].together and plan["stage"] != "supcon")


def _is_made(case: Case, plan: Plan | None) -> bool:
    return plan is None or (case.home(plan) / "adapted.json").exists()


@contextmanager
def held(homes: Iterable[Path]) -> Iterator[None]:
    """Be the only one who works in these folders; all take them in one order."""
    with ExitStack() as stack:
        for home in sorted(set(homes)):
            stack.enter_context(io.lease(home, wait=math.inf))
        yield


def all_of(calls: Sequence[Callable[[Member | None], T]], alike: bool = True) -> list[T]:
    """What the calls return: as one program, or one after the other where that cannot be."""
    made = together(calls) if alike and len(calls) > 1 else [call(None) for call in calls]
    if torch.cuda.is_initialized():  # other processes need what these held
        torch.cuda.empty_cache()
    return made


def _adapt(case: Case, plan: Plan, crew: Member | None) -> None:
    """Train an encoder and write it; the description is last, so that with it all is there."""
    home, began = case.home(plan), time.perf_counter()
    try:
        _adapted(home, case, plan, crew)
        diverged = False
    except Diverged:  # others go on
        diverged = True
    about = {
        "plan": plan,
        "seed": case.seed,
        "diverged": diverged,
        "seconds": round(time.perf_counter() - began, 3),  # of all that ran with it
        "versions": {"torch": torch.__version__, "device": case.device.type},
    }
    io.write_json(home / "adapted.json", about)
    shutil.rmtree(home / "course", ignore_errors=True)


def _adapted(home: Path, case: Case, plan: Plan, crew: Member | None) -> None:
    encoder = case.start()
    # The paper's unlabelled data: those that have labels, without them.
    rows = case.rows(encoder, case.open().labelled(case.seed, case.labels))
    if encoder.made:
        encoder = _warm(case, rows, plan.get("warm_steps", WARM_STEPS))
    words = {word: plan[word] for word in (*TRAINED, *MATCHED, "steps") if word in plan}
    words["seed"] = case.seed
    course: dict[str, Any] = {"out": home / "course", "checks": 1, "capture": CAPTURE}
    if crew is not None:
        course["crew"] = crew
    if plan["stage"] == "supcon":
        made = contrast(encoder, rows, **words)
    elif plan["stage"] == "further":
        made = further_pretrain(encoder, rows, **words, **course).encoder
    else:
        teacher = adapted(case, plan["teacher"]).model.state_dict()
        made = self_distill(encoder, rows, teacher=teacher, **words, **course).encoder
    made.to("cpu").save(home)


def _warm(case: Case, rows: Rows, steps: int) -> Encoder:
    """The encoder that every plan starts from, with a head that was warmed up."""
    home = case.home({"stage": "warm-up", "steps": steps})
    with held([home]):
        if not (home / "config.json").exists():  # what `save` writes last
            encoder = case.start().copy()
            warm_up(encoder, rows, steps=steps, seed=case.seed, folder=home / "course")
            encoder.to("cpu").save(home)
            shutil.rmtree(home / "course", ignore_errors=True)
    return Encoder.load(home).to(case.device)


def key_of(asked: Mapping[str, Any]) -> str:
    text = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
