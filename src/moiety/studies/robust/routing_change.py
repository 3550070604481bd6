"""How many routes an attack changes (Puigcerver et al. 2022, Fig. 2, and Fig. 4 for AutoPGD).

An arm is a model with an attack; its trial attacks at each eps. "no attack" looks at the same
images twice: a token that all its experts drop both times counts as changed, by the paper's
definition, so that this is not 0. "noise" moves every pixel by eps, up or down at random.
"""

from __future__ import annotations

from itertools import pairwise

from ...lab.claims import Claim, greater
from ...lab.study import Metric, Metrics, Running, Settings, Study
from . import PAPER, zoo
from .routed import ADVERSARIAL, V_MOE, Found, draw, look, lower

EPS = (1, 4, 16)  # in units of 1/255
F = ".3f"  # of a routing change, as the paper has it
LAYERS = (1, 2, 3)  # the MoE layers of the largest scale; smaller ones have no value for the last


def run(running: Running) -> Metrics:
    """Attack one model at each eps; the routes are compared with those of the clean images."""
    trained, attack = zoo.trained(running), running.settings["attack"]
    found = look(trained, attack, EPS, running.settings["attack_steps"].get(attack))
    draw(running, EPS, found, layers=True)
    return {
        **{f"change at {e}/255": one.mean_change for e, one in zip(EPS, found[1:])},
        "largest change, layer 1": max(one.change[0] for one in found),
        **{f"growth, layer {i}": _growth(found, i) for i in LAYERS},
        **{f"layer {i} at {EPS[-1]}/255": _of_layer(found[-1], i) for i in LAYERS},
        "change without attack": found[0].mean_change,
        **{zoo.error_at(e): one.error for e, one in zip(EPS, found[1:])},
        **{f"moved at {e}/255": one.moved for e, one in zip(EPS, found[1:])},
        "clean accuracy": trained.clean,
    }


def _of_layer(one: Found, layer: int) -> float | None:
    return one.change[layer - 1] if layer <= len(one.change) else None


def _growth(found: list[Found], layer: int) -> float | None:
    """The least that a layer's routing change grows from one eps to the next."""
    course = [one.change[layer - 1] for one in found if layer <= len(one.change)]
    return min(b - a for a, b in pairwise(course)) if course else None


METRICS = {
    # The first one heads the page, which names no best arm where neither way is better.
    "change at 16/255": Metric("Routing change at 16/255, mean of layers", better="", format=F),
    **{
        f"change at {e}/255": lower(f"Routing change at {e}/255, mean of layers", F) for e in (4, 1)
    },
    "largest change, layer 1": lower("Largest routing change of any eps, layer 1", F),
    **{f"growth, layer {i}": lower(f"Least growth from eps to eps, layer {i}", F) for i in LAYERS},
    **{
        f"layer {i} at {EPS[-1]}/255": lower(f"Routing change at {EPS[-1]}/255, layer {i}", F)
        for i in LAYERS
    },
    "change without attack": lower("Routing change without an attack", F),
    **{zoo.error_at(e): lower(f"Error at {e}/255") for e in EPS},
    **{f"moved at {e}/255": lower(f"Changed predictions at {e}/255") for e in EPS},
    "clean accuracy": Metric("Accuracy on all test images", format=".1%"),
}

ARMS: dict[str, Settings] = {
    "no attack": {**V_MOE, "attack": ""},
    "noise": {**V_MOE, "attack": "random-search"},
    "pgd": {**V_MOE, "attack": "pgd"},
    "autopgd": {**V_MOE, "attack": "apgd"},
    "no attack, adversarial": {**ADVERSARIAL, "attack": ""},
    "pgd, adversarial": {**ADVERSARIAL, "attack": "pgd"},
}


# -- claims ----------------------------------------------------------------------------------------


def grows(layer: int) -> Claim:
    return greater(
        "no attack",
        "pgd",
        margin=0.01,
        metric=f"growth, layer {layer}",
        quote=f"routing changes grow with eps in every MoE layer; here layer {layer} of 3, from "
        "each eps to the next of 0, 1, 4, 16",
        mark="1 §6.5 (2)",
        reason="a choice in a hundred, a twentieth of the 0.2 that PGD comes to in the paper: less "
        "would be a flat line",
        tier="proxy",
    )


CLAIMS = [
    *(grows(layer) for layer in LAYERS),
    greater(
        "pgd, adversarial",
        "pgd",
        margin=0.02,
        metric="change at 4/255",
        quote="the adversarially trained V-MoE changes its routing less",
        mark="1 §6.5 (3)",
        reason="a tenth of the 0.2 that PGD comes to in the paper",
        tier="proxy",
    ),
    greater(
        "pgd",
        "autopgd",
        margin=0.1,
        metric="largest change, layer 1",
        quote="AutoPGD changes more routes than PGD",
        mark="1 §6.4, §6.5 (6)",
        number="about 0.2 against 0.5",
        reason="a third of the difference that is reported",
        tier="proxy",
    ),
    greater(
        "noise",
        "pgd",
        margin=0.02,
        metric="change at 4/255",
        quote="an attack changes more routes than noise of the same size",
        reason="a tenth of the 0.2 that PGD comes to in the paper",
        tier="our own",
    ),
]

study = Study(
    name="robust/routing-change",
    title="Routing under attack: how many choices change",
    question="Do routes change more with a stronger attack, and less after adversarial training?",
    run=run,
    arms=ARMS,
    metrics=METRICS,
    scales=zoo.scales(
        attack_steps={"pgd": 40, "apgd": 100, "random-search": 1},
        smoke={"attack_steps": {"pgd": 3, "apgd": 5, "random-search": 1}},
    ),
    claims=CLAIMS,
    varies=zoo.VARIES,
    along=zoo.ALONG,
    paper=PAPER,
    deviations=zoo.DEVIATIONS,
)
