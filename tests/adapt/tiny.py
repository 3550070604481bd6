"""Tiny masked models of every family, a tokenizer of whole words, and what to read."""

import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
WORDS = [f"w{i}" for i in range(43)]
VOCABULARY = len(SPECIAL) + len(WORDS)
SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 24, **SIZE}
FAMILIES = {
    "bert": lambda: T.BertForMaskedLM(T.BertConfig(**TEXT)),
    "roberta": lambda: T.RobertaForMaskedLM(T.RobertaConfig(**TEXT)),
    "distilbert": lambda: T.DistilBertForMaskedLM(
        T.DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=24,
            max_position_embeddings=24,
        )
    ),
    "electra": lambda: T.ElectraForMaskedLM(T.ElectraConfig(embedding_size=12, **TEXT)),
    "modernbert": lambda: T.ModernBertForMaskedLM(
        T.ModernBertConfig(cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3, **TEXT)
    ),
    "deberta-v2": lambda: T.DebertaV2ForMaskedLM(T.DebertaV2Config(**TEXT)),
    "albert": lambda: T.AlbertForMaskedLM(
        T.AlbertConfig(embedding_size=12, bos_token_id=2, eos_token_id=3, **TEXT)
    ),
}


def tokenizer(words=WORDS, mask=True):
    """Whole words between <s> and </s>."""
    names = SPECIAL if mask else SPECIAL[:-1]
    known = {word: id for id, word in enumerate([*names, *words])}
    plain = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    said = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    if mask:
        said["mask_token"] = "<mask>"
    return T.PreTrainedTokenizerFast(tokenizer_object=plain, **said)


def texts(count=8, shortest=3, longest=12, seed=0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw)
    return [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (int(n),), generator=draw))
        for n in lengths
    ]


def vit_mae(image=12, patch=4, channels=3, **more):
    from moiety.adapt.loading import place_patches

    config = T.ViTMAEConfig(
        image_size=image,
        patch_size=patch,
        num_channels=channels,
        decoder_hidden_size=12,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=16,
        **{**SIZE, **more},
    )
    model = T.ViTMAEForPreTraining(config)
    place_patches(model)
    return model


def pictures(count=6, image=12, channels=3, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, channels, image, image), generator=draw, dtype=torch.uint8)
