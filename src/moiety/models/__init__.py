"""What is built of it: small models for studies and demonstrations."""

from .patch_transformer import PatchTransformer, dense

__all__ = ["PatchTransformer", "dense"]
