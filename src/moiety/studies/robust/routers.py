"""Which router is safer? Seven of them, trained alike, under attacks that see the router.

An image stands if neither AutoPGD nor AutoPGD with the router's margin or with overload fools the
model; a later attack is only tried on what the earlier ones left. How safe a router is goes with
how accurate it is without attack: read both columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...lab.claims import Claim, greater
from ...lab.study import Metric, Metrics, Running, Study
from ...robust import run_attack
from . import PAPER, zoo
from .routed import V_MOE, attack_named, draw, look, lower, share
from .vision import ROUTERS

EPS = (1, 2)  # in units of 1/255: beyond, a model without adversarial training loses every image
SEEING = ["apgd + router-margin", "apgd + overload"]  # after AutoPGD itself
# The selectors of DSelect-k have digits, not scores, and so no margin between experts.
SEEING_OF = {"dselect-k": ["apgd + diversity", "apgd + overload"]}


def run(running: Running) -> Metrics:
    """Attack the model of one router."""
    trained, settings = zoo.trained(running), running.settings
    steps, seeing = settings["steps"], settings["seeing"]
    found = look(trained, "apgd", EPS, steps)
    draw(running, EPS, found)
    metrics: dict[str, float | None] = {zoo.error_at(0): found[0].error}
    for eps, one in zip(EPS, found[1:]):
        plain = found[0].attacked.fooled | one.attacked.fooled
        union = seeing_too(trained, plain, seeing, eps, steps)
        metrics |= {
            zoo.error_at(eps): share(union),
            f"autopgd at {eps}/255": share(plain),
            f"only by the router at {eps}/255": share(union & ~plain),
            f"change at {eps}/255": one.mean_change,
            f"dropped at {eps}/255": one.dropped,
        }
    return {**metrics, "clean accuracy": trained.clean, "dropped without attack": found[0].dropped}


def seeing_too(
    trained: zoo.Trained, fooled: Tensor, attacks: Sequence[str], eps: float, steps: int
) -> Tensor:
    """`[N]`: who is fooled at last, after attacks that see the router on who was not before."""
    fooled = fooled.clone()
    for name in attacks:
        rows = (~fooled).nonzero()[:, 0]
        attack = attack_named(name, steps)
        found = run_attack(
            attack,
            trained.model,
            trained.x[rows],
            trained.y[rows],
            eps / 255,
            batch=zoo.BATCH,
            ids=rows.cpu(),
        )
        fooled[rows] = found.fooled
    return fooled


METRICS = {
    **{zoo.error_at(e): lower(f"Error at {e}/255, all attacks") for e in EPS},
    zoo.error_at(0): lower("Error without attack"),
    "clean accuracy": Metric("Accuracy on all test images", format=".1%"),
    **{f"autopgd at {e}/255": lower(f"Error at {e}/255, AutoPGD alone") for e in EPS},
    **{
        f"only by the router at {e}/255": lower(f"Fooled only through the router, {e}/255", ".2%")
        for e in EPS
    },
    **{f"change at {e}/255": lower(f"Routing change at {e}/255", ".3f") for e in EPS},
    **{f"dropped at {e}/255": lower(f"Dropped slots at {e}/255") for e in EPS},
    "dropped without attack": lower("Dropped slots without attack"),
}


def safer(router: str) -> Claim:
    return greater(
        router,
        "top-k",
        margin=0.02,
        metric=zoo.error_at(1),
        quote=f"a model with the {router} router is safer than one with top-k",
        reason="two points of error, 40 of 2000 images: for less nobody changes the router",
        tier="our own",
    )


study = Study(
    name="robust/routers",
    title="Seven routers under attack, trained alike",
    question="Which router is safer than top-k, and at which accuracy?",
    run=run,
    arms={
        name: {**V_MOE, "experts": 8, "router": name, "seeing": SEEING_OF.get(name, SEEING)}
        for name in sorted(ROUTERS, key=lambda name: name != "top-k")  # what others stand beside
    },
    metrics=METRICS,
    scales=zoo.scales(),
    claims=[safer(name) for name in ROUTERS if name != "top-k"],
    varies=zoo.VARIES,
    along=zoo.ALONG,
    paper=PAPER,
    notes=(
        "settings: one learning rate for all, and for each router the options of the library and "
        "one weight of its balance loss; none was searched for",
        "coupling: the experts of expert choice choose among the tokens of one image, and so the "
        "capacity is shared; no image changes the answer for another",
        "attacks: DSelect-k's selectors have digits, not scores, and so no margin that an attack "
        "could push on; its second attack is the one on the diversity of experts",
        "dropped: of expert choice, the tokens that no expert chose",
    ),
)
