"""Tiny models of transformers with a planted defect, a tokenizer of whole words, and texts."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = [f"w{i}" for i in range(60)]
PAD, EXPERTS, DIM = 0, 8, 32
SIZES = {
    "hidden_size": DIM,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = {
    "mixtral": lambda v: MixtralForCausalLM(
        MixtralConfig(vocab_size=v, num_local_experts=EXPERTS, **SIZES)
    ),
    "olmoe": lambda v: OlmoeForCausalLM(OlmoeConfig(vocab_size=v, num_experts=EXPERTS, **SIZES)),
}
LAYER = {"mixtral": "model.layers.{}.mlp", "olmoe": "model.layers.{}.mlp"}


def tokenizer(words=WORDS):
    known = {"[PAD]": PAD, "[UNK]": 1} | {word: i for i, word in enumerate(words, start=2)}
    plain = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", pad_token="[PAD]")


def texts(n=64, ragged=False):
    """Lines of sixteen words, or of four to sixteen."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, 17, (n,), generator=draw) if ragged else torch.full((n,), 16)
    return [
        " ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (int(length),), generator=draw))
        for length in lengths
    ]


def routers(model):
    """The router weights `[E, D]` of every layer, found by their shape."""
    return [p for p in model.parameters() if p.shape == (EXPERTS, DIM)]


@torch.no_grad()
def planted(kind, *, dead=None, magnet=None, vocabulary=None):
    """A model whose routers decide clearly and evenly.

    dead     this expert of layer 1 gets no token: every token has a large first coordinate, and the
             expert's row points against it
    magnet   padding goes to this expert of layer 0: its embedding is the expert's row
    """
    torch.manual_seed(0)
    model = KINDS[kind](vocabulary or len(WORDS) + 2).eval()
    embedding = model.get_input_embeddings().weight
    embedding.normal_()
    embedding[:, 0] = 6.0
    for weight in routers(model):
        weight.normal_(std=0.5)
        weight[:, 0] = 0.0
    if dead is not None:
        routers(model)[1][dead] = 0.0
        routers(model)[1][dead, 0] = -50.0
    if magnet is not None:
        embedding[PAD] = 40 * routers(model)[0][magnet]
    return model


def save(folder, kind, words=WORDS, **plants):
    """A planted model and its tokenizer, as a user saves them."""
    planted(kind, vocabulary=len(words) + 2, **plants).save_pretrained(folder)
    tokenizer(words).save_pretrained(folder)
    return folder
