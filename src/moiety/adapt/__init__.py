"""Carry a masked encoder, of images or of text, to a new domain.

    from moiety.adapt import finetune, further_pretrain, read_labelled, self_distill
    adapted = self_distill("roberta/", "papers.txt", steps=2000)
    data = read_labelled("citations/", adapted.encoder)
    tuned = finetune(adapted.encoder, data.train, validation=data.validation, test=data.test)

Further pre-training, self-distillation and fine-tuning as in "Self-Distillation for Further
Pre-training of Transformers" (arXiv 2210.02871), for ViT-MAE and for every masked language model.
"""

from .corpus import Corpus, read_corpus
from .encoders import Encoder
from .finetune import Tuned, finetune
from .heads import warm_up
from .labelled import Labelled, read_labelled
from .loading import place_patches
from .objective import Objective
from .pretrain import Adapted, further_pretrain, self_distill
from .rows import Rows

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
