"""A C source of csrc/ as it is now, as a library, whatever is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"


def shared_library(name: str, folder: Path, optimise: str) -> str:
    """Path of csrc/NAME.c, compiled into `folder`, where warnings are errors. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    path = folder / f"{name}.so"
    flags = [optimise, "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(path), str(CSRC / f"{name}.c")], check=True)
    return str(path)
