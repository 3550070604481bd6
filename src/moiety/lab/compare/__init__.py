"""Which router, or which gates of tasks, on these data? What a user asks in one line, as a study.

study = from_toml("runs/compare/adult/study.toml")     # what `moiety compare` wrote, or a user

| file | what |
|---|---|
| `asked.py` | what was asked for: a TOML file, every key checked |
| `folder.py` | the file in its folder, and the command that repeats it |
| `models.py` | the model of an arm: a preset that is built for the data |
| `pretrained.py` | or one of Hugging Face, upcycled |
| `task.py` | inputs, losses and measures of a problem |
| `measure.py` | what an arm costs and where its tokens go |
| `gates.py`, `gate_task.py` | the same for several tasks on a table, with a gate for each |
| `study.py` | the study: arms, metrics, claims, a trial, its speed |
"""

from .asked import Asked, AskedGates, read_asked, write_asked
from .study import from_toml, make_study

__all__ = ["Asked", "AskedGates", "from_toml", "make_study", "read_asked", "write_asked"]
