"""The direction of imports: a room of the house imports only rooms above it in the list."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

# From the top of the house to the bottom; rooms on one line are siblings that never import each
# other. A new room gets its place here.
ORDER = [
    ["modes"],
    ["io", "cost", "report", "tables"],
    ["routing"],
    ["experts", "gates", "record"],
    ["moe"],
    ["tokens"],
    ["native"],
    ["watch"],
    ["grow"],
    ["hf"],
    ["models"],
    ["data"],
    ["train"],
    ["multitask", "anytime", "adapt", "robust"],
    ["lab"],
    ["studies"],
    ["testing"],
    ["cli"],
    ["__main__"],
]
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
# What checks the others may see them all.
SEES_ALL = {"testing", "__init__"}
LIGHT = ["transformers", "pandas", "scipy", "sklearn", "rich", "typer", "jinja2", "plotly"]


def room_of(module: str) -> str:
    """Name the room of a dotted module: `moiety.routing.base` is in `routing`."""
    return [*module.split("."), "__init__"][1]


def imported(tree: ast.AST, package: str):
    """Yield (line, dotted name) of every import in a file of `package`, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one dot is the package itself, each further dot one package up
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base]) if base else ".".join(up)
            # `from moiety import lab` names a room only through the alias.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def wrong_imports(source: Path) -> list[str]:
    """List every import under `source`/moiety that points down the house or to a sibling."""
    found = []
    for path in sorted((source / "moiety").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        room = room_of(".".join(parts))
        if room in SEES_ALL:
            continue
        for line, name in imported(ast.parse(path.read_text()), ".".join(parts[:-1])):
            other = room_of(name)
            if name.split(".")[0] != "moiety" or other == room:
                continue
            if room not in FLOOR:
                found.append(f"{path.relative_to(source)}: room {room!r} has no place in ORDER")
            elif other not in FLOOR:
                # A name of the package itself stands for the whole house.
                found.append(f"{path.relative_to(source)}:{line}: import {name!r} from its room")
            elif FLOOR[other] >= FLOOR[room]:
                found.append(f"{path.relative_to(source)}:{line}: {room} imports {other}")
    return found


def test_rooms_import_only_rooms_above():
    assert wrong_imports(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "code", "wrong"),
    [
        ("routing/base.py", "import moiety.experts.dispatch", "routing imports experts"),
        ("routing/base.py", "from ..experts import dispatch", "routing imports experts"),
        ("routing/base.py", "from .. import moe", "routing imports moe"),
        ("routing/base.py", "from moiety import lab", "routing imports lab"),
        ("routing/base.py", "from moiety import MoE", "import 'moiety.MoE' from its room"),
        ("moe.py", "from .watch import watch", "moe imports watch"),
        ("moe.py", "def f():\n    from .grow import grow", "moe imports grow"),
        ("moe.py", "if TYPE_CHECKING:\n    import moiety.hf", "moe imports hf"),
        ("adapt/a.py", "from ..robust import pgd", "adapt imports robust"),
        ("report/a.py", "from .. import io", "report imports io"),
        ("cost.py", "from .io import read_json", "cost imports io"),
        ("lab/__init__.py", "from ..studies import x", "lab imports studies"),
        ("attic.py", "from .io import read_json", "'attic' has no place"),
    ],
)
def test_a_planted_wrong_import_is_found(tmp_path, file, code, wrong):
    path = tmp_path / "moiety" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import torch\n{code}\n")
    (found,) = wrong_imports(tmp_path)
    assert wrong in found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("experts/dispatch.py", "from ..routing.value import Routing\nfrom . import lowrank"),
        ("routing/__init__.py", "from .base import Router\nfrom . import base"),
        ("testing/router.py", "from ..cli import main"),
        ("cli/demo.py", "import moiety.studies\nfrom ..testing import check_router"),
        ("__init__.py", "from .moe import MoE"),
        ("cost.py", "import reportlab\nfrom io import BytesIO\nimport logging"),
    ],
)
def test_a_right_import_passes(tmp_path, file, code):
    path = tmp_path / "moiety" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    assert wrong_imports(tmp_path) == []


def test_import_moiety_loads_torch_and_nothing_heavier():
    code = f"import sys, moiety; print(*(set({LIGHT}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_the_package_is_typed():
    assert (SOURCE / "moiety" / "py.typed").exists()
