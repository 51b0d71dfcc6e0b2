"""Small rows are stored several at a time; what goes wrong with one of them concerns that one only."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import staging
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.nixl_agent import Span, Transfer, TransferState
from nixl_tiers.tiers.rowfile import transfers
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.quota import Reservation
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from tests.mover.harness import NAMESPACE
from tests.system.tiers.file_tiers import ROWS, load, make_tier, store


@pytest.fixture
def tier(tmp_path: Path, region: HostRegion) -> Iterator[RowFileTier]:
    made = make_tier("files", tmp_path, region)
    assert isinstance(made, RowFileTier)
    made.open(NAMESPACE, 0)
    for _ in made.list_rows():
        pass
    yield made
    made.close()


@pytest.fixture
def writes(tier: RowFileTier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each transfer writes."""
    rows: list[int] = []
    write = tier._agent.write

    def counted(spans: Sequence[Span]) -> Transfer:
        rows.append(len(spans))
        return write(spans)

    monkeypatch.setattr(tier._agent, "write", counted)
    return rows


def test_small_rows_are_written_together(tier: RowFileTier, region: HostRegion, writes: list[int]) -> None:
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    assert writes == [8] * (ROWS // 8)
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}


def test_only_the_row_whose_file_cannot_be_made_fails(
    tier: RowFileTier, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, calls = tier._files.create, iter(range(ROWS))

    def failing() -> Any:
        file = create()
        if next(calls) != 3 or isinstance(file, Outcome):
            return file
        tier._agent.deregister(file.registration)
        tier._files._discard(file.temporary)
        return Outcome.NO_SPACE

    monkeypatch.setattr(tier._files, "create", failing)
    ended = store(tier, region, range(ROWS))
    assert sorted(ended, key=lambda each: each is Outcome.OK) == [Outcome.NO_SPACE, *[Outcome.OK] * (ROWS - 1)]
    assert tier._quota._reserved_bytes == 0


def test_files_are_made_while_others_are_written(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making one may take long, and then a full buffer would hold rows that are not written."""
    monkeypatch.setattr(transfers, "_UNIT_ROWS", 1)
    monkeypatch.setattr(staging, "BUFFER_BYTES", 2 * region.geometry.row_bytes)
    tier = make_tier("files", tmp_path / "staged", region, staged=True)
    assert isinstance(tier, RowFileTier)
    with closing(tier):
        tier.open(NAMESPACE, 0)
        for _ in tier.list_rows():
            pass
        create, write, made, written = tier._files.create, tier._agent.write, itertools.count(1), list[int]()
        all_made = threading.Event()

        def counted() -> Any:
            if next(made) == ROWS:
                all_made.set()
            return create()

        def slow(spans: Sequence[Span]) -> Transfer:
            transfer = write(spans)
            written.append(len(spans))
            state = transfer.state
            monkeypatch.setattr(
                transfer, "state", lambda: state() if all_made.is_set() else TransferState.PENDING, raising=False
            )
            return transfer

        monkeypatch.setattr(tier._files, "create", counted)
        monkeypatch.setattr(tier._agent, "write", slow)
        assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
        assert len(written) == ROWS


def test_rows_of_a_failed_transfer_are_written_again_one_by_one(
    tier: RowFileTier, region: HostRegion, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = tier._agent.write

    def failing(spans: Sequence[Span]) -> Transfer:
        transfer = write(spans)
        while len(spans) > 1 and transfer.state() is TransferState.PENDING:
            pass
        if len(spans) == 1:
            return transfer
        transfer.release()
        return Transfer(None, None, TransferState.FAILED)

    monkeypatch.setattr(tier._agent, "write", failing)
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    assert sorted(writes) == [1] * ROWS + [8] * (ROWS // 8)
    assert tier._quota._reserved_bytes == 0
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}


def test_rows_are_admitted_one_by_one_where_there_is_no_room_for_all(
    tier: RowFileTier, region: HostRegion, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, granted = tier._quota.reserve, iter(range(ROWS))

    def scarce(waiting: int, rows: int = 1) -> Reservation:
        if rows > 1 or next(granted) >= 5:
            return Reservation.REFUSED
        return reserve(waiting, rows)

    monkeypatch.setattr(tier._quota, "reserve", scarce)
    ended = store(tier, region, range(ROWS))
    assert ended == [Outcome.OK] * 5 + [Outcome.NO_SPACE] * (ROWS - 5)
    assert writes == [1] * 5


def test_directory_that_another_process_removes_is_made_again(
    tier: RowFileTier, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty directories are removed: also one that was made just now for a row."""
    make, removed = Folder.make, set[str]()

    def unlucky(folder: Folder, name: str) -> bool:
        made = make(folder, name)
        if made and len(name) == len(RowPath.of("", b"key").fanout) and name not in removed:
            with suppress(OSError):  # another row's thread may have put its file there meanwhile
                folder.rmdir(name)
                removed.add(name)
        return made

    monkeypatch.setattr(Folder, "make", unlucky)
    assert set(store(tier, region, range(ROWS))) == {Outcome.OK}
    assert removed
