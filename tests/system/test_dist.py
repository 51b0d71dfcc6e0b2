"""What is released: an sdist that has the whole tree, a wheel built from it that works in an empty environment without
a compiler, the same bytes again from another directory, and an image.

`make dist` makes dist/ and runs these tests on it (NIXL_TIERS_DIST); else they look at archives that they build."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
from packaging.utils import parse_wheel_filename
from packaging.version import Version

ROOT: Final = Path(__file__).parents[2]
LOCAL: Final = shutil.ignore_patterns(
    "__pycache__", "*.so", "*.fatbin", "*.egg-info", "PKG-INFO", "setup.cfg", ".git", ".venv", ".cache", "build",
    "dist", "_build", "*-out", "gds-report", ".hypothesis", ".*_cache",
)  # fmt: skip
# Of the tree that an sdist is made from, and that it adds.
MADE: Final = {"PKG-INFO", "setup.cfg"}
# No package is looked for anywhere, and the tree of these tests is not imported by accident.
ALONE: Final = {
    "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": "", "NVCC": "false",
    "SOURCE_DATE_EPOCH": "1700000000",
}  # fmt: skip
ROUND_TRIP: Final = """
import shutil
import sys
from pathlib import Path

import numpy as np

import nixl_tiers

home = Path(nixl_tiers.__file__).parent
assert home.is_relative_to(sys.prefix), home
assert [name for name in ("cc", "gcc", "clang", "nvcc", "ld") if shutil.which(name)] == []
keys, rows = [b"a", b"b"], np.arange(10_000).astype(np.uint8).reshape(2, 5000)
file = {"type": "file", "path": sys.argv[1], "capacity": "64MiB", "min_free": 0}
config = {"tiers": [{"type": "cpu", "capacity": "1MiB"}, file]}
for first in (True, False):
    with nixl_tiers.open(config, 5000, "n") as store:
        assert store.wait_ready(300)
        if first:
            assert store.put(keys, rows) == 2
            assert store.flush(300)
        out = np.zeros_like(rows)
        assert store.get(keys, out) == [True, True]
        assert (out == rows).all()
print(nixl_tiers.__version__)
"""


def run(*command: object, cwd: Path, umask: int = -1, **env: str) -> str:
    words, variables = [str(word) for word in command], {**os.environ, **ALONE, **env}
    done = subprocess.run(
        words, cwd=cwd, env=variables, umask=umask, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without git and without what was built in it."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "nixl_tiers", ignore=LOCAL)


@pytest.fixture(scope="module")
def sources(tree: Path) -> set[str]:
    """The files of the tree, before anything is built."""
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tree: Path, sources: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one sdist, and one wheel that was built from that, without kernels."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ".", cwd=tree)
    return folder


@pytest.fixture(scope="module")
def dist(request: pytest.FixtureRequest) -> Path:
    """What is examined."""
    given = os.environ.get("NIXL_TIERS_DIST")
    return Path(given).resolve() if given else request.getfixturevalue("built")


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("empty"))


def environment(home: Path) -> Path:
    """The Python of a new virtual environment, which finds what nixl_tiers depends on where these tests find it: a .pth
    file names directories, and those of an editable install among them are not followed."""
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    places = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "dependencies.pth").write_text("\n".join(places))
    return home / "bin" / "python"


def install(python: Path, wheel: Path) -> None:
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=wheel.parent)


def test_sdist_has_the_whole_tree_and_nothing_else(dist: Path, sources: set[str]) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        found = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    assert {name for name in found if ".egg-info/" not in name} - MADE == sources


def test_wheel_has_the_package_and_nothing_else(wheel: Path, sources: set[str]) -> None:
    package = {name for name in sources if name.startswith("nixl_tiers/")}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
        described = {name.partition(".dist-info/")[2] for name in archive.namelist()}
    built = {name for name in found if name.endswith((".so", ".fatbin"))}
    assert found - built == package | {"nixl_tiers/swap/csrc/swap.cu", "nixl_tiers/swap/csrc/swap.h"}
    assert [name for name in found if re.search(r"demo|servers|vllm_cpu", name)] == [], "what only a checkout needs"
    assert described >= {"licenses/LICENSE", "entry_points.txt", "METADATA"}
    libraries = {name for name in built if name.endswith(".so")}
    folders = {
        "memory/_hash_copy",
        "core/_tier_rows",
        "swap/_swap_cpu",
        "swap/_swap_submit",
        "tiers/rowfile/_row_files",
        "tiers/slab/_row_worker",
    }
    assert libraries == {f"nixl_tiers/{name}.abi3.so" for name in folders}


@pytest.mark.slow
def test_same_archives_from_another_directory(built: Path, tmp_path: Path) -> None:
    """Of the sdist, later, with another umask. Not shown: with another compiler or setuptools, and the kernels."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "another", filter="data")
    (tree,) = (tmp_path / "another").iterdir()
    again = tmp_path / "again"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", again, ".", cwd=tree, umask=0o077)
    first, second = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (built, again)
    )
    assert first == second


@pytest.mark.slow
def test_wheel_works_without_a_compiler(empty: Path, wheel: Path, tmp_path: Path) -> None:
    install(empty, wheel)
    kept = tmp_path / "kv"
    kept.mkdir()
    path = str(empty.parent)
    version = run(empty, "-c", ROUND_TRIP, kept, cwd=tmp_path, PATH=path).split()[-1]
    assert Version(version) == parse_wheel_filename(wheel.name)[1]
    assert "usage" in run(empty.parent / "nixl-tiers", "--help", cwd=tmp_path, PATH=path).lower()


@pytest.mark.slow
def test_image_can_be_built(tree: Path, tmp_path: Path) -> None:
    """docker/Dockerfile without Docker: its steps, in an empty environment in place of the base image, and without a
    package index. Not shown: the base image, and NIXL's wheel for CUDA 13, which is described as if it were there."""
    lines = re.sub(r"\\\n\s*", "", (ROOT / "docker/Dockerfile").read_text()).splitlines()
    steps = [line.split(" ", 1) for line in lines if line and not line.startswith("#")]
    assert [name for name, _ in steps] == ["ARG", "FROM", "ARG", "ARG", "COPY", "RUN"], "the entry point is the base's"
    arguments = dict(step.split("=", 1) for name, step in steps if name == "ARG")
    assert re.fullmatch(r"vllm/vllm-openai:v\d+\.\d+\.\d+", arguments["BASE"])
    source, target = steps[-2][1].split()
    copied = tmp_path / "context"
    python = environment(tmp_path / "image")
    command = steps[-1][1].replace(target, str(copied)).replace("python3", str(python))
    assert command.count(str(copied)) == 2
    (packages,) = (tmp_path / "image").glob("lib/python*/site-packages")
    nixl = metadata.version("nixl")
    described = packages / f"nixl_cu13-{nixl}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nixl-cu13\nVersion: {nixl}\n")
    given = {**arguments, "VERSION": "1.2.3", "PIP_NO_BUILD_ISOLATION": "0"}
    shutil.copytree(tree / source, copied)
    with pytest.raises(AssertionError, match="nixl_tiers needs a C compiler"):
        run("/bin/sh", "-ec", command, cwd=tmp_path, CC="false", **given)
    shutil.copytree(tree / source, copied, dirs_exist_ok=True)
    run("/bin/sh", "-ec", command, cwd=tmp_path, **given)
    assert not copied.exists()
    assert run(python, "-c", "import nixl_tiers; print(nixl_tiers.__version__)", cwd=tmp_path).strip() == "1.2.3"
    assert (python.parent / "nixl-tiers").exists()
