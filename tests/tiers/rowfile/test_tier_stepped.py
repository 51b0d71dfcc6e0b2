"""A tier of row files, step by step: what becomes of each row, what is asked for, what expires, what a reader does."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import FAILING, FULL, Outcome
from nixl_tiers.tiers import disk
from nixl_tiers.tiers.base import MAX_SLOTS, TierDown, TierRefused
from nixl_tiers.tiers.existence import ExistenceChecker
from nixl_tiers.tiers.rowfile import tier as tier_module
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.sweep import Sweeper
from nixl_tiers.tiers.rowfile.tier import MARGIN_BYTES
from nixl_tiers.tiers.rowfile.transfers import TOUCH_S
from tests.mover.harness import NAMESPACE, key_of
from tests.support.fake_movers import Clock
from tests.support.hooked import files_calls
from tests.tiers.rowfile.stepped import AGE_S, ROW_BYTES, ROWS, Calls, SteppedFiles, without_threads

OK, FOUND, MISSING, CORRUPT, FAILED, NO_SPACE = (
    Outcome.OK,
    Outcome.FOUND,
    Outcome.MISSING,
    Outcome.CORRUPT,
    Outcome.FAILED,
    Outcome.NO_SPACE,
)
DAY_S = 86400.0
Make = Callable[..., SteppedFiles]


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.fixture
def clock() -> Clock:
    return Clock(1_800_000_000.0)


@pytest.fixture
def calls(hooked: str, clock: Clock) -> Iterator[Calls]:
    calls = Calls(clock)
    with files_calls(hooked, calls):
        yield calls


@pytest.fixture
def make(tmp_path: Path, clock: Clock, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    without_threads(monkeypatch, clock)
    made: list[SteppedFiles] = []

    def make(**fields: Any) -> SteppedFiles:
        made.append(SteppedFiles(tmp_path / "kv", clock, **fields))
        return made[-1]

    yield make
    calls.answer = lambda *_: 0
    for each in made:
        each.close()


@pytest.fixture
def stored(make: Make) -> SteppedFiles:
    """Open, with ROWS rows."""
    one = make().open()
    assert one.store(range(ROWS)) == [OK] * ROWS
    return one


# --- rows of a unit, each for itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "outcome"), [(errno.ENOSPC, NO_SPACE), (errno.EDQUOT, NO_SPACE), (errno.EIO, FAILED)]
)
def test_only_the_row_that_cannot_be_written_fails(make: Make, calls: Calls, error: int, outcome: Outcome) -> None:
    one = make().open()
    calls.answer = lambda call, place: error if call == "pwrite" and place.endswith("-3.tmp") else 0
    ended = one.store(range(ROWS))
    assert ended.pop(3) is outcome
    assert set(ended) == {OK}
    assert one.tier.served.budget._writing_bytes == 0
    assert not one.tier.directory.temp_names._in_use
    calls.answer = lambda *_: 0
    ended = one.store(range(ROWS))
    assert ended.pop(3) is OK
    assert set(ended) == {FOUND}
    calls.answer = lambda call, _: error if call == "pwrite" else 0
    assert one.store([ROWS]) == [outcome]
    assert (FAILING in one.tier.denials) == (outcome is FAILED)
    calls.answer = lambda *_: 0
    one.clock.now += 1
    assert one.store([ROWS]) == [OK]
    assert not one.tier.denials


def cut(row: Path) -> None:
    os.truncate(row, 4096)


def flipped(row: Path) -> None:
    raw = bytearray(row.read_bytes())
    raw[40] ^= 1
    row.write_bytes(raw)


def link(row: Path) -> None:
    row.rename(row.with_suffix(".kept"))
    row.symlink_to(row.with_suffix(".kept"))


def directory(row: Path) -> None:
    row.unlink()
    row.mkdir()


DAMAGES = [
    (cut, CORRUPT, False),
    (flipped, CORRUPT, False),
    (link, MISSING, True),
    (directory, MISSING, True),
    (Path.unlink, MISSING, False),
]


@pytest.mark.parametrize(("damage", "outcome", "stays"), DAMAGES)
def test_what_is_no_whole_row_of_this_user_is_never_a_hit(
    stored: SteppedFiles, make: Make, damage: Callable[[Path], object], outcome: Outcome, stays: bool
) -> None:
    """What may be another's stays, and so does all that a reader finds."""
    row = stored.row(0)
    damage(row)
    assert stored.there(range(3)) == ([0, 1, 2] if damage is flipped else [1, 2])
    there = os.path.lexists(row)
    assert make(write="off").open().load([0, 1]) == [outcome, OK]
    assert os.path.lexists(row) == there, "a reader deletes nothing"
    assert stored.load([0, 1]) == [outcome, OK]
    assert os.path.lexists(row) == stays
    assert stored.load([0, 1]) == [MISSING, OK]


