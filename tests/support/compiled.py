"""A C source of csrc/ as it is now, as a library, whatever is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"


def sanitizer_flags(compiler: str, folder: Path, sanitizers: str = "address,undefined") -> list[str]:
    """For gcc. Skips where a program that says nothing cannot be built with them or does not run: what does not compile
    itself is no reason."""
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-g", "-O1"]
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    for command in ([compiler, *flags, "-o", str(folder / "probe"), str(probe)], [str(folder / "probe")]):
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("no sanitizers here")
    return flags


def shared_library(name: str, folder: Path, optimise: str) -> str:
    """Path of csrc/NAME.c, compiled into `folder`."""
    return library_of(CSRC / f"{name}.c", optimise, folder / f"{name}.so")


def library_of(source: Path, optimise: str, path: Path | None = None) -> str:
    """Path of a C file as a library, by default beside it, where warnings are errors. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    path = path or source.with_suffix(".so")
    flags = [optimise, "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(path), str(source)], check=True)
    return str(path)
