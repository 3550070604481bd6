"""Data that arrive in mega-batches: wait, replay, grow, and a ledger of what each choice costs."""

from .data import Batch, Examples, problem_examples, row_keys, token_blocks
from .journal import Entry, Journal
from .readers import Reader
from .stream import Folder, Seen, Stream, cut

__all__ = [
    "Batch",
    "Entry",
    "Examples",
    "Folder",
    "Journal",
    "Reader",
    "Seen",
    "Stream",
    "cut",
    "problem_examples",
    "row_keys",
    "token_blocks",
]
