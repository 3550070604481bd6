"""Every model that the robustness studies attack, trained: accuracy, cost, and ViT++ as a match.

`moiety study run robust/models --scale full` makes all checkpoints again, those that are there
excepted; they lie in $MOIETY_MODELS, or in the user's cache. The studies of attacks find them
there, and train what is missing.
"""

from __future__ import annotations

from ...lab.claims import equivalent
from ...lab.study import Metric, Metrics, Running, Settings, Study
from . import PAPER, zoo
from .vision import ROUTERS

EXPERTS = (1, 2, 4, 8, 16, 32)
OTHERS = [router for router in ROUTERS if router != "noisy-top-k"]  # that one is V-MoE's


def run(running: Running) -> Metrics:
    """Train the model of one arm from one seed, or find it trained."""
    found = zoo.trained(running)
    running.curve.rewind(-1)
    for row in found.curve:
        running.curve.append(**row)
    return {
        "accuracy": found.clean,
        "validation accuracy": found.validation,
        "flops": found.flops,
        "parameters": found.parameters,
        "seconds": found.seconds,
    }


STANDARD: dict[str, Settings] = {
    "vit": {"model": "vit"},
    "vit++": {"model": "vit++"},
    **{f"v-moe {e}": {"model": "v-moe", "experts": e} for e in EXPERTS},
}
ARMS: dict[str, Settings] = {
    **STANDARD,
    **{f"{r} 8": {"model": "v-moe", "experts": 8, "router": r} for r in OTHERS},
    # Last: each waits for the standard model that it starts from.
    **{f"{name}, adversarial": {**arm, "adversarial": True} for name, arm in STANDARD.items()},
}

study = Study(
    name="robust/models",
    title="The models that are attacked: ViT, ViT++, V-MoE and other routers",
    question="Is the larger dense model as good as V-MoE, so that attacks on both can be compared?",
    run=run,
    arms=ARMS,
    metrics={
        "accuracy": Metric("Accuracy on all test images", format=".1%"),
        "validation accuracy": Metric("Validation accuracy", format=".1%", split="validation"),
        "flops": Metric("FLOPs of an image", better="lower", format=".3g", split=""),
        "parameters": Metric("Parameters", better="", format=".3g", split=""),
        "seconds": Metric("Seconds of training", better="lower", format=".1f", split=""),
    },
    scales=zoo.scales(),
    claims=[
        equivalent(
            "vit++",
            "v-moe 32",
            margin=0.01,
            metric="accuracy",
            quote="ViT++ is as accurate as V-MoE, which it was built to match",
            mark="1 §6.1",
            reason="one point: a difference in clean accuracy above that would itself be seen in "
            "the errors under attack",
            tier="our own",
        )
    ],
    varies=zoo.VARIES,
    paper=PAPER,
    deviations=zoo.DEVIATIONS,
    notes=(
        "seconds: of fine-tuning alone for an adversarial model, and on a machine that is shared",
    ),
)
