"""Several tasks, one mixture: a sparse gate for each task over shared experts."""

from .base import MultiTask, Outputs, packed_loss, total_loss
from .baselines import PLE, SharedBottom, SingleTask
from .diagnostics import Gate, describe_gates, gate_table, overlap, similarity
from .gate_log import GateLog
from .metrics import task_metrics
from .model import MultiGate
from .similar import jaccard, jaccard_by_group, random_jaccard
from .task import MISSING, Task, pack, task_loss, unpack
from .trajectory import Trajectory
from .union import mix, union_of

__all__ = [
    "MISSING",
    "PLE",
    "Gate",
    "GateLog",
    "MultiGate",
    "MultiTask",
    "Outputs",
    "SharedBottom",
    "SingleTask",
    "Task",
    "Trajectory",
    "describe_gates",
    "gate_table",
    "jaccard",
    "jaccard_by_group",
    "mix",
    "overlap",
    "pack",
    "packed_loss",
    "random_jaccard",
    "similarity",
    "task_loss",
    "task_metrics",
    "total_loss",
    "union_of",
    "unpack",
]
