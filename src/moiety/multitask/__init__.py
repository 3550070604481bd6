"""Several tasks, one mixture: a sparse gate for each task over shared experts."""

from .base import MultiTask, Outputs, packed_loss, total_loss
from .baselines import PLE, SharedBottom, SingleTask
from .gate_log import GateLog
from .metrics import task_metrics
from .model import MultiGate
from .task import MISSING, Task, pack, task_loss, unpack
from .union import mix, union

__all__ = [
    "MISSING",
    "PLE",
    "GateLog",
    "MultiGate",
    "MultiTask",
    "Outputs",
    "SharedBottom",
    "SingleTask",
    "Task",
    "mix",
    "pack",
    "packed_loss",
    "task_loss",
    "task_metrics",
    "total_loss",
    "union",
    "unpack",
]
