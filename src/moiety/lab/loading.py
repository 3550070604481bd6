"""Find a study by its name, or in a file of the user's.

study = load_study("lab/routers")        # built in: moiety/studies/lab/routers.py
study = load_study("mine/routers.py")    # a file that holds a value named `study`
study = load_study("question.toml")      # a comparison in a few lines
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from .study import Study

BUILT_IN = Path(__file__).parent.parent / "studies"


def load_study(reference: str) -> Study:
    """Load a study from its name or from a .py or .toml file."""
    if reference.endswith((".py", ".toml")):
        path = Path(reference)
        if not path.is_file():
            raise ValueError(f"there is no file {reference}; give a study file, or a built-in name")
        if path.suffix == ".toml":
            from .compare import from_toml

            return from_toml(path)
        return _study_of(_run_file(path), reference)
    known = list_studies()
    if reference not in known:
        near = difflib.get_close_matches(reference, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "`moiety study list` names them all"
        raise ValueError(f"there is no study {reference!r}; {hint}")
    module = "moiety.studies." + reference.replace("/", ".").replace("-", "_")
    return _study_of(importlib.import_module(module), reference)


def list_studies() -> dict[str, str]:
    """The titles of all built-in studies by name; their files are read, not run."""
    return _titles(BUILT_IN)


@functools.cache
def _titles(folder: Path) -> dict[str, str]:
    titles = {}
    for path in sorted(folder.glob("[!_]*/[!_]*.py")):
        found = _title(path)
        if found is not None:
            titles[f"{path.parent.name}/{path.stem}".replace("_", "-")] = found
    return titles


def _title(path: Path) -> str | None:
    """The title that a file gives its `study`, or else its first line; None: it holds no study."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if not any(isinstance(to, ast.Name) and to.id == "study" for to in targets):
            continue
        keywords = getattr(node.value, "keywords", [])  # type: ignore[attr-defined]
        for keyword in keywords:
            if keyword.arg == "title" and isinstance(keyword.value, ast.Constant):
                return str(keyword.value.value)
        return (ast.get_docstring(tree) or path.stem).splitlines()[0]
    return None


def _run_file(path: Path) -> ModuleType:
    """Run a study file as a module of its own."""
    name = "moiety_study_" + re.sub(r"\W", "_", str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the file look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be loaded: {_where(error, path)}") from error
    return module


def _where(error: Exception, path: Path) -> str:
    """Say what was raised, and at which line of the file."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).resolve() == path.resolve():
            line = frame.lineno
    what = traceback.format_exception_only(error)[-1].strip()
    return what if line is None else f"line {line}: {what}"


def _study_of(module: Any, reference: str) -> Study:
    """Take the value named `study` of a module."""
    study = getattr(module, "study", None)
    if not isinstance(study, Study):
        raise ValueError(f"{reference} holds no study; give it a value `study = Study(...)`")
    return study