def test_corrupt_row_that_was_replaced_meanwhile_stays(stored: SteppedFiles) -> None:
    row = stored.row(0)
    status, path = row.stat(), RowPath.of(NAMESPACE.hex(), key_of(0))
    good = row.read_bytes()
    row.with_suffix(".new").write_bytes(good)
    row.with_suffix(".new").rename(row)
    os.utime(row, ns=(status.st_mtime_ns,) * 2)
    stored.tier.directory.delete_unless_replaced(path, status.st_ino, status.st_mtime_ns)
    assert row.exists()
    stored.tier.directory.delete_unless_replaced(path, row.stat().st_ino, status.st_mtime_ns + 1)
    assert row.exists()
    stored.tier.directory.delete_unless_replaced(path, row.stat().st_ino, status.st_mtime_ns)
    assert not row.exists()


# --- room -------------------------------------------------------------------------------------------------------------


def test_very_small_directory_takes_rows_and_keeps_its_capacity(make: Make) -> None:
    """A unit is no larger than what room is made for, else it would wait for ever."""
    one = make(capacity=MARGIN_BYTES + 6 * ROW_BYTES).open()
    for first in (0, 8):
        assert one.store(range(first, first + 8)) == [OK] * 8
        one.clock.now += 1
        assert 0 < one.files <= 6
    assert one.load([15]) == [OK]
    assert one.tier.used_bytes <= MARGIN_BYTES + 6 * ROW_BYTES
    smaller = make(capacity=MARGIN_BYTES + 2 * ROW_BYTES).open()
    assert smaller.store([20]) == [OK]
    assert smaller.files <= 2, "as soon as a row is stored"
    assert smaller.load([20]) == [OK]


def test_capacity_below_one_row_is_refused_but_for_a_reader(make: Make) -> None:
    with pytest.raises(TierRefused, match=r"^capacity: "):
        make(capacity=MARGIN_BYTES + ROW_BYTES - 1).open()
    make(capacity=MARGIN_BYTES + ROW_BYTES).open()
    make(capacity=MARGIN_BYTES + ROW_BYTES - 1, write="off").open()
    assert make(capacity=1 << 60).tier.open(NAMESPACE, 0) == MAX_SLOTS


