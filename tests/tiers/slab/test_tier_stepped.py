"""The slab tier, step by step: rows that are damaged, disks that are full, kills at any moment, and the byte budget."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers import disk
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.nixl_agent import Agent
from nixl_tiers.tiers.slab.journal import WRITE_S, Header
from nixl_tiers.tiers.slab.shards import Shards
from tests.mover.harness import NAMESPACE, key_of, shard_dir
from tests.support.disks import disk_bytes
from tests.support.journals import Record, encode, journal_in, overwrite_record
from tests.tiers.slab.stepped import GEOMETRY, ROWS, FakeAgent, SteppedSlabs, Threads, flip, number_of

OK, CORRUPT, MISSING, FAILED, NO_SPACE = (
    Outcome.OK,
    Outcome.CORRUPT,
    Outcome.MISSING,
    Outcome.FAILED,
    Outcome.NO_SPACE,
)
ROW = GEOMETRY.row_bytes


@pytest.fixture
def stored(make: Callable[..., SteppedSlabs]) -> SteppedSlabs:
    """Open, with ROWS rows."""
    one = make()
    assert one.open() == []
    assert one.store(range(ROWS)) == [OK] * ROWS
    one.step()
    return one


def slab(path: Path, namespace: bytes = NAMESPACE) -> Path:
    return shard_dir(path, namespace) / "slab-00000.kv"


def again(make: Callable[..., SteppedSlabs], path: Path, **fields: Any) -> tuple[SteppedSlabs, list[int]]:
    """Opened after a kill: the tier, and which rows it lists."""
    one = make(path, **fields)
    return one, sorted(number_of(entry) for entry in one.open())


class TestRowsThatAreNotTheExpectedOnes:
    """Bytes are a hit only after their seal is verified."""

    PLACES = (0, 7, GEOMETRY.cell_payload - 1, GEOMETRY.cell_bytes, ROW - GEOMETRY.seal_bytes, ROW - 1)

    @pytest.mark.parametrize("place", [*PLACES, *random.Random(7).choices(range(ROW), k=6)])
    def test_a_flipped_bit_anywhere_is_corrupt_and_forgotten(
        self, stored: SteppedSlabs, make: Callable[..., SteppedSlabs], tmp_path: Path, place: int
    ) -> None:
        flip(slab(stored.path), 3 * ROW + place, place % 8)
        assert stored.load(range(6)) == [OK, OK, OK, CORRUPT, OK, OK]
        stored.clock.now += WRITE_S
        stored.step()
        _, listed = again(make, stored.copy(tmp_path / "copy"))
        assert listed == [n for n in range(ROWS) if n != 3]
        assert stored.store([3]) == [OK], "and may be written again"
        assert stored.load([3]) == [OK]

    def test_rows_behind_the_end_of_a_slab_that_was_cut_fail_alone(self, stored: SteppedSlabs) -> None:
        with slab(stored.path).open("r+b") as file:
            file.truncate(4 * ROW + 100)
        outcomes = stored.load(range(8))
        assert outcomes[:4] == [OK] * 4
        assert outcomes[4:] == [FAILED] * 4, "else their keys are forgotten"
        stored.clock.now += 10.0
        with pytest.raises(TierDown, match="cut short"):
            stored.tier.poll()


class TestWhatIsFoundAtOpen:
    """After damage, a kill, or a power failure."""

    @pytest.mark.parametrize("damage", ["deleted", "emptied", "zeroed", "noise", "header"])
    @pytest.mark.parametrize("described", [True, False])
    def test_rows_outlive_their_journal_and_its_description(
        self, stored: SteppedSlabs, make: Callable[..., SteppedSlabs], tmp_path: Path, damage: str, described: bool
    ) -> None:
        (found,) = stored.copy(tmp_path / "copy").rglob("*journal*")
        if not described:
            found.with_name("namespace.json").write_text("{")
        raw = found.read_bytes()
        match damage:
            case "deleted":
                found.unlink()
            case "emptied":
                found.write_bytes(b"")
            case "zeroed":
                found.write_bytes(bytes(len(raw)))
            case "noise":
                found.write_bytes(random.Random(1).randbytes(len(raw)))
            case "header":
                flip(found, 9)
        one, listed = again(make, tmp_path / "copy")
        assert listed == [*range(ROWS)]
        assert one.load(range(ROWS)) == [OK] * ROWS

    def test_only_whole_seals_of_the_namespace_and_epoch_are_recovered(
        self, stored: SteppedSlabs, make: Callable[..., SteppedSlabs], tmp_path: Path
    ) -> None:
        path = slab(stored.copy(tmp_path / "copy"))
        flip(path, 4 * ROW - GEOMETRY.seal_bytes + 100)
        with path.open("r+b") as file:
            for slot, other in enumerate((Sealer(GEOMETRY, NAMESPACE, 1), Sealer(GEOMETRY, bytes(16), 0))):
                row = np.zeros(ROW, np.uint8)
                other.seal(row, key_of(slot))
                file.seek(slot * ROW)
                file.write(row.tobytes())
            file.truncate((ROWS - 1) * ROW - 1)
        journal_in(path.parent).unlink()
        one, listed = again(make, tmp_path / "copy")
        assert listed == [2, *range(4, ROWS - 2)]
        assert one.load(range(ROWS - 4, ROWS)) == [OK] * 2 + [MISSING] * 2, "it ends before these"

    def test_records_older_than_the_rows_are_corrected_after_a_power_failure(
        self, stored: SteppedSlabs, make: Callable[..., SteppedSlabs], tmp_path: Path
    ) -> None:
        """One says that its slot is empty, one names the key of another slot, one another key."""
        journal = journal_in(slab(stored.copy(tmp_path / "copy")).parent)
        header = Header.read(journal.read_bytes())
        assert header is not None
        with journal.open("r+b") as file:
            file.write(header._replace(boot=bytes(16), flushed=False).pack())
        for slot, key in ((3, b""), (5, key_of(7)), (6, key_of(66))):
            overwrite_record(journal, slot, encode(slot, Record(key, 0, 1), header.salt))
        one, listed = again(make, tmp_path / "copy")
        right = [number for number in range(ROWS) if number not in (5, 6)]
        assert listed == [*right, 66]
        assert one.load([*right, 66], [*right, 6]) == [OK] * len(right) + [CORRUPT]


class TestTheBudget:
    def test_namespaces_in_turn_stay_within_it_at_every_step(self, make: Callable[..., SteppedSlabs]) -> None:
        """Old ones make room, and each uses what it may."""
        capacity = 4 << 20
        one = make(capacity=capacity)
        most = 0

        def look() -> None:
            nonlocal most
            most = max(most, disk_bytes(one.path))

        one.on_step = look
        for turn in range(4):
            one.open(bytes([turn]) * 16)
            look()
            for start in range(0, one.slots - ROWS, ROWS):
                outcomes = one.store(range(start, start + ROWS))
                assert set(outcomes) == {OK}
        assert 0.75 * capacity < most <= capacity

    def test_a_smaller_capacity_keeps_what_fits(
        self, stored: SteppedSlabs, make: Callable[..., SteppedSlabs], tmp_path: Path
    ) -> None:
        capacity = 1 << 20
        one, listed = again(make, stored.copy(tmp_path / "copy"), capacity=capacity)
        assert 0 < len(listed) < ROWS
        assert max(listed) < one.slots
        _within(one.path, capacity)
        assert one.load(listed) == [OK] * len(listed)

    def test_a_capacity_below_one_row_is_refused(self, make: Callable[..., SteppedSlabs]) -> None:
        with pytest.raises(TierRefused, match=r"^capacity: "):
            make(capacity=ROW).open()


def _within(path: Path, capacity: int) -> None:
    assert disk_bytes(path) <= capacity


class TestADirectoryOfAnEarlierVersion:
    """Written by 3229999f and left by a kill: 24 rows of each of two models in the one part of 4 MiB."""

    NAMES = bytes(range(16)), bytes(range(16, 32))  # the second was being served

    @pytest.mark.parametrize("served", [0, 1])
    @pytest.mark.parametrize(("capacity", "replicas"), [(4 << 20, 1), (2 << 20, 1), (4 << 20, 2)])
    def test_its_rows_are_read_and_the_budget_holds_at_every_step(
        self, make: Callable[..., SteppedSlabs], tmp_path: Path, capacity: int, replicas: int, served: int
    ) -> None:
        path = tmp_path / "kv"
        with tarfile.open(Path(__file__).with_name("stored-by-3229999f.tar.xz")) as stored:
            stored.extractall(path, filter="tar")
        one = make(path, capacity=capacity, replicas=replicas)
        listed = sorted(number_of(entry) for entry in one.open(self.NAMES[served]))
        assert listed == [*range(min(24, one.slots))], "a smaller part keeps its lowest slots"
        part_bytes = capacity // replicas
        one.on_step = lambda: _within(path, part_bytes)
        one.on_step()
        for start in range(0, len(listed), ROWS):
            numbers = listed[start : start + ROWS]
            assert one.load(numbers) == [OK] * len(numbers)
        for start in range(0, one.slots - ROWS + 1, ROWS):
            assert one.store(range(start, start + ROWS)) == [OK] * ROWS
        assert disk_bytes(path) > 0.6 * part_bytes


class TestAFullDisk:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        """While it is not empty, the file system has no room."""
        full: list[bool] = []
        fallocate = disk.fallocate

        def allocate(descriptor: int, offset: int, nbytes: int, mode: int = 0) -> int:
            return errno.ENOSPC if full and not mode else fallocate(descriptor, offset, nbytes, mode)

        monkeypatch.setattr(disk, "fallocate", allocate)
        return full

    def test_rows_without_room_are_told_so_and_others_are_served(
        self, make: Callable[..., SteppedSlabs], full: list[bool]
    ) -> None:
        one = make(capacity=64 << 20)
        one.open()
        assert one.store(range(4)) == [OK] * 4
        allocated = one.tier._open.slabs.end  # type: ignore[union-attr]
        full.append(True)
        assert one.store([allocated + 1]) == [NO_SPACE]
        assert one.tier.slots == allocated, "the core evicts to store more"
        assert one.load(range(4)) == [OK] * 4
        assert one.store([50], [2]) == [OK], "there is room in what is allocated"
        full.clear()
        one.clock.now += PRODUCTION.growth_retry_s + 0.1
        one.maintain()
        assert one.tier.slots == one.slots
        assert one.store([allocated + 1]) == [OK]

    def test_an_error_that_is_no_lack_of_room_is_a_problem_and_costs_no_slots(
        self, make: Callable[..., SteppedSlabs], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = make(capacity=64 << 20)
        one.open()
        with monkeypatch.context() as patch:
            patch.setattr(disk, "fallocate", lambda *_: errno.EIO)
            assert one.store(range(4)) == [FAILED] * 4
            assert "no slab can be made longer" in one.tier.denials["writing"]
            assert one.tier.denials["writing"].endswith("Input/output error)")
            assert one.tier.slots == one.slots, "else the core has no room for any row"
        one.clock.now += PRODUCTION.growth_retry_s + 0.1
        assert one.store(range(4)) == [OK] * 4
        assert one.tier.denials == {}

    def test_a_growth_that_hangs_holds_up_only_what_needs_it_and_not_for_ever(
        self, make: Callable[..., SteppedSlabs], threads: Threads
    ) -> None:
        """As on a disk that hangs."""
        one = make(capacity=64 << 20)
        one.open()
        assert one.store(range(4)) == [OK] * 4
        threads.pools["allocator"].at_once = False
        allocated = one.tier._open.slabs.end  # type: ignore[union-attr]
        waits = one.begin_store([allocated + 1])
        for _ in range(5):
            one.step()
        assert waits not in one.ended
        assert one.load(range(4)) == [OK] * 4
        one.clock.now += PRODUCTION.growth_overdue_s
        assert one.end(waits) == [NO_SPACE]
        assert one.store([50], [2]) == [OK]
        threads.pools["allocator"].run()
        threads.pools["allocator"].at_once = True
        one.clock.now += PRODUCTION.growth_retry_s + 0.1
        one.step()
        one.maintain()
        assert one.store([allocated + 1]) == [OK]


def test_an_open_that_fails_at_its_end_leaves_no_file_open(
    make: Callable[..., SteppedSlabs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again and again."""
    one, before = make(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(Shards, "make_room", fail)
        with pytest.raises(RuntimeError, match="a defect"):
            one.open()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert one.open() == []


def test_slots_beyond_the_tier_fail_alone(stored: SteppedSlabs) -> None:
    beyond = [stored.slots, stored.slots + 10**9]
    assert stored.store([50, 1, 51], [beyond[0], 1, beyond[1]]) == [FAILED, OK, FAILED]
    assert stored.load([50, 1, 51], [beyond[0], 1, beyond[1]]) == [MISSING, OK, MISSING]


def test_files_are_private_to_the_user(stored: SteppedSlabs) -> None:
    for each in (stored.path, *stored.path.rglob("*")):
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600)


