"""The slab tier, step by step: rows that are damaged, disks that are full, kills at any moment, and the byte budget."""

from __future__ import annotations

import errno
import fcntl
import random
import shutil
import stat
import tarfile
import types
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
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab import journal as journal_module
from nixl_tiers.tiers.slab import layout
from nixl_tiers.tiers.slab import slabs as slabs_module
from nixl_tiers.tiers.slab.in_flight import STORES_BYTES
from nixl_tiers.tiers.slab.journal import WRITE_S, Header
from nixl_tiers.tiers.staging import BUFFER_BYTES, Direction
from tests.mover.harness import NAMESPACE, key_of, shard_dir
from tests.support.disks import disk_bytes
from tests.support.journals import Record, encode, journal_in, overwrite_record
from tests.support.staging import decide
from tests.tiers.slab.stepped import GEOMETRY, ROWS, SteppedSlabs, Threads, flip, number_of

OK, CORRUPT, MISSING, FAILED, NO_SPACE = (
    Outcome.OK,
    Outcome.CORRUPT,
    Outcome.MISSING,
    Outcome.FAILED,
    Outcome.NO_SPACE,
)
ROW = GEOMETRY.row_bytes


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


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

    def test_a_row_in_anothers_place_is_corrupt(self, stored: SteppedSlabs) -> None:
        with slab(stored.path).open("r+b") as file:
            file.seek(5 * ROW)
            row = file.read(ROW)
            file.seek(2 * ROW)
            file.write(row)
        assert stored.load([2, 5]) == [CORRUPT, OK]

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

    @pytest.mark.parametrize("what", ["a later format", "no seal"])
    def test_a_shard_of_which_nothing_is_known_is_emptied(
        self, stored: SteppedSlabs, make: Callable[..., SteppedSlabs], tmp_path: Path, what: str
    ) -> None:
        description = slab(stored.copy(tmp_path / "copy")).with_name("namespace.json")
        if what == "no seal":
            description.unlink()
            slab(tmp_path / "copy").write_bytes(b"x" * (8 * ROW))
        else:
            description.write_text(description.read_text().replace('"format": 2', '"format": 3'))
        one, listed = again(make, tmp_path / "copy")
        assert listed == []
        assert one.store(range(ROWS)) == [OK] * ROWS
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

    def test_an_empty_tail_is_given_back(self, make: Callable[..., SteppedSlabs]) -> None:
        one = make(capacity=32 << 20)
        one.open()
        for start in range(0, one.slots - ROWS, ROWS):
            assert set(one.store(range(start, start + ROWS))) == {OK}
        one.step()
        before = disk_bytes(one.path)
        one.tier.delete([(n, key_of(n)) for n in range(8, one.slots)])
        one.maintain()
        assert disk_bytes(one.path) < before / 2
        assert one.load(range(8)) == [OK] * 8
        assert one.store([200], [one.slots - 1]) == [OK], "it grows again"

    def test_a_slab_that_cannot_be_cut_counts_and_the_others_are_cut(
        self, make: Callable[..., SteppedSlabs], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(layout, "SLAB_BYTES", 32 * ROW)
        one = make()
        one.open()
        for start in range(0, 128, ROWS):
            assert one.store(range(start, start + ROWS)) == [OK] * ROWS
        files = sorted(one.path.rglob("slab-*.kv"))
        sizes = [file.stat().st_size for file in files]
        used_bytes, unlink = one.tier.used_bytes, Folder.unlink
        one.tier.delete([(slot, key_of(slot)) for slot in range(8, 128)])

        def fail(folder: Folder, name: str) -> None:
            if name == files[1].name:
                raise OSError(errno.EIO, "Input/output error")
            unlink(folder, name)

        with monkeypatch.context() as patch:
            patch.setattr(Folder, "unlink", fail)
            one.maintain()
        assert [file.exists() for file in files] == [True, True, False, False]
        assert files[0].stat().st_size < sizes[0]
        assert one.tier.used_bytes == used_bytes - sum(sizes) + sum(file.stat().st_size for file in files[:2])
        assert one.store([32]) == [OK], "what was left is used again"
        assert one.tier.used_bytes >= sum(file.stat().st_size for file in files[:2])

    def test_growth_takes_no_lock_of_the_path(self, make: Callable[..., SteppedSlabs]) -> None:
        """A process that stands still with it holds up no store."""
        one = make()
        one.open()
        with (one.path / ".ledger").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert one.store([0, 1], [one.slots - 1, 1]) == [OK] * 2
        assert one.tier.slots == one.slots

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
    def test_without_room_for_a_journal_it_is_down_until_there_is_some(
        self, make: Callable[..., SteppedSlabs], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, spare = make(min_free="1GiB"), [0.0]
        monkeypatch.setattr(one.tier._free, "_measure", lambda: setattr(one.tier._free, "spare_bytes", spare[0]))
        with pytest.raises(TierDown, match="min_free keeps"):
            one.open()
        assert [each.name for each in one.path.iterdir()] == [".ledger"], "nothing is left behind"
        spare[0] = 1e9
        assert one.open() == []

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

    def test_slots_without_room_for_their_records_are_not_used(
        self, make: Callable[..., SteppedSlabs], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a restart would read their seals, however many they are."""
        one = make(capacity=2 << 30)
        one.open()
        assert one.store([4]) == [OK]
        with monkeypatch.context() as patch:
            patch.setattr(journal_module, "extend", no_space)
            assert one.store([50], [10_000]) == [NO_SPACE]
            assert one.tier.slots == one.tier._open.slabs.end  # type: ignore[union-attr]
            assert one.store([51], [4]) == [OK]
        one.clock.now += PRODUCTION.growth_retry_s + 0.1
        one.maintain()
        assert one.store([50], [10_000]) == [OK]

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

    def test_an_error_of_growth_that_lowers_the_slots_fails_no_store(
        self, make: Callable[..., SteppedSlabs], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else the core counts failures of a medium that takes rows, and retires slots that were never written."""
        one = make(capacity=64 << 20)
        one.open()
        assert one.store(range(4)) == [OK] * 4
        allocated = one.tier._open.slabs.end  # type: ignore[union-attr]
        monkeypatch.setattr(disk, "fallocate", lambda *_: errno.EIO)
        assert one.store([allocated + 1]) == [NO_SPACE]
        assert one.tier.slots == allocated
        assert one.tier.denials["writing"].endswith("Input/output error)"), "it is shown all the same"
        assert one.store([50], [2]) == [OK]

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

    def test_a_growth_that_ends_in_a_reset_says_nothing_of_what_is_opened_next(
        self, make: Callable[..., SteppedSlabs], threads: Threads, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = make(capacity=64 << 20)
        one.open()
        threads.pools["allocator"].at_once = False
        waits = one.begin_store([1])
        one.step()
        one.clock.now += PRODUCTION.growth_overdue_s
        assert one.end(waits) == [NO_SPACE]
        threads.pools["allocator"].at_once = True  # the close waits for it
        with monkeypatch.context() as patch:
            patch.setattr(slabs_module, "fallocate", lambda *_: errno.EIO)
            patch.setattr(disk, "fallocate", lambda *_: errno.EIO)
            with pytest.raises(TierDown):
                one.open(bytes(16))
        one.step()
        one.open(bytes(16))
        one.step()
        assert one.tier.denials == {}
        assert one.tier.slots == one.slots


def test_slots_beyond_the_tier_fail_alone(stored: SteppedSlabs) -> None:
    beyond = [stored.slots, stored.slots + 10**9]
    assert stored.store([50, 1, 51], [beyond[0], 1, beyond[1]]) == [FAILED, OK, FAILED]
    assert stored.load([50, 1, 51], [beyond[0], 1, beyond[1]]) == [MISSING, OK, MISSING]


def test_without_o_direct_and_fallocate_rows_are_served_with_two_warnings(
    make: Callable[..., SteppedSlabs], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs_module, "direct_works", lambda _: False)
    monkeypatch.setattr(disk, "fallocate", lambda *_: errno.EOPNOTSUPP)
    one = make(capacity=4 << 20)
    one.open()
    for start in range(0, one.slots - ROWS, ROWS):
        assert one.store(range(start, start + ROWS)) == [OK] * ROWS
    assert one.load(range(ROWS)) == [OK] * ROWS
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"], "each is logged once"


def test_a_path_that_is_a_file_is_refused_and_a_missing_parent_is_down(
    make: Callable[..., SteppedSlabs], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TierRefused, match=r"^path: .*file"):
        make(tmp_path / "file").open()
    one = make(tmp_path / "not" / "mounted")
    with pytest.raises(TierDown, match="mounted"):
        one.open()
    (tmp_path / "not").mkdir()
    assert one.open() == []


def test_files_are_private_to_the_user(stored: SteppedSlabs) -> None:
    for each in (stored.path, *stored.path.rglob("*")):
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600)


def test_a_clean_close_leaves_all_rows_in_the_order_of_their_use(
    stored: SteppedSlabs, make: Callable[..., SteppedSlabs]
) -> None:
    stored.tier.touch([3], [1000])
    stored.close()
    stored.close = lambda: None  # type: ignore[method-assign]
    entries = make().open()
    assert [number_of(entry) for entry in entries] == [*(n for n in range(ROWS) if n != 3), 3]


class Filled(dict[int, Any]):
    """Another thread adds to it while it is iterated over."""

    def items(self) -> Any:
        for item in super().items():
            yield item
            self[len(self) + 100] = item[1]._replace(slots=0)


@pytest.mark.parametrize("ask", ["allocated", "select", "end", "truncate"])
def test_slots_are_asked_for_while_growth_adds_a_slab(
    stored: SteppedSlabs, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    slabs = stored.tier._open.slabs  # type: ignore[union-attr]
    monkeypatch.setattr(slabs, "_slabs", Filled(slabs._slabs))
    end = slabs.layout.extent_slots * -(-ROWS // slabs.layout.extent_slots)
    match ask:
        case "allocated":
            assert np.flatnonzero(slabs.allocated()).tolist() == [*range(end)]
        case "select":
            (found,) = slabs.select(range(slabs.layout.slots))
            assert found.indexes.tolist() == [*range(end)]
        case "end":
            assert slabs.end == end
        case "truncate":
            assert slabs.truncate(end) == []


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


def test_a_unit_that_could_not_begin_says_nothing_of_the_medium(
    stored: SteppedSlabs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took no time: counted as written, it would let 64 MiB of stores in before the next load."""
    rows = stored.tier._transfers._window.rows

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(type(stored.tier._open.slabs), "locate", fail)  # type: ignore[union-attr]
        assert stored.store(range(4)) == [FAILED] * 4
    assert stored.tier._transfers._window.rows == rows
    assert stored.tier._moves.stores.limit_rows == rows


@pytest.mark.parametrize("staged", [True, False])
def test_no_more_rows_are_stored_at_a_time_than_the_buffer_has_room_for(
    make: Callable[..., SteppedSlabs], *, staged: bool
) -> None:
    """A unit that had started and waited for room there would be written though loads wait."""
    one = make()
    if staged:
        decide(one.tier, staged=True)
        one.tier._staging.stores.open = types.MethodType(Direction.open, one.tier._staging.stores)
    one.open()
    most = STORES_BYTES[1] // GEOMETRY.row_bytes
    one.tier._transfers._window.written(1000 * most, 0.001)
    assert one.store([0]) == [OK]
    assert one.tier._moves.stores.limit_rows == (-(-BUFFER_BYTES // GEOMETRY.row_bytes) if staged else most)
