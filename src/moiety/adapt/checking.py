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

from pathlib import Path

import torch
from torch import Tensor

from .. import io
from .encoders import Encoder
from .finetune import Tuned
from .follow import at_rest
from .rows import Rows

EXAMPLES, PLACES = 2, 4  # whose logits are kept: a vocabulary is long


@torch.no_grad()
def write_check(path: Path, encoder: Encoder, rows: Rows, tuned: Tuned | None) -> None:
    """Ask the models, on the CPU as whoever checks will."""
    from safetensors.torch import save

    encoder = encoder.copy().to("cpu")
    batch = encoder.batch(rows.take(list(range(min(EXAMPLES, len(rows))))))
    read = {name: batch[name] for name in batch if name != "special_tokens_mask"}
    if encoder.kind == "image":
        read["noise"] = encoder.mask(batch, torch.Generator().manual_seed(0))
    told: dict[str, Tensor] = dict(read)
    with at_rest(encoder.model):
        told["adapted"] = encoder.model(**read).logits[:, :PLACES]
    if tuned is not None:
        model = tuned.classifier.model.to("cpu")
        with at_rest(model):
            told["classifier"] = model(**tuned.classifier.inputs(batch)).logits
    io.write_atomic(path, save({name: tensor.contiguous() for name, tensor in told.items()}))
