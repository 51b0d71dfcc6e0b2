"""A file tier over several directories: one tier whose movers are killed, whose disks go, return and fill up."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import nixl_tiers
from tests.support.checked_rows import SIZE, TIMEOUT_S, hits, put
from tests.support.core import rows_of
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

HOST_ROWS = 40
KEYS = [b"key-%04d" % number for number in range(120)]


def config(paths: Sequence[Path], capacity: int = 64 << 20, **more: object) -> dict[str, Any]:
    tier = {"type": "file", "path": [str(path) for path in paths], "capacity": capacity, "min_free": 0, **more}
    return {"tiers": [{"type": "cpu", "capacity": HOST_ROWS * SIZE}, tier], "wait_s": 60.0}


def opened(paths: Sequence[Path], **more: Any) -> nixl_tiers.TieredStore:
    store = nixl_tiers.open(config(paths, **more), SIZE, "members")
    until_all_up(store)
    return store


def held(store: nixl_tiers.TieredStore) -> list[int]:
    """How many rows each member holds."""
    tier = store.coordinator._core.tiers[0]
    with store.coordinator.core():
        places = [tier.index.member_place_of(key) for key in rows_of(tier)]
    return [places.count(place) for place in range(len(tier.members))]


def until_all_up(store: nixl_tiers.TieredStore) -> None:
    members = store.coordinator._core.movers
    until(lambda: all(member.writable and member.readable for member in members), "all members", timeout_s=TIMEOUT_S)


def test_a_directory_that_goes_away_takes_only_its_rows_and_is_named(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with opened(paths) as store:
        put(store, KEYS)
        rows = held(store)
        shutil.move(paths[1], tmp_path / "away")
        paths[1].write_bytes(b"")  # else it is made again, and half a second later there is nothing to say
        until(lambda: store.coordinator.problems()["file"], "a word", timeout_s=TIMEOUT_S)
        assert str(paths[1]) in store.coordinator.problems()["file"]
        assert str(paths[0]) not in store.coordinator.problems()["file"]
        assert store.stats()["file"]["up"] == 1
        assert hits(store, KEYS) >= rows[0]
        put(store, KEYS)
        assert hits(store, KEYS) == len(KEYS)


def test_directories_are_added_and_removed_and_each_keeps_its_rows(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abcd"]
    with opened(paths[:1]) as store:
        put(store, KEYS)
        assert held(store) == [len(KEYS)]
    with opened(paths) as store:  # its rows fit into a quarter
        assert hits(store, KEYS) == len(KEYS)
        assert held(store) == [len(KEYS), 0, 0, 0]
        put(store, more := [b"more-%04d" % number for number in range(80)])
        assert hits(store, more) == len(more)
        rows = held(store)
        assert min(rows[1:]) > 0, "new rows are spread"
    with opened(paths[:2]) as store:
        assert held(store) == rows[:2]
        assert hits(store, KEYS) == len(KEYS)
    with opened(paths[:1]) as store:
        assert held(store) == rows[:1]
        assert hits(store, KEYS) == len(KEYS)


def test_one_directory_that_cannot_be_used_refuses_the_start_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"")
    with pytest.raises(nixl_tiers.ConfigError, match=r"tiers\[1\]\.path: cannot write to .*/b") as raised:
        nixl_tiers.open(config([tmp_path / "a", tmp_path / "b"]), SIZE, "members")
    assert "\n" not in str(raised.value)
