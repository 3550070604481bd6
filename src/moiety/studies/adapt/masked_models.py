"""The two kinds of source models, ViT-MAE and RoBERTa, and their masked losses.

    encoder = build("image", seed, settings, corpus)
    loss = masked_loss(encoder, corpus.train, settings)        # of the examples with some numbers

Nothing in a step waits for the host, so that a GPU can repeat it as one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from ...adapt import place_patches
from ...adapt.encoders import Encoder
from ...adapt.images import ImageEncoder
from ...train import seeded
from ...train.transformer import attention_kernels
from ..robust.vision import augment
from .corpora import SPECIAL, Corpus, Kind

Settings = dict[str, Any]
# Of tokens; of those: shown as <mask>, as another word. Twice as many are hidden as when a model is
# adapted: so short a training learns by what it has predicted (docs/log.md).
MASKED, HIDDEN, OTHER = 0.3, 0.8, 0.1
CHUNK = 1000  # images that are prepared at a time
NEAR, FOCUS, LOUD = (-1, 1, -2, 2), 8.0, 2.0  # how a text model begins: see `look_near`


def build(kind: Kind, seed: int, settings: Settings, corpus: Corpus) -> Encoder:
    """A model with its first weights, and what prepares its input."""
    from transformers import RobertaForMaskedLM, ViTMAEForPreTraining

    with seeded(seed):
        if kind == "text":
            model: Any = RobertaForMaskedLM(_text_config(settings, len(corpus.processor)))
            look_near(model, corpus.train)
        else:
            model = ViTMAEForPreTraining(_image_config(settings))
            place_patches(model)
    return Encoder.load(model, processor=corpus.processor)


@torch.no_grad()
def look_near(model: Any, ids: Tensor) -> None:
    """Begin a RoBERTa so that a hidden word is guessed from the words beside it, not from how
    common it is; `ids` are rows of the corpus.

    A narrow model that begins as usual says the commonest words and stays there (docs/log.md has
    how long, and what it is like without each of these):

    - the head's bias is the logarithm of how common a word is: else the embeddings, which are also
      the head's weights, all come to lie along that one direction, and words look alike;
    - places are waves of evenly spread lengths, twice as large as words, so that the next place
      is as unlike as any other; and heads of the first block look one and two words back and on;
    - what they see arrives: values and outputs there have spread 1/√dim and not 0.02.
    """
    common = torch.bincount(ids.flatten().long(), minlength=len(model.lm_head.bias)).double()
    common[: len(SPECIAL)] = 0
    common += 0.5  # of what was never seen
    model.lm_head.bias.copy_((common / common.sum()).log())

    table = model.base_model.embeddings.position_embeddings.weight
    count, dim = table.shape
    heads, usual = model.config.num_attention_heads, model.config.initializer_range
    if dim % (2 * heads):
        raise ValueError(f"{heads} heads of a width of {dim} do not have pairs of units each")
    rates = math.pi * (torch.arange(dim // 2) + 0.5) / (dim // 2)
    angles = torch.arange(count)[:, None] * rates
    waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    table.copy_(usual * math.sqrt(2) * LOUD * waves)

    block = model.base_model.encoder.layer[0].attention
    query, key = _shifts(rates, NEAR[:heads], dim // heads)
    block.self.query.weight[: len(query)] = query
    block.self.key.weight[: len(key)] = key
    for weight in (block.self.value.weight, block.output.dense.weight):
        weight.mul_(dim**-0.5 / usual)


def _shifts(rates: Tensor, offsets: Sequence[int], width: int) -> tuple[Tensor, Tensor]:
    """Queries and keys, [D of these heads, D], of heads that each look so many places on.

    Turned by an offset, the waves of a place are those of the place looked at, so that query and
    key agree there: with a score of FOCUS after the first norm, in which a wave's square is
    2 · LOUD² / (2 + LOUD²), beside a word and its type. Each head has waves of its own, by lot:
    evenly spaced ones would agree at other distances, too.
    """
    query, key = torch.zeros(2, len(offsets) * width, 2 * len(rates))
    square = 2 * LOUD**2 / (2 + LOUD**2)
    gain = math.sqrt(FOCUS * math.sqrt(width) / (width / 2 * square))
    lots = torch.randperm(len(rates), generator=torch.Generator().manual_seed(0)).tolist()
    for head, offset in enumerate(offsets):
        for i in range(width // 2):
            row = head * width + 2 * i
            wave = lots[row // 2]
            cos, sin = math.cos(rates[wave] * offset), math.sin(rates[wave] * offset)
            turn = torch.tensor([[cos, sin], [-sin, cos]])
            query[row : row + 2, 2 * wave : 2 * wave + 2] = gain * turn
            key[row : row + 2, 2 * wave : 2 * wave + 2] = gain * torch.eye(2)
    return query, key


def _image_config(settings: Settings) -> Any:
    from transformers import ViTMAEConfig

    return ViTMAEConfig(
        image_size=settings["side"],
        patch_size=settings["patch"],
        hidden_size=settings["dim"],
        num_hidden_layers=settings["depth"],
        num_attention_heads=settings["heads"],
        intermediate_size=4 * settings["dim"],
        decoder_hidden_size=settings["decoder_dim"],
        decoder_num_hidden_layers=settings["decoder_depth"],
        decoder_num_attention_heads=settings["decoder_heads"],
        decoder_intermediate_size=4 * settings["decoder_dim"],
        mask_ratio=settings["mask_ratio"],
        norm_pix_loss=True,
    )


def _text_config(settings: Settings, vocabulary: int) -> Any:
    from transformers import RobertaConfig

    return RobertaConfig(
        vocab_size=vocabulary,
        hidden_size=settings["dim"],
        num_hidden_layers=settings["depth"],
        num_attention_heads=settings["heads"],
        intermediate_size=4 * settings["dim"],
        hidden_dropout_prob=settings["dropout"],
        attention_probs_dropout_prob=settings["dropout"],
        # RoBERTa counts its places from behind the padding's.
        max_position_embeddings=settings["length"] + SPECIAL.index("<pad>") + 1,
        bos_token_id=SPECIAL.index("<s>"),
        pad_token_id=SPECIAL.index("<pad>"),
        eos_token_id=SPECIAL.index("</s>"),
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )


def masked_loss(
    encoder: Encoder, data: Tensor, settings: Mapping[str, Any]
) -> Callable[[Tensor], Tensor]:
    """The masked loss of the examples with these numbers, in the precision of the settings.

    What is hidden is drawn here and handed to the model. The numbers come from the device's own
    generator, which `train` seeds, keeps in its checkpoints and carries through a captured step;
    a generator of ours would be frozen into the graph.
    """
    device = encoder.device
    if isinstance(encoder, ImageEncoder):
        # Prepared once: a captured step cannot copy the mean of a channel from the host.
        data = torch.cat([encoder.batch(some)["pixel_values"] for some in data.split(CHUNK)])
        one = image_loss(encoder, settings["crop"])
        length = round(encoder.patches * (1 - settings["mask_ratio"])) + 1  # that are seen
    else:
        data, one, length = data.to(device), text_loss(encoder.model), settings["length"]

    half = settings["precision"] == "bfloat16"
    kernels = attention_kernels(length, device.type, half)

    def loss(rows: Tensor) -> Tensor:
        products = torch.autocast(device.type, torch.bfloat16, enabled=half)
        with products, sdpa_kernel(kernels, set_priority=True):
            return one(data[rows])

    return loss


def image_loss(encoder: ImageEncoder, crop: int) -> Callable[[Tensor], Tensor]:
    """Of pixels [B, C, H, W], moved and mirrored."""

    def loss(pixels: Tensor) -> Tensor:
        noise = torch.rand(len(pixels), encoder.patches, device=pixels.device)
        return encoder.masked({"pixel_values": augment(pixels, crop)}, noise).loss

    return loss


def text_loss(model: Any) -> Callable[[Tensor], Tensor]:
    """Of rows of tokens. Only what is hidden goes through the head, else a third of all work."""

    def loss(ids: Tensor) -> Tensor:
        ids = ids.long()
        shown, places = hide(ids, model.config.vocab_size)
        states = model.base_model(input_ids=shown)[0]
        picked = states.gather(1, places[..., None].expand(-1, -1, states.shape[-1]))
        logits = model.lm_head(picked).float()
        return F.cross_entropy(logits.flatten(0, 1), ids.gather(1, places).flatten())

    return loss


def hide(ids_BL: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """What to show instead of rows of tokens, and the hidden places [B, M], as many in each row.

    As in BERT, four of five show <mask>, one of ten another word, one of ten what is there.
    """
    rows, length = ids_BL.shape
    count = max(round(MASKED * (length - 2)), 1)
    lots = torch.rand(rows, length, device=ids_BL.device)
    places = lots.masked_fill(ids_BL < len(SPECIAL), 2.0).topk(count, largest=False).indices
    true, fates = ids_BL.gather(1, places), torch.rand(rows, count, device=ids_BL.device)
    words = torch.randint(len(SPECIAL), vocabulary, (rows, count), device=ids_BL.device)
    put = torch.where(fates < HIDDEN + OTHER, words, true)
    put = put.masked_fill(fates < HIDDEN, SPECIAL.index("<mask>"))
    return ids_BL.scatter(1, places, put), places
