"""What an attack does to the routes of a model, besides fooling it; shared by four studies.

clean, *found = look(trained, "pgd", [1, 4, 16], 40)        # eps in units of 1/255
found[0].error, found[0].change, found[0].dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...lab.study import Metric, Running
from ...robust import Attacked, Target, named_attacks, run_attack
from ...robust.attack import Attacks
from ...robust.routes import Use, change_per_example, use
from ...watch import Routes
from .zoo import BATCH, Trained

V_MOE = {"model": "v-moe", "adversarial": False}  # its experts are those of the scale
ADVERSARIAL = {**V_MOE, "adversarial": True}


@dataclass(frozen=True, eq=False)
class Found:
    """What an attack came to at one eps."""

    attacked: Attacked
    error: float
    loss: float  # cross-entropy
    moved: float  # share of the predictions that are not those of the clean images
    change: list[float]  # of the routes, layer by layer from the input on
    dropped: float  # share of the chosen slots, of all layers, that the capacity cut

    @property
    def mean_change(self) -> float:
        return sum(self.change) / len(self.change)


def attack_named(name: str, steps: int | None = None) -> Attacks:
    """An attack by the names of an audit, such as "pgd + overload"."""
    return named_attacks([name], steps)[name]  # beside one that sees the router stands "apgd"


def look(
    trained: Trained, attack: str, eps: Sequence[float], steps: int | None = None
) -> list[Found]:
    """What an attack does at each eps, after what the clean images give; "": no attack.

    The point of each image is the last one, as in the paper's code: one that stops as soon as it
    fools the model would show fewer routes that change.
    """
    if not attack:
        attack, steps, eps = "fgsm", None, [0.0] * len(eps)  # a ball that holds nothing else
    sizes = [e / 255 for e in (0.0, *eps)]
    runs = run_attack(
        attack_named(attack, steps),
        trained.model,
        trained.x,
        trained.y,
        sizes,
        batch=BATCH,
        keep="last",
    )
    before = routes_of(trained.model, trained.x)
    return [_found(run, runs[0], before, routes_of(trained.model, run.x)) for run in runs]


def routes_of(model: nn.Module, x: Tensor) -> list[Routes]:
    """The choices on some images, batch by batch."""
    target, found = Target(model, watch="choice"), []
    with target.at_rest(), torch.no_grad():
        for part in x.split(BATCH):
            routes = target(part).routes
            assert routes is not None
            found.append(routes)
    return found


def _found(run: Attacked, clean: Attacked, before: list[Routes], after: list[Routes]) -> Found:
    parts = [
        change_per_example(old, new, len(x))
        for old, new, x in zip(before, after, run.x.split(BATCH), strict=True)
    ]
    layers = parts[0]
    return Found(
        run,
        error=share(run.fooled),
        loss=float(run.loss.double().mean()),
        moved=share(run.prediction != clean.prediction),
        change=[float(torch.cat([part[name] for part in parts]).mean()) for name in layers],
        dropped=_dropped([one for routes in after for one in use(routes).values()]),
    )


def share(which: Tensor) -> float:
    """The share that is true."""
    return float(which.double().mean())


def _dropped(uses: Sequence[Use]) -> float:
    return sum(one.dropped for one in uses) / max(sum(one.asked for one in uses), 1)


def draw(
    run: Running, eps: Sequence[float], found: Sequence[Found], *, layers: bool = False
) -> None:
    """Put what an attack came to at each eps on the page; see `zoo.ALONG`."""
    run.curve.rewind(-1)
    for e, one in zip((0.0, *eps), found, strict=True):
        named = {"loss": one.loss, "error": one.error, "routing change": one.mean_change}
        if layers:
            named |= {f"change, layer {i}": c for i, c in enumerate(one.change, start=1)}
        run.curve.append(round(10 * e), **named, dropped=one.dropped)


def lower(label: str, format: str = ".1%") -> Metric:
    """A metric of which less is better, as of all that an attack does."""
    return Metric(label, better="lower", format=format)