def test_below_min_free_rows_are_only_replaced(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [16]

    def statvfs(_: object) -> Any:
        return SimpleNamespace(f_blocks=1 << 20, f_frsize=ROW_BYTES, f_bavail=free[0])

    monkeypatch.setattr(os, "statvfs", statvfs)
    one = make(min_free=8 * ROW_BYTES).open()
    assert one.store(range(4)) == [OK] * 4
    free[0] = 8
    for first in (4, 8):
        one.clock.now += 1
        one.tier._free.measure_again()
        one.tier._measure_free_space(one.tier.served.budget)
        assert FULL in one.tier.denials
        assert one.store(range(first, first + 4)) == [OK] * 4
        assert one.files <= 4
    reader = make(min_free=8 * ROW_BYTES, write="off").open()
    assert not reader.tier.denials


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_rows_are_known_by_the_second_in_which_they_were_stored_found_or_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000]
    monkeypatch.setattr(tier_module, "_now_s", lambda: now[0])
    one, other = make().open(), make().open()
    keys = [key_of(number) for number in range(8)]

    def known(each: SteppedFiles) -> dict[bytes, int]:
        return {entry.key: entry.tick for entry in each.tier.found()}

    def absent(each: SteppedFiles, asked: list[bytes], *, chain: bool = False) -> list[bytes]:
        assert each.tier.check_existence(1, asked, chain)
        while not (answers := each.tier.existence_answers()):
            pass
        return list(answers[0].absent)

    assert one.tier.gone_before == 940
    one.store(range(3))
    assert known(one) == dict.fromkeys(keys[:3], 1000)
    assert absent(other, keys[:5], chain=True) == keys[3:4]
    assert known(other) == dict.fromkeys(keys[:3], 1000)
    assert absent(other, [keys[7], keys[1]]) == [keys[7]]
    assert known(other) == {keys[1]: 1000}
    now[0] += 50
    assert one.load(range(2)) == [OK] * 2
    assert known(one) == dict.fromkeys(keys[:2], 1050)
    assert one.tier.gone_before == 990
    other.store(range(2))
    assert known(other) == dict.fromkeys(keys[:2], 1050), "it was there"
    one.row(0).unlink()
    assert one.load(range(1)) == [MISSING]
    assert known(one) == {}
    assert absent(one, keys[:1]) == keys[:1]


def test_nothing_is_said_or_served_of_what_was_opened_before(stored: SteppedFiles) -> None:
    """After a reset of the weights, of the namespace or of its epoch, rows of before are misses."""
    assert stored.tier.check_existence(1, [key_of(0)], False)
    stored.open(bytes(16))
    assert stored.tier.found() == []
    assert list(stored.tier.existence_answers()) == []
    assert stored.load(range(2)) == [MISSING] * 2
    stored.tier.open(NAMESPACE, 1)
    assert OK not in stored.load(range(2))


def test_row_whose_question_fails_is_not_absent(stored: SteppedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored.tier.directory, "stat", refuse)
    assert stored.tier.check_existence(1, [key_of(0)], False)
    assert [list(answer.absent) for answer in stored.tier.existence_answers()] == [[]]
    assert not [entry for entry in stored.tier.found() if entry.tick == 0]


# --- ages -------------------------------------------------------------------------------------------------------------


def test_expired_rows_are_deleted_even_if_they_were_just_used(make: Make) -> None:
    one = make(max_age=AGE_S).open()
    one.store(range(4))
    one.clock.now += AGE_S / 2
    one.store(range(4, 6))
    for path in one.path.rglob("*.row"):
        os.utime(path, (one.clock.now + 50,) * 2)
    one.clock.now += AGE_S / 2 - 1
    one.expire()
    assert one.files == 6
    one.clock.now += 1
    one.expire()
    assert one.there(range(6)) == [4, 5]
    assert one.files == 2
    assert one.load(range(4, 6)) == [OK] * 2


def test_expired_row_is_a_miss_and_a_reader_leaves_it(make: Make) -> None:
    one, reader = make(max_age=AGE_S).open(), make(max_age=AGE_S, write="off").open()
    one.store(range(3))
    one.clock.now += AGE_S - 1
    assert one.there(range(3)) == [0, 1, 2]
    os.utime(one.row(0), (one.clock.now,) * 2)
    one.clock.now += 1
    assert one.there(range(3)) == [0], "that its seal is too old shows when it is loaded"
    assert reader.load(range(3)) == [MISSING] * 3
    assert one.files == 3
    assert one.load(range(2)) == [MISSING] * 2
    assert one.files == 1


def test_row_stored_again_ages_from_its_new_seal(make: Make) -> None:
    """Where rows have an age, one that is there is stored all the same."""
    one, other = make(max_age=AGE_S).open(), make(max_age=AGE_S).open()
    one.store(range(2))
    one.clock.now += AGE_S - 600
    assert other.store(range(2)) == [OK] * 2
    one.clock.now += 700
    one.expire()
    assert one.load(range(2)) == [OK] * 2


