"""Some inputs and what the saved models say of them, so that anyone can check a saved model.

    from safetensors.torch import load_file
    from transformers import AutoModelForMaskedLM

    told = load_file("out/check.safetensors")
    model = AutoModelForMaskedLM.from_pretrained("out/adapted")
    logits = model(told["input_ids"], told["attention_mask"]).logits[:, :4]
    (logits - told["adapted"]).abs().max()                 # at most 1e-5

`classifier` are the logits of the classifier for the same inputs. Images have `pixel_values` and
the `noise` that decides which patches are hidden.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from .. import io
from ..modes import at_rest
from .encoders import Encoder
from .finetune import Tuned
from .rows import Rows

EXAMPLES, PLACES = 2, 4  # whose logits are kept: a vocabulary is long


@torch.no_grad()
def write_check(path: Path, encoder: Encoder | None, rows: Rows, tuned: Tuned | None) -> None:
    """Ask the models, on the CPU as whoever checks will."""
    from safetensors.torch import save

    asked = encoder or (tuned and tuned.classifier.encoder)
    assert asked
    reader = asked.copy().to("cpu")
    batch = reader.batch(rows.take(list(range(min(EXAMPLES, len(rows))))))
    read = {name: batch[name] for name in batch if name != "special_tokens_mask"}
    told: dict[str, Tensor] = dict(read)
    if encoder is not None:
        if encoder.kind == "image":
            told["noise"] = reader.mask(batch, torch.Generator().manual_seed(0))
        with at_rest(reader.model):
            told["adapted"] = reader.model(**told).logits[:, :PLACES]
    if tuned is not None:
        model = copy.deepcopy(tuned.classifier.model).to("cpu")
        with at_rest(model):
            told["classifier"] = model(**tuned.classifier.inputs(batch)).logits
    io.write_atomic(path, save({name: tensor.contiguous() for name, tensor in told.items()}))
