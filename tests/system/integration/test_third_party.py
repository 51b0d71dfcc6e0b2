"""A third-party tier: the package of docs/writing-a-tier.md, installed, and used from a configuration file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/writing-a-tier.md"

# Stores more than host memory holds, then finds it again in another store.
PROGRAM = """
import json, sys
import nixl_tiers
import numpy as np
keys = [b"key-%d" % number for number in range(32)]
chunks = np.random.default_rng(1).integers(0, 256, (32, 60_000), np.uint8)
for turn in range(2):
    with nixl_tiers.open(sys.argv[1], chunk_bytes=60_000, namespace="n") as store:
        assert store.wait_ready(60)
        if turn == 0:
            for key, chunk in zip(keys, chunks):
                assert store.put([key], chunk[None]) == 1
                assert store.flush(60)
        found = np.zeros_like(chunks)
        hits = [store.get([key], row[None])[0] for key, row in zip(keys, found)]
        assert all(hits) and (found == chunks).all()
        stats = store.stats()["shelf"]
print(json.dumps({"modules": sorted(sys.modules), "stats": stats}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the page."""
    folder = tmp_path_factory.mktemp("shelf")
    for name, text in re.findall(r"^```\w+\n# ([\w/.]+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    files = ["config.py", "pyproject.toml", "test_shelf.py", "tier.py"]
    assert sorted(path.name for path in folder.rglob("*.*")) == files
    return folder


@pytest.fixture(scope="module")
def site(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the package was installed."""
    place = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", place, package], check=True, timeout=300)
    return place


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiers.yaml"
    path.write_text(
        f"""
        tiers:
          - {{type: cpu, capacity: 512KiB}}
          - {{type: shelf, path: {tmp_path / "kv"}, capacity: 64MiB, write: through}}
        """
    )
    return path


def run(site: Path, cwd: Path, *command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-P", *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_rows_are_hits_after_a_restart_and_the_implementation_stays_in_the_mover(
    site: Path, file: Path, tmp_path: Path
) -> None:
    ended = run(site, tmp_path, "-c", PROGRAM, file)
    assert ended.returncode == 0, ended.stderr[-3000:]
    report = json.loads(ended.stdout.splitlines()[-1])
    assert report["stats"]["hits"] >= 24, "host memory holds 8 at most"
    assert report["stats"]["corrupt"] == report["stats"]["failed"] == 0
    modules = set(report["modules"])
    assert "shelf_tier.config" in modules
    assert not {"shelf_tier.tier", "boto3", "botocore", "nixl", "nixl_tiers.tiers.nixl_agent"} & modules


def test_conformance_suite_passes(package: Path, site: Path, tmp_path: Path) -> None:
    ended = run(site, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", package / "test_shelf.py")
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert re.search(r"\d\d passed", ended.stdout)
