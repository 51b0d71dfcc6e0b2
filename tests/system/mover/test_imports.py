"""A mover imports modules from its own installation and never from the working directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Modules that a mover or Python itself imports early; our own package, and one that the checkout's root could shadow.
TRAPS = ("msgspec", "xxhash", "argparse", "numpy", "nixl_tiers", "sitecustomize", "nixl")

# The scheduler's process, with all of its modules loaded, runs in a directory that others can write to.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
path, python_path, first, last = json.loads(sys.argv[1])
sys.path[:] = [*first, *sys.path, *last]
import nixl_tiers
os.environ["PYTHONPATH"] = python_path
tiers = [{"type": "cpu", "capacity": "1MiB"}, {"type": "file", "path": path, "capacity": "64MiB", "min_free": 0}]
with nixl_tiers.open({"tiers": tiers}, chunk_bytes=4096, namespace="n") as store:
    while (file := store.stats()["file"])["listing"] or not file["up"]:
        time.sleep(0.01)
    pid = store.coordinator.mover_pids[0]
    command = Path(f"/proc/{pid}/cmdline").read_text().split(chr(0))
print(json.dumps([command, nixl_tiers.__file__]))
"""


@pytest.fixture
def trap_dir(tmp_path: Path) -> Path:
    """A directory with modules that record their import in the file `imported`."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in TRAPS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + ' ')\n")
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Path]:
    """The interpreter of a new environment with this one's packages except our own, which come from the `lines` of a
    .pth file."""

    def make(*lines: Path) -> Path:
        home = tmp_path / "environment"
        venv.create(home, with_pip=False, symlinks=True)
        site = next((home / "lib").glob("python*/site-packages"))
        # As plain lines, so that the .pth files of an editable installation there are not processed.
        others = [path for path in sys.path if path.endswith("site-packages")]
        (site / "all.pth").write_text("".join(f"{line}\n" for line in [*map(str, lines), *others]))
        return home / "bin" / "python"

    return make


def run_scheduler(
    python: Path,
    trap_dir: Path,
    python_path: str,
    first: Sequence[Path] = (),
    last: Sequence[Path] = (),
) -> tuple[list[str], Path]:
    """The command line of a mover, and where the scheduler imported our package. `first`, `last` extend its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = json.dumps([str(trap_dir.parent / "kv"), python_path, [*map(str, first)], [*map(str, last)]])
    ended = subprocess.run(
        [python, "-P", "-c", PROGRAM, arguments],
        cwd=trap_dir,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    command, package = json.loads(ended.stdout.splitlines()[-1])
    assert not (trap_dir.parent / "imported").exists(), (trap_dir.parent / "imported").read_text()
    return command, Path(package).parent


@pytest.mark.parametrize("python_path", [":", ".:work"])
def test_nothing_is_imported_from_the_working_directory(
    python: Callable[..., Path], trap_dir: Path, python_path: str
) -> None:
    """With an editable installation."""
    command, package = run_scheduler(python(ROOT), trap_dir, python_path)
    assert package == ROOT / "nixl_tiers"
    assert str(package / "mover" / "__main__.py") in command


def test_nothing_is_imported_from_there_when_only_the_scheduler_finds_the_package(
    python: Callable[..., Path], trap_dir: Path
) -> None:
    run_scheduler(python(), trap_dir, ":", last=[ROOT])


def test_the_mover_uses_the_schedulers_copy_when_another_one_is_installed(
    python: Callable[..., Path], trap_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "nixl_tiers"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('another copy')\n")
    run_scheduler(python(other.parent), trap_dir, "", first=[ROOT])
