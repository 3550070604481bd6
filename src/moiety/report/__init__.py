"""Pages of results: plain values in, one self-contained HTML file out.

A page holds all it needs and may load nothing: a policy in its head forbids the network.
"""

from .audit import AuditPart, audit_page
from .course import course_page
from .health import health_page
from .routing import routing_page
from .stream import StreamPart
from .study import study_page
from .table import Column, TablePart
from .tasks import TaskPart

__all__ = [
    "AuditPart",
    "Column",
    "StreamPart",
    "TablePart",
    "TaskPart",
    "audit_page",
    "course_page",
    "health_page",
    "routing_page",
    "study_page",
]
