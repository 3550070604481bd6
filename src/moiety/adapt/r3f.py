"""R3F: the classifier should say the same of an input and of the input with a little noise.

Aghajanyan et al. 2021 (arXiv 2008.03156), with Gaussian noise:

    loss = CE(f(x), y) + weight * (KL(f(x) || f(x + z)) + KL(f(x + z) || f(x))),   z ~ N(0, noise²)

The noise is on the pixels of images and on the word embeddings of text, to which, as in the
authors' code, the second pass sends no gradient. Both passes run in the mode of the model, each
with dropout of its own. A weight of 0 leaves the second pass out.

    r3f = R3F(weight=1.0, noise=1e-5)
    z = r3f.draw(model, inputs, generator)
    loss = F.cross_entropy(logits, labels) + r3f.weight * r3f(model, inputs, logits, z)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class R3F:
    """The second term of the loss, and how much it counts."""

    weight: float = 1.0
    noise: float = 1e-5  # standard deviation

    def __post_init__(self) -> None:
        if not (self.weight >= 0 and self.noise > 0):
            raise ValueError(
                f"weight must be at least 0 and noise positive, got {self.weight} and {self.noise}"
            )

    def draw(self, model: Any, inputs: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """Noise for the pixels, or for what the word embedding gives for ids."""
        if "pixel_values" in inputs:
            like = inputs["pixel_values"]
            shape = [*like.shape]
        else:
            like = model.get_input_embeddings().weight
            shape = [*inputs["input_ids"].shape, like.shape[1]]
        drawn = torch.empty(shape, dtype=like.dtype, device=generator.device)
        return self.noise * drawn.normal_(generator=generator).to(like.device)

    def __call__(
        self, model: Any, inputs: Mapping[str, Tensor], logits: Tensor, noise: Tensor
    ) -> Tensor:
        """The symmetric KL between `logits` and those of noisy inputs, before its weight."""
        with noised(model, inputs, noise) as noisy:
            return symmetric_kl(logits, model(**noisy).logits)


def symmetric_kl(a_BC: Tensor, b_BC: Tensor) -> Tensor:
    """KL(a || b) + KL(b || a) of the classes of two logits, mean over the batch."""
    exact = torch.promote_types(a_BC.dtype, torch.float32)
    a, b = F.log_softmax(a_BC, -1, dtype=exact), F.log_softmax(b_BC, -1, dtype=exact)
    return ((a.exp() - b.exp()) * (a - b)).sum(-1).mean()


@contextlib.contextmanager
def noised(
    model: Any, inputs: Mapping[str, Tensor], noise: Tensor
) -> Iterator[Mapping[str, Tensor]]:
    """Inputs that are noisy inside the block: pixels, or what the word embedding gives for ids."""
    if "pixel_values" in inputs:
        yield {**inputs, "pixel_values": inputs["pixel_values"] + noise}
        return

    def add(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        return embedded.detach() + noise

    # A hook, not `inputs_embeds`: without ids, some models count positions through the padding.
    hook = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield inputs
    finally:
        hook.remove()