@pytest.mark.parametrize(("one_s", "other_s"), [(DAY_S, -DAY_S), (0.0, DAY_S), (-DAY_S, 0.0)])
def test_rows_expire_by_the_servers_clock_whatever_the_engines_say(make: Make, one_s: float, other_s: float) -> None:
    one, other = (make(max_age=AGE_S, ahead_s=ahead_s).open() for ahead_s in (one_s, other_s))
    one.store(range(4))
    other.store(range(4, 8))
    one.clock.now += AGE_S - 1
    for each in (one, other):
        each.expire()
        assert each.load(range(8)) == [OK] * 8
    one.clock.now += 61
    assert one.load(range(4, 8)) == [MISSING] * 4
    other.expire()
    assert one.files == 0


def test_row_sealed_ahead_of_the_clock_is_not_touched(make: Make) -> None:
    """A touch would make it as young as its last use, forever if its seal is far ahead."""
    one = make(max_age=AGE_S, ahead_s=365 * DAY_S).open()
    one.store(range(2))
    written_s = one.row(0).stat().st_mtime
    one.clock.now += TOUCH_S + 1
    assert one.load(range(2)) == [OK] * 2
    one.clock.now += AGE_S - TOUCH_S - 2
    assert one.load(range(2)) == [OK] * 2
    assert one.row(0).stat().st_mtime == written_s
    one.clock.now += 1
    assert one.load(range(2)) == [MISSING] * 2


def test_row_ahead_of_the_servers_clock_expires_all_the_same(make: Make) -> None:
    """That was put back, and its seal is ahead, too."""
    one = make(max_age=AGE_S, ahead_s=365 * DAY_S).open()
    one.store(range(1))
    os.utime(one.row(0), (one.clock.now + DAY_S,) * 2)
    one.expire()
    assert one.row(0).stat().st_mtime == one.clock.now
    one.clock.now += AGE_S
    one.expire()
    assert one.files == 0


def test_use_is_noted_once_a_minute_by_the_servers_clock(stored: SteppedFiles) -> None:
    """Of what is loaded, and of what would be stored again."""
    began_s = stored.row(0).stat().st_mtime
    stored.clock.now += TOUCH_S
    stored.load([0])
    assert stored.row(0).stat().st_mtime == began_s
    stored.clock.now += 1
    stored.load([0])
    assert stored.store([1]) == [FOUND]
    assert all(stored.row(number).stat().st_mtime >= began_s + TOUCH_S + 1 for number in range(2))


# --- a reader ---------------------------------------------------------------------------------------------------------


