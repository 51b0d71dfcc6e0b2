"""What a machine without a registry lacks, packed on one that has it: `python -m tools.gpu_day.carried 3.12` makes
.gpu-day/ with wheels for that Python, thinned to what is used, and the libraries of this tree."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nixl_tiers.base import native

ROOT: Final = Path(__file__).parents[2]
PACKED: Final = ROOT / ".gpu-day"
OF_TESTS: Final = ("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments")
WHEELS: Final = ("nixl-cu13==1.5.1", "nvidia-cufile>=1.20,<1.21", "nvidia-cuda-runtime>=13,<14", "xxhash", *OF_TESTS)
PLATFORMS: Final = (*(f"manylinux_2_{n}_x86_64" for n in (28, 27, 17)), "manylinux2014_x86_64")
ROOTS: Final = ("_bindings", "_utils", "libplugin_GDS_MT", "libplugin_POSIX")  # of NIXL, what loads the rest


def pack(python: str) -> None:
    shutil.rmtree(PACKED, ignore_errors=True)
    (PACKED / "wheels").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", name]
        command += ["--implementation", "cp", "--python-version", python, *(f"--platform={one}" for one in PLATFORMS)]
        subprocess.run([*command, *WHEELS], check=True)
        for wheel in sorted(Path(name).glob("*.whl")):
            thinned(wheel, PACKED / "wheels" / wheel.name)
        built = PACKED / "built"
        setup = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={built}", f"--build-temp={name}"]
        subprocess.run(setup, cwd=ROOT, check=True)
    from tests.support import no_gpu

    no_gpu.build(built)
    for file in sorted(file for file in PACKED.rglob("*") if file.is_file()):
        print(f"{file.stat().st_size / 1e6:7.2f} MB  {file.relative_to(PACKED)}")


def thinned(wheel: Path, to: Path) -> None:
    """A copy without what nobody here loads: of NIXL all but two plugins and what they need, of NVIDIA's all but
    libraries."""
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as thin:
        names = set(whole.namelist())
        if wheel.name.startswith("nixl"):
            names = set(_needed(whole))
        elif wheel.name.startswith("nvidia"):
            names = {name for name in names if ".so" in name or name.endswith("METADATA")}
        for name in sorted(names):
            thin.writestr(name, whole.read(name))


def _needed(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Python files, and libraries from ROOTS on: one needs another whose name is in its bytes."""
    libraries = {name: name.rpartition("/")[2] for name in wheel.namelist() if ".so" in name and "nixl_ep" not in name}
    left = {name for name, file in libraries.items() if not file.startswith(("libplugin", "libtelemetry", "libtrace"))}
    todo = [name for name, file in libraries.items() if file.startswith(ROOTS)]
    left -= set(todo)
    while todo:
        name = todo.pop()
        yield name
        content = wheel.read(name)
        found = {other for other in left if b"\0" + libraries[other].encode() + b"\0" in content}
        left -= found
        todo += found
    yield from (name for name in wheel.namelist() if name.startswith("nixl_cu") and name.endswith((".py", "METADATA")))


def unpacked() -> list[str]:
    """Places to import from, of what is packed and not on this machine; NIXL's and NVIDIA's libraries in any case."""
    site, here = PACKED / "site", f"cp{sys.version_info.major}{sys.version_info.minor}"
    shutil.rmtree(site, ignore_errors=True)
    for wheel in sorted(PACKED.glob("wheels/*.whl")):
        name, _, tag, *_ = wheel.name.split("-")
        if tag.startswith("cp") and tag != here:
            print(f"not used: {wheel.name}, since this is {here}", flush=True)
        elif name.startswith(("nixl", "nvidia")) or importlib.util.find_spec(name) is None:
            with zipfile.ZipFile(wheel) as content:
                content.extractall(site)
    return [str(site)] if site.exists() else []


def complete_tree() -> None:
    """The tree's own libraries where they are missing: those that are packed, else compiled here."""
    built = PACKED / "built"
    for file in (*built.rglob("*.abi3.so"), *built.rglob("*.fatbin")):
        to = ROOT / file.relative_to(built)
        if not to.exists():
            shutil.copy(file, to)
    try:
        native.require()
    except native.NotBuilt:
        if importlib.util.find_spec("setuptools"):
            subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT, check=False)


if __name__ == "__main__":
    pack(sys.argv[1])
