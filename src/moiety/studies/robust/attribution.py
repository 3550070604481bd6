"""How much of the harm is re-routing? The rise of the loss under PGD, split by `attribute`.

The loss is measured on the clean and the attacked input, each with the routes of both: what the
routes do, and what the input does that the experts see, add up to the whole rise. Beside it stands
an attack on the model with frozen routes. A model with one expert has no route to change: its share
is 0, and what the others are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Metric, Metrics, Running, Settings, Study
from ...robust import Ball, Noise, Parts, Target, attribute, freeze
from ...robust.attack import Attacks
from ...robust.target import correct
from . import PAPER, zoo
from .routed import attack_named, draw, look, lower, share

EPS = (1, 4)  # in units of 1/255: where a standard, and where an adversarially trained one wavers


def run(running: Running) -> Metrics:
    """Attack one model, and split what that did."""
    trained, steps = zoo.trained(running), running.settings["steps"]
    found = look(trained, "pgd", EPS, steps)
    draw(running, EPS, found)
    metrics: dict[str, float | None] = {zoo.error_at(0): found[0].error}
    for eps, one in zip(EPS, found[1:]):
        frozen = share(wrong_when_frozen(trained, attack_named("pgd", steps), eps))
        metrics |= {
            f"routes at {eps}/255": routes_share(trained, one.attacked.x, weights=False),
            f"routes and weights at {eps}/255": routes_share(trained, one.attacked.x, weights=True),
            zoo.error_at(eps): one.error,
            f"frozen at {eps}/255": frozen,
            f"by routes at {eps}/255": one.error - frozen,
            f"change at {eps}/255": one.mean_change,
            f"rise at {eps}/255": one.loss - found[0].loss,
        }
    return {**metrics, "clean accuracy": trained.clean}


def routes_share(trained: zoo.Trained, x_adv: Tensor, *, weights: bool) -> float | None:
    """The part of the routes in the mean rise of the loss; None: the loss did not rise."""
    target, parts = Target(trained.model), []
    for x, x_adv_B, y in zip(*(t.split(zoo.BATCH) for t in (trained.x, x_adv, trained.y))):
        parts.append(attribute(target, x, x_adv_B, y, weights=weights))
    routes, total = (_mean(parts, word) for word in ("routes", "total"))
    return routes / total if total > 0 else None


def _mean(parts: list[Parts], word: str) -> float:
    return float(torch.cat([getattr(part, word) for part in parts]).mean())


def wrong_when_frozen(trained: zoo.Trained, attack: Attacks, eps: float) -> Tensor:
    """`[N]`: wrong after the attack on the model that keeps the routes of the clean images."""
    target, ball, wrong = Target(trained.model), Ball(eps / 255), []
    ids = torch.arange(len(trained.x), device=trained.x.device)
    with target.at_rest():
        for x, y, own in zip(*(t.split(zoo.BATCH) for t in (trained.x, trained.y, ids))):
            frozen = freeze(target, x)
            x_adv = attack(frozen, x, y, ball, Noise(0, own), keep="last")
            with torch.no_grad():
                wrong.append(~correct(frozen(x_adv).logits, y))
            frozen.forget()  # what a GPU holds for the routes of this batch
    return torch.cat(wrong)


METRICS = {
    # The first one heads the page, which names no best arm where neither way is better.
    "routes at 1/255": Metric("Re-routing in the rise of the loss at 1/255", "", ".1%"),
    "routes at 4/255": lower("Re-routing in the rise of the loss at 4/255"),
    **{
        f"routes and weights at {e}/255": lower(f"Share of routes and their weights, {e}/255")
        for e in EPS
    },
    **{f"rise at {e}/255": lower(f"Rise of the cross-entropy at {e}/255", ".3f") for e in EPS},
    **{zoo.error_at(e): lower(f"Error at {e}/255") for e in (*EPS, 0)},
    **{f"frozen at {e}/255": lower(f"Error with frozen routes at {e}/255") for e in EPS},
    **{f"by routes at {e}/255": lower(f"Error that needs the routes, {e}/255") for e in EPS},
    **{f"change at {e}/255": lower(f"Routing change at {e}/255", ".3f") for e in EPS},
    "clean accuracy": Metric("Accuracy on all test images", format=".1%"),
}


def arm(experts: int, adversarial: bool = False) -> Settings:
    return {"model": "v-moe", "experts": experts, "adversarial": adversarial}


ARMS: dict[str, Settings] = {
    "1 expert": arm(1),
    "8 experts": arm(8),
    "32 experts": arm(32),
    "8 experts, adversarial": arm(8, adversarial=True),
    "32 experts, adversarial": arm(32, adversarial=True),
}


# -- claims ----------------------------------------------------------------------------------------


def less_than_half(name: str) -> Claim:
    return equivalent(
        name,
        "1 expert",
        margin=0.5,
        metric="routes at 4/255",
        quote=f"of what an attack does to a model with {name}, less than half is re-routing",
        reason="half: above it the router, below it what the experts see is the wider door",
        tier="our own",
    )


def alike(name: str, eps: int, quote: str, **words: str) -> Claim:
    return equivalent(
        name,
        "1 expert",
        margin=0.05,
        metric=f"by routes at {eps}/255",
        quote=quote,
        reason="one image in twenty; with experts that behave alike it would be none",
        **words,
    )


CLAIMS = [
    *(less_than_half(name) for name in ARMS if name != "1 expert"),
    alike(
        "32 experts",
        1,
        "experts on both sides of a routing boundary behave alike: an attack that cannot change "
        "the routes fools as many",
        mark="1 §6.5 (2)",
        tier="proxy",
    ),
    alike("32 experts, adversarial", 4, "so it is after adversarial training", tier="our own"),
    greater(
        "32 experts, adversarial",
        "32 experts",
        margin=0.05,
        metric="routes at 4/255",
        quote="adversarial training shuts the router's door more than that of the experts",
        reason="a tenth of the half at which the doors are equally wide",
        tier="our own",
    ),
    greater(
        "8 experts",
        "32 experts",
        margin=0.05,
        metric="routes at 4/255",
        quote="with more experts more of the harm is re-routing",
        reason="a tenth of the half at which the doors are equally wide",
        tier="our own",
    ),
]

study = Study(
    name="robust/attribution",
    title="Through which door: re-routing, or what the experts see",
    question="How much of what an attack does to the loss is re-routing?",
    run=run,
    arms=ARMS,
    metrics=METRICS,
    scales=zoo.scales(),
    claims=CLAIMS,
    varies=zoo.VARIES,
    along=zoo.ALONG,
    paper=PAPER,
    deviations=zoo.DEVIATIONS,
)
