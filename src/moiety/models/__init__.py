"""What is built of it: small models for studies and demonstrations, and presets for any data."""

from .image import ImageTransformer
from .mixture import feedforward
from .patch_transformer import PatchTransformer, dense
from .table import TableNet
from .text import TextTransformer, make_tokenizer

__all__ = [
    "ImageTransformer",
    "PatchTransformer",
    "TableNet",
    "TextTransformer",
    "dense",
    "feedforward",
    "make_tokenizer",
]
