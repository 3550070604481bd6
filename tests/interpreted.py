"""Code with Triton kernels, run by Triton's interpreter in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpret(code, beside):
    """Run code that may import the tests in the folder of a file; skip without Triton."""
    pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    path = os.pathsep.join([str(Path(beside).parent), *filter(None, sys.path)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=240)
