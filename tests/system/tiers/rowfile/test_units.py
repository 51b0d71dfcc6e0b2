"""Rows are handed to the worker several at a time; what goes wrong with one of them concerns that one only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome, align
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.move_queue import Steps
from nixl_tiers.tiers.rowfile import transfers
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.tier import MARGIN_BYTES, RowFileTier
from nixl_tiers.tiers.rowfile.worker import Moved, Trouble
from tests.mover.harness import NAMESPACE, key_of, wait_until
from tests.system.tiers.file_tiers import GEOMETRY, ROWS, load, make_tier, store

ROW_BYTES = align(GEOMETRY.row_bytes) + NAME_BYTES
Change = Callable[[Move, Moved], Moved]


@pytest.fixture
def tier(tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch) -> Iterator[RowFileTier]:
    monkeypatch.setattr(transfers, "_UNIT_ROWS", 8)
    made = make_tier("files", tmp_path, region)
    assert isinstance(made, RowFileTier)
    made.open(NAMESPACE, 0)
    yield made
    made.close()


def row_of(tier: RowFileTier, number: int) -> Path:
    return tier.directory.absolute(RowPath.of(NAMESPACE.hex(), key_of(number)))


@pytest.fixture
def units(tier: RowFileTier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each unit has."""
    return changed(tier, monkeypatch, lambda _, moved: moved)


def changed(tier: RowFileTier, monkeypatch: pytest.MonkeyPatch, change: Change) -> list[int]:
    """Have the worker's results be others."""
    rows: list[int] = []
    move = tier._transfers.worker.move

    def noted(moves: Sequence[Move], *more: Any, **options: Any) -> Steps[Sequence[Moved]]:
        rows.append(len(moves))
        ended = yield from move(moves, *more, **options)
        return [change(*each) for each in zip(moves, ended, strict=True)]

    monkeypatch.setattr(tier._transfers.worker, "move", noted)
    return rows


def test_small_rows_are_moved_together(tier: RowFileTier, region: HostRegion, units: list[int]) -> None:
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}
    assert units == [8] * (ROWS // 8) * 2


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(errno.ENOSPC, Outcome.NO_SPACE), (errno.EDQUOT, Outcome.NO_SPACE)]
    + [(error, Outcome.FAILED) for error in (errno.EIO, errno.EROFS, errno.EFBIG, errno.EXDEV)],
)
def test_only_the_row_that_cannot_be_written_fails(
    tier: RowFileTier, region: HostRegion, monkeypatch: pytest.MonkeyPatch, error: int, outcome: Outcome
) -> None:
    with monkeypatch.context() as patch:
        changed(
            tier,
            patch,
            lambda move, moved: moved._replace(verdict=Trouble.NOT_MOVED, error=error) if move.row == 3 else moved,
        )
        ended = store(tier, region, range(ROWS))
    assert ended.pop(3) is outcome
    assert set(ended) == {Outcome.OK}
    assert tier.served.budget._writing_bytes == 0
    assert not tier.directory.temp_names._in_use
    assert set(store(tier, region, range(ROWS))) == {Outcome.FOUND}
    assert not tier.denials


def test_unit_that_cannot_begin_has_failed(
    tier: RowFileTier, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tier._transfers.worker._library, "submit", lambda *_: errno.ENOMEM)
        assert set(store(tier, region, range(ROWS))) == {Outcome.FAILED}
        assert set(load(tier, region, range(ROWS))) == {Outcome.FAILED}
    assert tier.served.budget._writing_bytes == 0
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}


def test_units_are_no_larger_than_what_room_is_made_for(tmp_path: Path, region: HostRegion) -> None:
    """Else one would wait for ever in a very small directory."""
    tier = make_tier("files", tmp_path, region, MARGIN_BYTES + 6 * ROW_BYTES)
    assert isinstance(tier, RowFileTier)
    tier.open(NAMESPACE, 0)
    for first in (0, ROWS):
        assert set(store(tier, region, range(first, first + ROWS))) == {Outcome.OK}
    assert len(list(tmp_path.rglob("*.row"))) <= 6
    tier.close()


def test_what_is_no_row_of_this_user_is_a_miss_and_stays(
    tier: RowFileTier, region: HostRegion, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(store(tier, region, range(2))) == {Outcome.OK}
    row = row_of(tier, 0)
    raw = row.read_bytes()
    row.unlink()
    row.with_suffix(".kept").write_bytes(raw)
    row.symlink_to(row.with_suffix(".kept"))
    assert load(tier, region, range(2)) == [Outcome.MISSING, Outcome.OK]
    assert row.is_symlink()
    assert f"{row} is no file, or belongs to another user, and stays" in caplog.text


def test_row_of_another_size_is_corrupt_and_is_deleted(
    tier: RowFileTier, region: HostRegion, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(store(tier, region, range(2))) == {Outcome.OK}
    os.truncate(row_of(tier, 0), 4096)
    assert load(tier, region, range(2)) == [Outcome.CORRUPT, Outcome.OK]
    assert wait_until(lambda: not row_of(tier, 0).exists())
    assert f"{row_of(tier, 0)} is no whole row" in caplog.text
    assert load(tier, region, range(1)) == [Outcome.MISSING]


def test_row_that_cannot_be_read_has_failed_and_stays(
    tier: RowFileTier, region: HostRegion, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(store(tier, region, range(2))) == {Outcome.OK}
    with monkeypatch.context() as patch:
        changed(tier, patch, lambda _, moved: moved._replace(verdict=Trouble.NOT_MOVED, error=errno.EIO))
        assert load(tier, region, range(2)) == [Outcome.FAILED] * 2
    assert "rows cannot be read" in caplog.text
    assert load(tier, region, range(2)) == [Outcome.OK] * 2


def test_row_that_does_not_verify_is_corrupt(
    tier: RowFileTier, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(store(tier, region, range(2))) == {Outcome.OK}
    with monkeypatch.context() as patch:
        changed(tier, patch, lambda _, moved: moved._replace(verdict=Verdict.DIGEST))
        assert load(tier, region, range(1)) == [Outcome.CORRUPT]
    assert wait_until(lambda: not row_of(tier, 0).exists())
