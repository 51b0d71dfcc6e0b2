"""A loader beside the mover that stores row files: it writes nothing there, but that a row was used."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.rowfile.loader import RowFileLoader
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from tests.mover.harness import NAMESPACE, wait_until
from tests.support.file_tier import file_config
from tests.system.tiers.file_tiers import AGE_S, CAPACITY, GEOMETRY, ROWS, LoaderPair

OTHER = bytes(16)


class Pair(LoaderPair):
    def __init__(self, path: Path, region: HostRegion) -> None:
        config = file_config(path, CAPACITY, layout="files", max_age=AGE_S)
        super().__init__(path, region, RowFileTier(config, GEOMETRY, region), RowFileLoader(config, GEOMETRY, region))

    def open(self, namespace: bytes = NAMESPACE, epoch: int = 0) -> None:
        self.tier.open(namespace, epoch)
        for batch in self.tier.list_rows():  # before which nothing is stored
            time.sleep(0.0 if batch else 0.001)
        self.loader.open(namespace, epoch)

    def files(self) -> dict[Path, tuple[int, int]]:
        """Of everything below the path: its inode and size."""
        return {path: (path.stat().st_ino, path.stat().st_size) for path in self.path.rglob("*")}


@pytest.fixture
def pair(tmp_path: Path, region: HostRegion) -> Iterator[Pair]:
    pair = Pair(tmp_path / "kv", region)
    yield pair
    pair.close()


def test_it_makes_and_deletes_nothing_and_keeps_nothing_in_memory(pair: Pair) -> None:
    with pytest.raises(TierDown, match="does not exist yet"):
        pair.loader.open(NAMESPACE, 0)
    assert not pair.path.exists()
    pair.tier.open(NAMESPACE, 0)
    threads = threading.enumerate()
    pair.open()
    pair.store(range(ROWS))
    row = next(pair.path.glob("*/*/*.row"))
    os.truncate(row, 4096)
    before = pair.files()
    assert "scanner" not in {thread.name for thread in threading.enumerate() if thread not in threads}
    assert pair.load(range(ROWS + 1)) == {Outcome.OK, Outcome.CORRUPT, Outcome.MISSING}
    pair.loader.close()
    assert pair.files() == before
    assert pair.loader.used_bytes == 0
    assert pair.loader._quota.directories() == []
    assert list(pair.loader.maintain()) == []


def test_it_opens_while_there_is_no_mover_that_stores(pair: Pair) -> None:
    pair.open()
    pair.store(range(ROWS))
    pair.tier.close()
    pair.loader.open(NAMESPACE, 0)
    assert pair.load(range(ROWS)) == {Outcome.OK}


@pytest.mark.parametrize(("namespace", "epoch"), [(OTHER, 0), (NAMESPACE, 1)])
def test_rows_of_another_namespace_or_epoch_are_none(pair: Pair, namespace: bytes, epoch: int) -> None:
    pair.open()
    pair.store(range(ROWS))
    for row in [*pair.path.glob("*/*/*.row")]:  # as if that namespace had them
        copy = pair.path / namespace.hex() / row.parent.name / row.name
        if copy != row:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(row, copy)
    pair.loader.open(namespace, epoch)
    assert pair.load(range(ROWS)) == {Outcome.CORRUPT}


def test_a_row_that_it_loads_is_marked_as_used(pair: Pair) -> None:
    """Or the mover that stores would evict it first."""
    pair.open()
    pair.store(range(ROWS))
    rows = [*pair.path.glob("*/*/*.row")]
    hour_ago = time.time() - AGE_S / 2
    for row in rows:
        os.utime(row, (hour_ago, hour_ago))
    assert pair.load(range(ROWS)) == {Outcome.OK}
    pair.loader.close()  # ends what threads still do
    assert all(row.stat().st_mtime > hour_ago + AGE_S / 4 for row in rows)
    assert pair.loader._quota.directories() == [], "which is not counted here"


def test_what_has_expired_is_a_miss(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.open()
    pair.store(range(ROWS))
    server = pair.loader._directory.server_time
    now_s = server.now_s
    monkeypatch.setattr(server, "now_s", lambda: now_s() + 2 * AGE_S)
    assert pair.load(range(ROWS)) == {Outcome.MISSING}


def test_it_is_down_when_its_directory_has_gone(pair: Pair) -> None:
    pair.open()
    pair.store(range(ROWS))
    assert pair.load(range(ROWS)) == {Outcome.OK}
    shutil.rmtree(pair.path)
    with pytest.raises(TierDown, match="has been deleted"):
        wait_until(lambda: pair.loader.poll() is None, 30.0)