def test_reader_changes_nothing_and_needs_no_right_to(
    stored: SteppedFiles, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is there: rows of others, more than its capacity, unfinished files of the dead."""
    for namespace in (bytes(16), NAMESPACE):
        make().open(namespace).store(range(ROWS))
    orphan = stored.path / ".incoming" / "elsewhere-00000000-1-00000000-0.tmp"
    orphan.write_bytes(b"half a row")
    os.utime(orphan, (1, 1))

    def contents() -> dict[Path, tuple[float, str]]:
        files = [file for file in stored.path.rglob("*") if file.is_file()]
        return {file: (file.stat().st_mtime, hashlib.blake2b(file.read_bytes()).hexdigest()) for file in files}

    before, opened = contents(), os.open
    reader = make(write="off", max_age=AGE_S, capacity=1 << 20)

    def reading(name: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return opened(name, flags, *args, **more)

    attempts: list[str] = []

    def attempt(name: str, *_: object, **__: object) -> None:
        attempts.append(name)
        refuse()

    for name in ("mkdir", "unlink", "rename", "rmdir", "utime", "ftruncate", "pwrite"):
        monkeypatch.setattr(os, name, partial(attempt, name))
    monkeypatch.setattr(os, "open", reading)
    assert reader.open().there(range(2 * ROWS)) == [*range(ROWS)]
    assert reader.load(range(ROWS)) == [OK] * ROWS
    reader.tier.delete([(number, key_of(number)) for number in range(2)])
    reader.clock.now += 2 * AGE_S
    for _ in range(300):
        reader.tier.served.sweeper.step()
    assert list(reader.tier.maintain()) == []
    assert reader.there(range(ROWS)) == []
    assert not reader.tier.served.is_wanted(), "nor does it write a manifest"
    assert contents() == before
    assert attempts == []


# --- what is taken away under it --------------------------------------------------------------------------------------


def poll_twice(one: SteppedFiles) -> None:
    one.tier.served.health.check_soon()
    for _ in range(2):
        one.tier.poll()


@pytest.mark.parametrize("name", [".incoming", NAMESPACE.hex()])
@pytest.mark.parametrize("linked", [True, False])
def test_directory_that_may_be_anothers_takes_the_tier_down(stored: SteppedFiles, name: str, linked: bool) -> None:
    place = stored.path / name
    if linked:
        place.rename(stored.path.with_name("elsewhere"))
        place.symlink_to(stored.path.with_name("elsewhere"))
    else:
        place.chmod(0o777)
    assert stored.store([ROWS]) == [FAILED]
    with pytest.raises(TierDown, match=str(place)):
        poll_twice(stored)
    assert stored.tier.directory._held is None, "the file system can be unmounted"
    with pytest.raises(TierRefused, match=str(place)):
        stored.open()


def test_what_is_deleted_below_the_path_is_made_again_and_the_path_is_not(stored: SteppedFiles) -> None:
    for name in (".incoming", NAMESPACE.hex()):
        shutil.rmtree(stored.path / name)
    poll_twice(stored)
    assert stored.load(range(ROWS)) == [MISSING] * ROWS
    assert stored.store(range(ROWS)) == [OK] * ROWS
    stored.path.rename(stored.path.with_name("elsewhere"))
    stored.path.mkdir()
    assert stored.load(range(ROWS)) == [OK] * ROWS, "from the directory that was opened"
    assert list(stored.path.iterdir()) == []
    with pytest.raises(TierDown, match=f"{stored.path} has been replaced"):
        poll_twice(stored)


def test_sweep_that_hangs_is_the_tiers_problem(stored: SteppedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """And while all threads that ask for rows hang, its mover is to be killed."""
    stuck_s = stored.tier.times.file_stuck_s
    for hangs_s in (stuck_s, stuck_s + 1):
        monkeypatch.setattr(Sweeper, "quiet_s", hangs_s)
        monkeypatch.setattr(ExistenceChecker, "stuck_s", hangs_s)
        assert ("does not answer" in stored.tier.denials.get(FAILING, "")) == (hangs_s > stuck_s)
        assert stored.tier.stuck == (hangs_s > stuck_s)


def test_mount_that_has_gone_is_missed_by_the_next_mover(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was mounted later is the one to miss from then on, and so is that of a disk that a link leads to."""
    one = make()
    mounts = {Path("/")}
    monkeypatch.setattr(disk, "is_mount", lambda path: path in mounts)

    def next_mover(before: SteppedFiles) -> SteppedFiles:
        made = make()
        made.tier.mount_point = before.tier.mount_point
        return made.open()

    one.open()
    assert one.tier.mount_point == b"/"
    mounts.add(one.path)
    one = next_mover(one)
    assert one.tier.mount_point == os.fsencode(one.path)
    mounts.remove(one.path)
    with pytest.raises(TierDown, match=f"{one.path} is not mounted any more"):
        next_mover(one)
    other = one.path.with_name("other")
    one.path.rename(other)
    one.path.symlink_to(other)
    mounts |= {one.path, other}
    one = next_mover(one)
    assert one.tier.mount_point == os.fsencode(other)
    mounts.remove(one.path)
    next_mover(one)


def test_a_directory_of_slabs_is_refused(make: Make) -> None:
    one = make()
    one.path.mkdir()
    (one.path / ".ledger").touch()
    with pytest.raises(TierRefused, match=f"^path: {one.path} holds slabs, and a directory has one layout"):
        one.open()
    assert [file.name for file in one.path.iterdir()] == [".ledger"]
