"""A loader beside the mover that stores: it follows the slabs as they grow, go, and come again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.slab.layout import slab_name
from nixl_tiers.tiers.slab.loader import SlabLoader
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, key_of, shard_dir, wait_until
from tests.support.file_tier import file_config
from tests.system.tiers.file_tiers import CAPACITY, GEOMETRY, ROWS, LoaderPair, load

OTHER = bytes(16)


class Pair(LoaderPair):
    def __init__(self, path: Path, region: HostRegion) -> None:
        config = file_config(path, CAPACITY)
        super().__init__(path, region, SlabTier(config, GEOMETRY, region), SlabLoader(config, GEOMETRY, region))

    def open(self, namespace: bytes = NAMESPACE) -> None:
        self.tier.open(namespace, 0)
        self.loader.opening = self.tier.opening
        self.loader.open(namespace, 0)

    def slab(self) -> Path:
        return shard_dir(self.path, NAMESPACE) / slab_name(0)


@pytest.fixture
def pair(tmp_path: Path, region: HostRegion) -> Iterator[Pair]:
    pair = Pair(tmp_path / "kv", region)
    yield pair
    pair.close()


def test_nothing_can_be_opened_before_it_is_known_what(pair: Pair) -> None:
    with pytest.raises(TierDown, match="has opened nothing yet"):
        pair.loader.open(NAMESPACE, 0)
    pair.open()
    pair.store(range(ROWS))
    assert pair.load(range(ROWS)) == {Outcome.OK}
    assert pair.loader.used_bytes == 0
    pair.loader.opening = b"part-7 1"
    with pytest.raises(TierDown):
        pair.loader.open(NAMESPACE, 0)


def test_each_opening_has_a_name_of_its_own(pair: Pair) -> None:
    names = []
    for _ in range(3):
        pair.open()
        names.append(pair.tier.opening)
    assert len(set(names)) == 3
    assert all(name.startswith(b"part-0 ") for name in names)


def test_what_grows_after_it_has_opened_is_loaded(pair: Pair) -> None:
    pair.open()
    assert pair.load(range(ROWS)) == {Outcome.MISSING}
    pair.store(range(ROWS))
    assert pair.load(range(ROWS)) == {Outcome.OK}


def test_a_slab_that_is_cut_and_comes_again_is_opened_anew(pair: Pair) -> None:
    pair.open()
    pair.store(range(ROWS))
    assert pair.load(range(ROWS)) == {Outcome.OK}
    descriptor = os.open(pair.slab(), os.O_RDONLY)
    slabs = pair.tier._served.slabs
    slabs.free(slabs.truncate(0))
    assert not pair.slab().exists()
    assert os.fstat(descriptor).st_size == 0, "its room stays in use while somebody has it open"
    os.close(descriptor)
    assert pair.load(range(ROWS)) == {Outcome.MISSING}
    pair.store(range(ROWS))
    assert pair.load(range(ROWS)) == {Outcome.OK}
    assert pair.load(range(ROWS)) == {Outcome.OK}
    assert pair.loader._served.slabs._former == [], "those of before are closed"  # type: ignore[attr-defined]


def test_rows_that_are_not_what_was_asked_for_are_found_out(pair: Pair) -> None:
    pair.open()
    pair.store(range(ROWS))
    pair.tier.delete([(0, key_of(0))])
    with pair.slab().open("r+b") as file:
        file.seek(GEOMETRY.row_bytes + 100)
        file.write(b"damage")
    outcomes = load(pair.loader, pair.region, range(3))
    assert outcomes[1] is Outcome.CORRUPT
    assert outcomes[2] is Outcome.OK


def test_a_shard_of_other_rows_is_not_opened(tmp_path: Path, region: HostRegion) -> None:
    pair = Pair(tmp_path / "kv", region)
    other = Geometry(1, 2 * GEOMETRY.cell_payload)
    other_region = HostRegion.create(other, 4)
    tier = SlabTier(file_config(tmp_path / "kv", CAPACITY), other, other_region)
    tier.open(NAMESPACE, 0)
    pair.loader.opening = tier.opening
    with pytest.raises(TierDown, match=r"says nothing of rows of"):
        pair.loader.open(NAMESPACE, 0)
    pair.loader.close()
    tier.close()
    pair.tier.close()
    other_region.close()


def test_it_is_down_when_its_directory_has_gone(pair: Pair) -> None:
    pair.open()
    pair.store(range(ROWS))
    assert pair.load(range(ROWS)) == {Outcome.OK}
    shutil.rmtree(pair.path)
    with pytest.raises(TierDown, match="has been deleted"):
        wait_until(lambda: pair.loader.poll() is None, 30.0)
    with pytest.raises(TierDown):
        pair.loader.open(NAMESPACE, 0)


def test_a_shard_that_is_deleted_leaves_its_room(pair: Pair) -> None:
    """To another namespace, though a loader has not heard of that yet."""
    pair.open()
    pair.store(range(ROWS))
    assert pair.load(range(ROWS)) == {Outcome.OK}
    descriptor = os.open(pair.slab(), os.O_RDONLY)
    pair.tier.open(OTHER, 0)
    with pair.tier._quota.locked():
        assert pair.tier._quota.delete_oldest()
    assert os.fstat(descriptor).st_size == 0
    os.close(descriptor)
