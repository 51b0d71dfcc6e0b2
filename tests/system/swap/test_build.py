"""What setup.py promises: the libraries land where the package looks, and without a compiler there is no build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nixl_tiers.swap import kernels
from tests.swap.conftest import ROOT

REQUIRE = "from nixl_tiers.base import native; native.require(); print(native.__file__)"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The parts of the source tree that the build of the library needs."""
    pytest.importorskip("setuptools")
    built = shutil.ignore_patterns("*.so", "*.fatbin", "__pycache__")
    for folder in ("csrc", "nixl_tiers/swap"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=built)
    for other in ("memory", "core", "tiers/rowfile", "tiers/slab"):  # where the other libraries go
        (tmp_path / "nixl_tiers" / other).mkdir(parents=True)
    (tmp_path / "nixl_tiers" / "__init__.py").touch()
    shutil.copytree(ROOT / "nixl_tiers" / "base", tmp_path / "nixl_tiers" / "base", ignore=built)
    for name in ("setup.py", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", *(arguments or ["--inplace"])],
        cwd=folder,
        env={**os.environ, "NVCC": "/nonexistent/nvcc", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_build_in_place_is_found(copy: Path, compiler: str) -> None:
    built = build(copy)
    assert built.returncode == 0, built.stderr
    found = subprocess.run([sys.executable, "-c", REQUIRE], cwd=copy, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()) == copy / "nixl_tiers" / "base" / "native.py"
    assert not list(copy.rglob("*.fatbin"))
    assert "the GPU kernels are left out" in built.stdout
    libraries = list((copy / "nixl_tiers").rglob("*.so"))
    assert len(libraries) == 6
    if shutil.which("readelf"):
        listed = subprocess.run(["readelf", "-d", *libraries], capture_output=True, text=True, check=True).stdout
        assert listed.count("Shared library: [libc.so.6]") == len(libraries)
        assert "runpath" not in listed, "where this machine has its Python"


def test_a_wheel_holds_the_sources_of_its_kernels(copy: Path, compiler: str, tmp_path: Path) -> None:
    """swap.kernels looks for both beside itself, and never takes a fatbin of other sources."""
    tool = tmp_path / "nvcc"
    tool.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"\n')
    tool.chmod(0o755)
    built = build(copy, "--build-lib", "wheel", NVCC=str(tool))
    assert built.returncode == 0, built.stderr
    folder = copy / "wheel" / "nixl_tiers" / "swap"
    texts = {name: (folder / "csrc" / name).read_text() for name in (kernels.SOURCE, *kernels.HEADERS)}
    assert (folder / kernels.fatbin_name(kernels.digest_of(texts))).read_text() == "made\n"
    assert kernels.digest_of(texts) == kernels.source_digest()
    texts[kernels.SOURCE] += " "
    assert kernels.digest_of(texts) != kernels.source_digest()


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "false"])
def test_without_a_compiler_the_build_ends_with_a_sentence(copy: Path, compiler: str) -> None:
    built = build(copy, CC=compiler)
    assert built.returncode == 1
    assert built.stderr.splitlines()[-1].startswith("nixl_tiers needs a C compiler (cc, or what CC names)")
    assert not list(copy.rglob("*.so"))
