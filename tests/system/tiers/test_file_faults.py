"""Files and directories removed or damaged under a running file tier: it goes down once, and comes up with the rest."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Down, Heartbeat, Open, Opened, Refused
from tests.mover.harness import NAMESPACE, MoverProcess, shard_dir, wait_until
from tests.support.disks import disk_bytes
from tests.support.file_tier import LAYOUTS

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 24 << 20
ROWS = 24


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def mover_on(path: Path, layout: str = "slabs") -> MoverProcess:
    tier = LAYOUTS[layout](path, CAPACITY, type="tests.mover.stub_tiers:DecidedConfig", staged=False)
    return MoverProcess(tier, GEOMETRY, ROWS)


def stored(mover: MoverProcess, rows: int = ROWS) -> MoverProcess:
    """The mover, serving keys 0 to rows - 1."""
    mover.open()
    mover.listed_rows()
    assert set(mover.store(range(rows))) == {Outcome.OK}
    return mover


def down_and_up(mover: MoverProcess) -> str:
    """Wait until it has reported that it is down and up again; returns the reason."""
    down = mover.expect(lambda m: isinstance(m, Down))
    assert isinstance(down, Down)
    mover.expect(lambda m: isinstance(m, Opened))
    mover.listed_rows()
    return down.reason


def rows_of(mover: MoverProcess, layout: str) -> int:
    """How many it lists, or says are there when it is asked."""
    listed = mover.listed_rows()
    return len(listed) if layout == "slabs" else len(mover.there(range(ROWS)))


def lines(mover: MoverProcess, text: str) -> int:
    return sum(text in line for line in mover.log().splitlines())


def test_deleted_directory_is_made_again(tmp_path: Path, layout: str) -> None:
    place = tmp_path / "kv"
    with stored(mover_on(place, layout)) as mover:
        shutil.rmtree(place)
        assert set(mover.load(range(ROWS))) <= {Outcome.OK, Outcome.MISSING, Outcome.FAILED}
        assert down_and_up(mover) == f"{_root(place, layout)} has been deleted"
        assert set(mover.load(range(ROWS))) == {Outcome.MISSING}
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}
        assert disk_bytes(place) > ROWS * GEOMETRY.row_bytes
        mover.stop()
        assert lines(mover, "has been deleted") == 0  # the coordinator logs the reason, not the mover
    with mover_on(place, layout) as mover:
        mover.open()
        assert rows_of(mover, layout) == ROWS


def _root(place: Path, layout: str) -> Path:
    return place if layout == "files" else shard_dir(place).parent


def test_tier_is_down_until_a_missing_parent_is_back(tmp_path: Path, layout: str) -> None:
    parent = tmp_path / "disk"
    parent.mkdir()
    with stored(mover_on(parent / "kv", layout)) as mover:
        parent.rename(tmp_path / "elsewhere")
        reasons = {mover.expect(lambda m: isinstance(m, Down)).reason for _ in range(2)}  # type: ignore[union-attr]
        assert any("deleted" in reason for reason in reasons)
        assert set(mover.store(range(ROWS))) == {Outcome.FAILED}
        (tmp_path / "elsewhere").rename(parent)
        mover.expect(lambda m: isinstance(m, Opened))
        assert rows_of(mover, layout) == ROWS
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


DAMAGES: dict[str, tuple[Callable[[Path], object], str, bool]] = {
    "slab deleted": (lambda home: (home / "slab-00000.kv").unlink(), "slab-00000.kv has been deleted", False),
    "slab replaced": (lambda home: _copy_over(home / "slab-00000.kv"), "slab-00000.kv has been replaced", True),
    "journal deleted": (lambda home: _delete(home, "manifest.*"), "manifest.journal has been deleted", True),
    "lock deleted": (lambda home: _delete(home.parent, ".lock"), ".lock has been deleted", True),
    "description deleted": (lambda home: _delete(home, "namespace.json"), "namespace.json has been deleted", True),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_remaining_rows_of_a_damaged_shard_are_hits(tmp_path: Path, damage: str) -> None:
    destroy, reason, survive = DAMAGES[damage]
    with stored(mover_on(tmp_path)) as mover:
        destroy(shard_dir(tmp_path))
        assert down_and_up(mover).endswith(reason)
        assert set(mover.load(range(ROWS))) == {Outcome.OK if survive else Outcome.MISSING}
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}
        mover.stop()
    with mover_on(tmp_path) as mover:
        mover.open()
        assert len(mover.listed_rows()) == ROWS
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


def _copy_over(path: Path) -> None:
    fresh = path.with_suffix(".copy")
    shutil.copy(path, fresh)
    fresh.rename(path)


def _delete(home: Path, pattern: str) -> None:
    for path in home.glob(pattern):
        path.unlink()


def test_journal_damaged_while_open_costs_no_row(tmp_path: Path) -> None:
    journal = shard_dir(tmp_path) / "manifest.journal"
    with stored(mover_on(tmp_path), ROWS // 2) as mover:
        with journal.open("r+b") as file:
            file.write(os.urandom(os.fstat(file.fileno()).st_size))
        for start in range(ROWS // 2, ROWS, 2):
            assert set(mover.store(range(start, start + 2))) == {Outcome.OK}
            assert set(mover.load(range(ROWS // 2))) == {Outcome.OK}
        mover.stop()
        assert lines(mover, "is damaged") <= 1
    with mover_on(tmp_path) as mover:
        mover.open()
        assert len(mover.listed_rows()) == ROWS
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


def test_file_size_limit_fails_only_stores(tmp_path: Path, layout: str) -> None:
    with stored(mover_on(tmp_path, layout), ROWS // 2) as mover:
        pid, most = mover.process.pid, GEOMETRY.row_bytes // 2
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        refused = Outcome.NO_SPACE if layout == "slabs" else Outcome.FAILED  # no slab grows, which is no failed write
        assert set(mover.store(range(100, 100 + ROWS))) == {refused}
        denied(mover, lambda denials: "File too large" in denials.get("writing", ""))
        assert set(mover.load(range(ROWS // 2))) == {Outcome.OK}
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert wait_until(lambda: set(mover.store(range(100, 100 + ROWS))) == {Outcome.OK})
        denied(mover, lambda denials: not denials)
        assert set(mover.load(range(ROWS // 2))) == {Outcome.OK}
        mover.stop()
        assert lines(mover, "File too large") == 1


def denied(mover: MoverProcess, what: Callable[[Mapping[str, str]], bool]) -> None:
    mover.expect(lambda message: isinstance(message, Heartbeat) and what(message.denials))


@pytest.mark.parametrize("there", list(LAYOUTS))
def test_directory_of_the_other_layout_is_refused(tmp_path: Path, there: str) -> None:
    with stored(mover_on(tmp_path, there)) as mover:
        mover.stop()
    (other,) = set(LAYOUTS) - {there}
    with mover_on(tmp_path, other) as mover:
        mover.send(Open(NAMESPACE, 0))
        refused = mover.expect(lambda m: isinstance(m, Refused))
        assert isinstance(refused, Refused)
        assert refused.reason.startswith(f"path: {tmp_path} holds ")
        assert "one layout" in refused.reason
    with mover_on(tmp_path, there) as mover:
        mover.open()
        assert rows_of(mover, there) == ROWS
