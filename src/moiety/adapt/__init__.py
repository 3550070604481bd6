"""Carry a masked encoder, of images or of text, to a new domain.

    from moiety.adapt import finetune, further_pretrain, read_labelled, self_distill
    adapted = self_distill("roberta/", "papers.txt", steps=2000)
    data = read_labelled("citations/", adapted.encoder)
    tuned = finetune(adapted.encoder, data.train, validation=data.validation, test=data.test)

Further pre-training, self-distillation and fine-tuning as in "Self-Distillation for Further
Pre-training of Transformers" (arXiv 2210.02871), for ViT-MAE and for every masked language model.
"""

import importlib
from typing import TYPE_CHECKING, Any

# What is named like its file is imported at once: else the name would mean the file.
from .finetune import finetune

if TYPE_CHECKING:
    from .corpus import Corpus, read_corpus
    from .encoders import Encoder
    from .finetune import Tuned
    from .heads import warm_up
    from .labelled import Labelled, read_labelled
    from .loading import place_patches
    from .objective import Objective
    from .pretrain import Adapted, further_pretrain, self_distill
    from .rows import Rows

_LATER = {  # loaded at their first use
    "Adapted": "pretrain",
    "Corpus": "corpus",
    "Encoder": "encoders",
    "Labelled": "labelled",
    "Objective": "objective",
    "Rows": "rows",
    "Tuned": "finetune",
    "further_pretrain": "pretrain",
    "place_patches": "loading",
    "read_corpus": "corpus",
    "read_labelled": "labelled",
    "self_distill": "pretrain",
    "warm_up": "heads",
}
__all__ = [
    "Adapted",
    "Corpus",
    "Encoder",
    "Labelled",
    "Objective",
    "Rows",
    "Tuned",
    "finetune",
    "further_pretrain",
    "place_patches",
    "read_corpus",
    "read_labelled",
    "self_distill",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'moiety.adapt' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
