"""What trials of several arms, studies and processes share: made once, then kept on disk.

    kept("course", {"learner": "single", "wait": "10", …}, make)      # read, or made and written

A value is plain JSON and lies, by a hash of all that it depends on, in $MOIETY_COURSES or in the
user's cache. Who wants what another process is making waits for it; a kill loses only what was
being made, so that a study that was stopped, also on another machine, goes on from here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import io
from ...data.named import cache

RECIPE = 2  # counted up when training changes: what was kept before is not found any more


def folder() -> Path:
    """Where all of it lies."""
    return Path(os.environ.get("MOIETY_COURSES") or cache() / "anytime").expanduser()


def place(kind: str, words: Mapping[str, Any]) -> Path:
    """The file of a value."""
    text = json.dumps({**words, "recipe": RECIPE}, sort_keys=True)
    return folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}" / "kept.json.gz"


def kept(kind: str, words: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """The value of these words, made where it is missing."""
    path = place(kind, words)
    if not path.exists():
        with io.lease(path.parent, wait=math.inf):
            if not path.exists():
                text = json.dumps({"words": words, "value": make()}, allow_nan=False)
                # Without a time of its own, so that equal values are equal files.
                io.write_atomic(path, gzip.compress(text.encode(), 6, mtime=0))
    return json.loads(gzip.decompress(path.read_bytes()))["value"]
