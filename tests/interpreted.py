"""Code with Triton kernels, run by Triton's interpreter in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest


def interpret(code, beside):
    """Run code that may import the tests in the folder of a file; skip where that cannot be."""
    triton = pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    if _parts(triton) < (3, 7) and _parts(numpy) >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 cannot loop with numpy 2.4 and later")
    path = os.pathsep.join([str(Path(beside).parent), *filter(None, sys.path)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=240)


def _parts(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])
