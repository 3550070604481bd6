"""The statements of digest 3, as the studies of adaptation ask them; margins before any result.

    claims = [*ahead("self-distillation", ["fine-tuning"], SETS, **LEAD, mark="3 §5.3", quote="…")]

All claims of the paper are corrected together, so that a statement is asked once, where its runs
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...lab.claims import Claim, equivalent, greater

# Names of metrics in `tables`, which imports this file.
JUDGED, JUDGED_GAP, JUDGED_LOSS, DISTANCE = (
    "judged score",
    "judged gap",
    "judged test loss",
    "distance",
)

# -- margins ---------------------------------------------------------------------------------------

LEAD: dict[str, Any] = {
    "margin": 0.005,
    "reason": "half a point, about half of the smallest lead of self-distillation over fine-tuning "
    "in Tables 1 and 2 (0.95 points): less would not pay for two trainings more",
}
ALIKE: dict[str, Any] = {
    "margin": 0.01,
    "reason": "one point, the smallest lead that Table 1 shows for the method (0.95): what lies "
    "nearer than that is as good",
}
CLOSER: dict[str, Any] = {
    "margin": 0.02,
    "reason": "a fiftieth of a nat, the smallest difference of test losses in Table 4 being 0.06 "
    "on losses three times as large as ours will be",
}
FAR: dict[str, Any] = {
    "margin": 0.1,
    "reason": "one in a hundred or so of the distance that fine-tuning alone goes; Fig. 5 shows "
    "differences of a tenth and more",
}


# -- claims ----------------------------------------------------------------------------------------


def ahead(
    a: str,
    others: Iterable[str],
    targets: Iterable[str],
    *,
    quote: str,
    number: str = "",
    numbers: Mapping[tuple[str, str], str] | None = None,
    metric: str = JUDGED,
    **words: Any,
) -> list[Claim]:
    """On every set, method a is better than each of the others by more than the margin."""
    return [
        greater(
            f"{target} / {a}",
            f"{target} / {b}",
            metric=metric,
            quote=f"{quote}: than {b}, on {target}",
            number=(numbers or {}).get((target, b), number),
            tier="proxy",
            **words,
        )
        for target in targets
        for b in others
    ]


def alike(
    a: str, others: Iterable[str], targets: Iterable[str], *, quote: str, **words: Any
) -> list[Claim]:
    """On every set, method a is as good as each of the others, within the margin."""
    words = {"metric": JUDGED, "tier": "proxy", **words}
    return [
        equivalent(
            f"{target} / {a}",
            f"{target} / {b}",
            quote=f"{quote}: as {b}, on {target}",
            **words,
        )
        for target in targets
        for b in others
    ]


# -- what is not as in the paper -------------------------------------------------------------------

DEVIATIONS: Sequence[str] = (
    "source models of our own (a ViT-MAE of 12 × 192 on CIFAR-10 at 32×32 pixels, a RoBERTa of "
    "6 × 256 on film reviews) instead of vit-mae-base and roberta-base; other target sets",
    "600 steps of further pre-training and of self-distillation (paper: 20 000, or 100 epochs) at "
    "rates of 5e-4 and 3e-4 (paper: 1.5e-4 and 1e-4), for models that are a sixteenth as large",
    "200 or 400 steps of fine-tuning for images, 250 or 500 for texts (paper: 10 000, or 10 "
    "epochs), chosen on validation with the learning rate, for every arm alike (paper: the same "
    "settings for all)",
    "a validation split is taken off the training data (paper: none for images)",
    "images are neither cropped nor mirrored: letters and digits are not",
    "RoBERTa's distilled representation and masking rate are not in the paper: all tokens after "
    "the last norm, and 0.15",
)
NOTES: Sequence[str] = (
    "score: accuracy for images, micro F1 for ChemProt, macro F1 for the other texts",
    "test: 624 images of pneumoniamnist, 10 000 of fashion-mnist, 2 007 of usps, 1 210 of "
    "omniglot; 139 texts of acl-arc, 974 of scierc, 3 469 of chemprot, 1 421 of tweeteval-emotion",
    "judged: the lab's intervals are over seeds, whose test is the same; so that the error of the "
    "test itself is in them, seed s counts on part s of five alone, by a jackknife (for accuracy "
    "the plain value on that part); with more than five seeds parts repeat, and a share of that "
    "error is missed",
    "seeds: a seed is a new source model, labelled subset, validation split and fine-tunes; its "
    "fine-tunes are nested, their mean counts",
    "search: on seed 0 and its validation split, 8 points for every arm, the same learning rates "
    "and lengths; main trials of that seed are other fine-tunes; the test is read by main trials, "
    "once each, after training",
    "cut: to fit the time, the lengths above, rounds 4 and 5, all but three sizes of the "
    "low-resource study, a second fine-tune of a seed outside images, text and gap, and MiniLM as "
    "a further case",
    "runs: all studies of the paper read the same encoders and fine-tunes, so that their verdicts "
    "are not independent",
)
