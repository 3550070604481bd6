"""Data that arrive in mega-batches: wait, replay, grow, and a ledger of what each choice costs."""

from .backbones import MLP, VGG19, TreeMLP, TreeVGG19
from .base import Learner, Phase, Report
from .data import Batch, Examples, problem_examples, row_keys, token_blocks
from .fitting import Training
from .journal import Entry, Journal
from .learners import learner, learners
from .ledger import Summary, read_ledger, summary
from .readers import Reader
from .run import Result, run_stream
from .serving import Current, Predictions, load_current
from .stream import Folder, Seen, Stream, cut
from .versions import Version, read_current

__all__ = [
    "MLP",
    "VGG19",
    "Batch",
    "Current",
    "Entry",
    "Examples",
    "Folder",
    "Journal",
    "Learner",
    "Phase",
    "Predictions",
    "Reader",
    "Report",
    "Result",
    "Seen",
    "Stream",
    "Summary",
    "Training",
    "TreeMLP",
    "TreeVGG19",
    "Version",
    "cut",
    "learner",
    "learners",
    "load_current",
    "problem_examples",
    "read_current",
    "read_ledger",
    "row_keys",
    "run_stream",
    "summary",
    "token_blocks",
]
