"""`TextTransformer`, the preset `text-tiny`: a small encoder, and a vocabulary made for its texts.

tokenizer = make_tokenizer(training_texts)
model = TextTransformer(vocabulary=tokenizer.get_vocab_size(), outputs=4)
logits = model(input_ids, attention_mask) # [B, L] each -> [B, 4]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import tokens
from ..moe import MoE
from .patch_transformer import Block, dense

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, START = "[PAD]", "[UNK]", "[START]"


class TextTransformer(nn.Module):
    """Token and position embedding, pre-norm blocks, answer by the mean over real tokens.

    Padding is no token to its attention, nor to the MoE layers in its blocks.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        outputs: int,
        length: int = 128,
        dim: int = 48,
        depth: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        feedforward: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        feedforward = feedforward or dense
        self.embed = nn.Embedding(vocabulary, dim)
        # Small, because most words are seen a few times only: what they learn must outweigh this.
        nn.init.normal_(self.embed.weight, std=0.1)
        self.position = nn.Parameter(torch.randn(length, dim) * 0.1)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, feedforward(dim)) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, outputs)
        layers = {name: part for name, part in self.named_modules() if isinstance(part, MoE)}
        if layers:
            tokens.follow(self, layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of texts; `attention_mask` is 1 for real tokens."""
        if input_ids.shape[1] > len(self.position):
            raise ValueError(
                f"texts of {input_ids.shape[1]} tokens are longer than the {len(self.position)} "
                "that the model has positions for: cut them, or set length"
            )
        h = self.dropout(self.embed(input_ids) + self.position[: input_ids.shape[1]])
        for block in self.blocks:
            h = block(h, attention_mask)
        real = attention_mask.unsqueeze(-1).to(h.dtype)
        return self.head((self.norm(h) * real).sum(1) / real.sum(1).clamp(min=1))


def make_tokenizer(texts: Sequence[str], vocabulary: int = 8000) -> Tokenizer:
    """Learn byte pairs from these texts, in lower case; a text begins with a token of its own."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE(unk_token=UNKNOWN))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[PAD, UNKNOWN, START],
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    # So that no text is empty.
    made.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, made.token_to_id(START))]
    )
    return made
