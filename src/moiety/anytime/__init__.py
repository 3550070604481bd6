"""Data that arrive in mega-batches: wait, replay, grow, and a ledger of what each choice costs."""

from .data import Batch, Examples, problem_examples, row_keys, token_blocks

__all__ = ["Batch", "Examples", "problem_examples", "row_keys", "token_blocks"]