# --- `backend: gds_mt`: a region may have terabytes, and what is registered with cuFile stays for the tier -----------


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeAgent:
    agent = FakeAgent()
    monkeypatch.setattr(Agent, "gds_mt", lambda: agent)
    return agent


def test_cufile_registers_bounded_buffers_and_nothing_of_the_region(
    agent: FakeAgent, make: Callable[..., SteppedSlabs]
) -> None:
    """It moves nothing that it has not registered: without memory for it the tier is down."""
    one = make(backend="gds_mt")
    agent.takes_memory = False
    with pytest.raises(TierDown, match=r"cannot register DRAM"):
        one.open()
    agent.takes_memory = True
    one.open()
    assert one.store(range(ROWS)) == [OK] * ROWS
    assert one.load(range(ROWS)) == [OK] * ROWS
    begin, end = one.region.address, one.region.address + one.region.nbytes
    assert [at for at, size in agent.memory if at < end and begin < at + size] == []
    assert agent.most_bytes <= 112 << 20
    assert one.tier.staged == (True, True)
    one.tier.close()
    assert agent.memory == []


def test_failed_transfers_give_their_places_in_the_buffers_back(
    agent: FakeAgent, make: Callable[..., SteppedSlabs]
) -> None:
    one = make(backend="gds_mt")
    one.open()
    assert one.store(range(ROWS)) == [OK] * ROWS
    agent.fails = True
    assert one.store(range(ROWS)) == one.load(range(ROWS)) == [FAILED] * ROWS
    for direction in (one.tier._staging.loads, one.tier._staging.stores):
        assert direction._buffer is not None
        assert len(direction._buffer._free) == len(direction._buffer.rows)
    agent.fails = False
    assert one.store(range(ROWS)) == one.load(range(ROWS)) == [OK] * ROWS


@pytest.mark.parametrize("what", ["tail", "namespace"])
def test_a_hard_linked_copy_of_what_is_deleted_stays_whole(stored: SteppedSlabs, tmp_path: Path, what: str) -> None:
    """As `cp -al` makes it: only names are deleted, no file of another name is cut."""
    copy = tmp_path / "copy"
    shutil.copytree(stored.path / "part-0", copy / "part-0", copy_function=lambda at, to: Path(to).hardlink_to(at))
    before = slab(copy).read_bytes()
    if what == "tail":
        stored.tier.delete([(number, key_of(number)) for number in range(ROWS)])
        slabs = stored.tier._open.slabs  # type: ignore[union-attr]
        slabs.free(slabs.truncate(0))
    else:
        stored.open(bytes(16))
        assert stored.tier._quota.delete_oldest()
    assert not slab(stored.path).exists()
    assert slab(copy).read_bytes() == before
