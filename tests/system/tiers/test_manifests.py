"""Manifests beside the rows of file tiers, of either layout: who writes them, and what becomes of the tier without."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.manifest import MANIFEST_NAME, Description, Manifest
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import manifests
from tests.support.times import changed
from tests.system.tiers.file_tiers import Clock, FileTier, load, make_tier, run_until, store

LAYOUTS = pytest.mark.parametrize("layout", ["slabs", "files"])
NAMESPACE = bytes(range(16))
ABOUT = Description(model="org/model", revision="abc", dtype="bfloat16", vllm="0.32.0", note="test rows")
OK = Outcome.OK
SOON = changed(disk_check_s=0.01)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that could not be written is tried again at once, and the last one is waited for."""
    monkeypatch.setattr(manifests, "RETRY_S", 0.01)
    monkeypatch.setattr(manifests, "CLOSE_S", 120.0)
    monkeypatch.setattr(manifests, "CHECK_S", 0.01)


def start(layout: str, path: Path, region: HostRegion, clock: Clock | None = None, **fields: object) -> FileTier:
    tier = make_tier(layout, path, region, times=SOON, **fields)
    if clock is not None:
        tier._clock = clock
    tier.identify("node/1/abcd")
    tier.describe(ABOUT)
    tier.open(NAMESPACE, 0)
    for batch in tier.list_rows():
        time.sleep(0.0 if batch else 0.001)
    return tier


def manifest_path(layout: str, path: Path) -> Path:
    home = path / "part-0" if layout == "slabs" else path
    return home / NAMESPACE.hex() / MANIFEST_NAME


def read(path: Path) -> Manifest | None:
    try:
        return Manifest.decode(path.read_bytes())
    except FileNotFoundError:
        return None


@LAYOUTS
def test_manifest_is_written_beside_rows_for_its_owner_only(layout: str, tmp_path: Path, region: HostRegion) -> None:
    tier, about = start(layout, tmp_path, region), manifest_path(layout, tmp_path)
    assert store(tier, region, range(3)) == [OK] * 3
    run_until(tier, about.exists)
    found = read(about)
    assert found is not None
    assert (found.namespace, found.description) == (NAMESPACE.hex(), ABOUT)
    assert (found.engine, found.epoch, found.row_bytes) == ("node/1/abcd", 0, region.geometry.row_bytes)
    assert abs(found.last_used - time.time()) < 600
    assert stat.S_IMODE(about.stat().st_mode) == 0o600
    tier.close()
    assert not list(tmp_path.rglob("*.new"))
    assert not list(tmp_path.rglob("*.tmp"))


KILLED = """
import os, signal, sys
from pathlib import Path
from nixl_tiers.tiers.folder import Folder
path, layout = Path(sys.argv[1]), sys.argv[2]
rename = Folder.rename
Folder.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # just before the file gets its name
if layout == "files":
    from nixl_tiers.tiers.rowfile.directory import RowDirectory
    RowDirectory(path).write_manifest(sys.argv[3], b"{ half of it")
else:
    from nixl_tiers.tiers.slab.shards import Shards
    quota = Shards(path, 1 << 30)
    with quota.locked():
        quota.acquire_shard(bytes.fromhex(sys.argv[3])).write("about.json", b"{ half of it")
"""


@LAYOUTS
def test_kill_while_a_manifest_is_written_leaves_the_old_one(layout: str, tmp_path: Path, region: HostRegion) -> None:
    about = manifest_path(layout, tmp_path)
    tier = start(layout, tmp_path, region)
    store(tier, region, range(3))
    run_until(tier, about.exists)
    tier.close()
    before = about.read_bytes()
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), layout, NAMESPACE.hex()], check=False, timeout=120
    )
    assert killed.returncode == -9
    assert about.read_bytes() == before
    about.unlink()
    tier = start(layout, tmp_path, region)
    run_until(tier, lambda: read(about) is not None)
    assert load(tier, region, range(3)) == [OK] * 3
    tier.close()
    assert not list(tmp_path.rglob("*.new"))
