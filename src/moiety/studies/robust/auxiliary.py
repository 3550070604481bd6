"""Does it help an attacker to see the router's losses? (Puigcerver et al. 2022, Fig. 3, left.)

PGD on the cross-entropy alone, with the auxiliary losses of the training, and beside it with
"overload", which crowds the tokens of an image on one expert, whose capacity then drops them.
"overload alone" knows no label: what it does, it does through the router.
"""

from __future__ import annotations

from ...lab.claims import Claim, equivalent, greater
from ...lab.study import Metric, Metrics, Running, Settings, Study
from . import PAPER, zoo
from .routed import ADVERSARIAL, V_MOE, draw, look, lower

EPS = (1, 4)  # in units of 1/255: where a standard, and where an adversarially trained one wavers


def run(running: Running) -> Metrics:
    """Attack one model with one loss."""
    settings, trained = running.settings, zoo.trained(running)
    found = look(trained, settings["attack"], EPS, settings["steps"])
    draw(running, EPS, found)
    return {
        **{zoo.error_at(e): one.error for e, one in zip((0, *EPS), found)},
        **{f"dropped at {e}/255": one.dropped for e, one in zip(EPS, found[1:])},
        "dropped without attack": found[0].dropped,
        **{f"change at {e}/255": one.mean_change for e, one in zip(EPS, found[1:])},
        **{f"loss at {e}/255": one.loss for e, one in zip(EPS, found[1:])},
        "clean accuracy": trained.clean,
    }


METRICS = {
    # The first one heads the page, which names no best arm where neither way is better.
    zoo.error_at(1): Metric("Error at 1/255", better="", format=".1%"),
    zoo.error_at(4): lower("Error at 4/255"),
    zoo.error_at(0): lower("Error without attack"),
    **{f"dropped at {e}/255": lower(f"Dropped slots at {e}/255") for e in EPS},
    "dropped without attack": lower("Dropped slots without attack"),
    **{f"change at {e}/255": lower(f"Routing change at {e}/255", ".3f") for e in EPS},
    **{f"loss at {e}/255": lower(f"Cross-entropy at {e}/255", ".3f") for e in EPS},
    "clean accuracy": Metric("Accuracy on all test images", format=".1%"),
}

ARMS: dict[str, Settings] = {
    "no attack": {**V_MOE, "attack": ""},
    "pgd": {**V_MOE, "attack": "pgd"},
    "pgd + auxiliary": {**V_MOE, "attack": "pgd + auxiliary"},
    "pgd + overload": {**V_MOE, "attack": "pgd + overload"},
    "overload alone": {**V_MOE, "attack": "pgd-overload"},
    "pgd, adversarial": {**ADVERSARIAL, "attack": "pgd"},
    "pgd + auxiliary, adversarial": {**ADVERSARIAL, "attack": "pgd + auxiliary"},
    "pgd + overload, adversarial": {**ADVERSARIAL, "attack": "pgd + overload"},
}


# -- claims ----------------------------------------------------------------------------------------

TWO_POINTS = (
    "two points of error, 40 of 2000 images: two lines of the paper's figure that far apart would "
    "not be read as one"
)


def no_help(loss: str, trained: str, eps: int, **words: str) -> Claim:
    """The loss adds nothing to what plain PGD finds."""
    return equivalent(
        f"pgd + {loss}{trained}",
        f"pgd{trained}",
        margin=0.02,
        metric=zoo.error_at(eps),
        reason=TWO_POINTS,
        **words,
    )


AS_PAPER = {"mark": "1 §6.5 (4)", "tier": "proxy"}
OURS = {"tier": "our own"}

CLAIMS = [
    no_help(
        "auxiliary",
        "",
        1,
        quote="adding the auxiliary losses to the attack does not help the attacker",
        **AS_PAPER,
    ),
    no_help(
        "auxiliary",
        ", adversarial",
        4,
        quote="nor does it help against an adversarially trained V-MoE",
        **AS_PAPER,
    ),
    no_help("overload", "", 1, quote="nor does it help to crowd tokens on one expert", **OURS),
    no_help(
        "overload",
        ", adversarial",
        4,
        quote="nor to crowd tokens of an adversarially trained V-MoE on one expert",
        **OURS,
    ),
    greater(
        "no attack",
        "overload alone",
        margin=0.05,
        metric="dropped at 4/255",
        quote="who wants to can make experts drop tokens",
        reason="one slot in twenty, which is what a capacity factor of 1.05 leaves free",
        **OURS,
    ),
    greater(
        "no attack",
        "overload alone",
        margin=0.05,
        metric=zoo.error_at(4),
        quote="and fool the model through the router alone, without its label",
        reason="one image in twenty: less is not worth an attack",
        **OURS,
    ),
]

study = Study(
    name="robust/auxiliary",
    title="Attacks that see the router's losses",
    question="Does it help an attacker to add the router's losses to the attack?",
    run=run,
    arms=ARMS,
    metrics=METRICS,
    scales=zoo.scales(),
    claims=CLAIMS,
    varies=zoo.VARIES,
    along=zoo.ALONG,
    paper=PAPER,
    deviations=(
        *zoo.DEVIATIONS,
        "auxiliary losses: those of each image's own tokens, where the paper takes the groups of a "
        "batch; as there, the load loss is none without noise",
    ),
)
