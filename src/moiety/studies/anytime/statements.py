"""What the paper says of image streams (digest 4, section 4.6), as claims with margins and reasons.

An arm is called by `arm("Ens", 64, 10)`: a learner, its width and the waiting time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...lab.claims import Claim, Tier, equivalent, greater
from ...lab.study import Settings

LEARNERS = {  # the paper's names
    "SM": "single",
    "Ens": "ensemble",
    "gEns": "growing-ensemble",
    "UMix": "mixture",
    "gMoE": "growing-moe",
    "FF": "firefly",
}
FEW = ("UMix", "gMoE", "FF")  # that run at two waiting times; the first does not grow
POINT: dict[str, Any] = {
    "margin": 0.01,
    "reason": "one point of error, averaged over the stream: what waiting costs, at chance, for "
    "about a hundredth of it",
}
HALF: dict[str, Any] = {
    "margin": 0.005,
    "reason": "half a point of error: learners of one cost seldom differ by more, and for less "
    "nobody would change the method",
}


def arm(learner: str, width: int, wait: int, more: str = "") -> str:
    return f"{learner} c={width} w={wait}{more}"


def arms_of(
    widths: Sequence[int],
    waits: Sequence[int],
    two: Sequence[int],
    ladder: Sequence[int],
    beside: Sequence[int],
) -> dict[str, Settings]:
    """SM, Ens and gEns over the whole grid; UMix, gMoE and FF at two waiting times.

    At those of `beside` more SM, and all arms are set beside single models of equal cost.
    """
    grid = [(name, c, w) for c in widths for w in waits for name in ("SM", "Ens", "gEns")]
    few = [(name, c, w) for c in widths for w in two for name in FEW]
    few += [("SM", c, w) for c in ladder if c not in widths for w in beside]
    return {
        arm(name, c, w): {
            "learner": LEARNERS[name],
            "width": c,
            "wait": w,
            **({"beside": True} if w in beside else {}),
        }
        for name, c, w in grid + few
    }


# -- waiting ---------------------------------------------------------------------------------------


def shorter(
    learner: str, width: int, best: int, others: Sequence[int], **words: Any
) -> list[Claim]:
    """Of these waiting times, one has the lowest average error."""
    return [
        greater(
            arm(learner, width, best),
            arm(learner, width, other),
            metric="average error",
            **{**POINT, **words},
        )
        for other in others
    ]


def early_and_late(learner: str, width: int, waits: Sequence[int], tier: Tier) -> list[Claim]:
    """Training at once is better early, waiting for all is better at the end."""
    first, middle, last = waits
    return [
        greater(
            arm(learner, width, first),
            arm(learner, width, middle),
            metric="early error",
            quote=f"training at once (w = {first}) is better early",
            mark="4 §4.6 (1)",
            tier=tier,
            **POINT,
        ),
        greater(
            arm(learner, width, last),
            arm(learner, width, middle),
            metric="final error",
            quote=f"w = {last} has the best final error",
            mark="4 §4.6 (1)",
            tier=tier,
            **POINT,
        ),
    ]


# -- size, growth, ensembles -----------------------------------------------------------------------


def larger(small: int, large: int, wait: int, tier: Tier) -> list[Claim]:
    """Larger models need fewer examples."""
    said: dict[str, Any] = {"mark": "4 §4.6 (3)", "tier": tier, **POINT}
    return [
        greater(
            arm("SM", large, wait),
            arm("SM", small, wait),
            metric="error after a tenth",
            quote="larger models are more sample efficient",
            **said,
        ),
        greater(
            arm("Ens", large, wait),
            arm("Ens", small, wait),
            metric="tenth or end",
            quote="a small Ens ends worse than a large one is after a tenth of the stream",
            number="about 40 % for the small one on CIFAR-10",
            **said,
        ),
    ]


def growing(width: int, wait: int, tier: Tier) -> list[Claim]:
    """gEns, gMoE and FF at equal compute and at equal memory, and SM against those that grow."""
    said: dict[str, Any] = {"mark": "4 §4.6 (4)", "tier": tier, **HALF}
    g_ens, sm = arm("gEns", width, wait), arm("SM", width, wait)
    claims = []
    for other in FEW[1:]:
        name = arm(other, width, wait)
        claims += [
            greater(
                g_ens,
                name,
                metric="gain at equal compute",
                quote=f"at fixed compute gEns is usually better than {other}",
                **said,
            ),
            greater(
                name,
                g_ens,
                metric="gain at equal memory",
                quote=f"at fixed memory gEns is usually worst: worse than {other}",
                **said,
            ),
            greater(
                sm,
                name,
                metric="gain at equal compute",
                quote=f"SM beats {other} almost always",
                **said,
            ),
        ]
    return claims


def ensembles(width: int, wait: int, tier: Tier) -> list[Claim]:
    """Ens saves memory, gEns saves compute."""
    ens, g_ens = arm("Ens", width, wait), arm("gEns", width, wait)
    return [
        greater(
            ens,
            g_ens,
            metric="gain at equal memory",
            quote="Ens is more memory-efficient than gEns",
            mark="4 §4.6 (5)",
            tier=tier,
            **HALF,
        ),
        greater(
            g_ens,
            ens,
            margin=1.0,
            metric="relative compute",
            quote="gEns is cheaper to train than Ens",
            reason="one single model less than the three that Ens trains",
            mark="4 §4.6 (5)",
            tier=tier,
        ),
    ]


def mixtures(small: int, large: int, wait: int, tier: Tier) -> list[Claim]:
    """One loss for all members helps small ones and harms large ones."""
    said: dict[str, Any] = {"metric": "average error", "mark": "4 §4.6 (6)", "tier": tier, **HALF}
    return [
        greater(
            arm("UMix", small, wait),
            arm("Ens", small, wait),
            quote="UMix is slightly better than Ens for small members",
            **said,
        ),
        greater(
            arm("Ens", large, wait),
            arm("UMix", large, wait),
            quote="UMix is worse than Ens for large members",
            **said,
        ),
    ]


# -- replay ----------------------------------------------------------------------------------------


def replay_helps(learner: str, width: int, wait: int, r: str, tier: Tier) -> Claim:
    return greater(
        arm(learner, width, wait, f" r={r}"),
        arm(learner, width, wait, " r=0"),
        metric="average error",
        quote=f"replay (r = {r}) lowers the error, at more compute",
        mark="4 §4.6 (7)",
        tier=tier,
        **HALF,
    )


def replay_at_equal_steps(learner: str, width: int, wait: int, r: str, tier: Tier) -> Claim:
    return equivalent(
        arm(learner, width, wait, f" r={r}, equal steps"),
        arm(learner, width, wait, " r=0"),
        metric="average error",
        quote=f"at equal compute replay (r = {r}) has no clear benefit",
        mark="4 §4.6 (7)",
        tier=tier,
        **HALF,
    )
