"""The variants of self-distillation that Table 3 compares, and one of ours."""

from __future__ import annotations

from .tables import FURTHER, SELF, Settings

EVERY = 4
VARIANTS: dict[str, Settings] = {
    "self-distillation": SELF,
    "without L_MAE": {**SELF, "mae_weight": 0.0},
    "further pre-training": FURTHER,  # without L_Distill
    "further pre-training, twice": {**FURTHER, "times": 2},
    "prediction matching": {**SELF, "match": "prediction"},
    "weight matching, l2": {**SELF, "match": "weights"},
    "weight matching, MARS": {**SELF, "match": "weights", "norm": "mars"},
    f"every {EVERY} steps": {**SELF, "distill_every": EVERY},
}
NOTES = [
    "claims: a variant of Table 3 is asked on the set where the paper's lead is larger: without "
    "L_MAE on SciERC, the others on what stands for CUB; all variants run on both",
    "weight matching: weight 1, as all terms; prediction matching compares what both decoders say "
    "of the same masked places",
]
