"""A mover imports modules from its own installation and never from the working directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Modules that a mover or Python itself imports early; our own package, and one that the checkout's root could shadow.
TRAPS = ("msgspec", "xxhash", "argparse", "numpy", "nixl_tiers", "sitecustomize", "nixl")

# The scheduler's process, with all of its modules loaded, runs in a directory that others can write to.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
path, python_path = sys.argv[1:]
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


@pytest.mark.parametrize("python_path", [":", ".:work"])
def test_nothing_is_imported_from_the_working_directory(tmp_path: Path, python_path: str) -> None:
    """With an editable installation, in an environment that has this one's packages except our own."""
    folder, imported = tmp_path / "work", tmp_path / "imported"
    folder.mkdir()
    for name in TRAPS:
        (folder / f"{name}.py").write_text(f"open({str(imported)!r}, 'a').write({name!r} + ' ')\n")
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    site = next((home / "lib").glob("python*/site-packages"))
    # As plain lines, so that the .pth files of an editable installation there are not processed.
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "all.pth").write_text("".join(f"{line}\n" for line in [str(ROOT), *others]))
    ended = subprocess.run(
        [home / "bin" / "python", "-P", "-c", PROGRAM, str(tmp_path / "kv"), python_path],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert not imported.exists(), imported.read_text()
    command, package = json.loads(ended.stdout.splitlines()[-1])
    assert package == str(ROOT / "nixl_tiers" / "__init__.py")
    assert str(ROOT / "nixl_tiers" / "mover" / "__main__.py") in command
