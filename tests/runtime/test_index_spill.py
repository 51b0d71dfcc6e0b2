"""The thread that spills cold rows: what it does when no table can be built."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from nixl_tiers.base.policies import Write
from nixl_tiers.core.cold_rows import take_all
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.listing import begin_listing
from nixl_tiers.core.tier import TierIndex
from nixl_tiers.core.types import TierSpec, TierState
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import RowTable, RowTableError
from nixl_tiers.runtime.index_spill import IndexSpill
from tests.support.cold_table import PlainColdTable

ROWS = 20


@pytest.mark.parametrize("error", [RowTableError("no memory"), MemoryError(), KeyError("a defect")])
def test_failed_spill_leaves_the_rows_in_the_index_and_rests(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = TierIndex(TierSpec("file", Write.THROUGH, physical_slots=True), 0, Limits(hot_rows=8))
    take_all(begin_listing(index, ROWS))
    index.state = TierState.UP
    for number in range(ROWS):
        entry = index.reserve(b"row-%d" % number, number)
        assert entry is not None
        entry.stored = True
    retired = PlainColdTable([])
    index.cold.retire(retired)

    def build(*_: object, **__: object) -> RowTable:
        raise error

    monkeypatch.setattr(RowTable, "build", build)
    spill = IndexSpill([index], KeyHash.random(), threading.Condition())
    spill._run()
    assert index.spill is None
    assert len(index.index) == ROWS
    assert retired.closed
    (record,) = caplog.records
    assert "no table for the rows of file" in record.getMessage()
    assert bool(record.exc_info) is isinstance(error, KeyError)  # a traceback of what is a defect
    spill._run()  # not before a minute has passed
    assert len(caplog.records) == 1
    assert index.make_room(3) == [b"row-0", b"row-1", b"row-2"]


def test_thread_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    index = TierIndex(TierSpec("file", Write.THROUGH, physical_slots=True), 0)
    retired = PlainColdTable([])
    index.cold.retire(retired)
    lock = threading.Condition()
    spill = IndexSpill([index], KeyHash.random(), lock)
    with monkeypatch.context() as patch, lock:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
        spill.wake()
    assert not retired.closed
    with lock:
        spill.wake()
    for thread in threading.enumerate():
        if thread.name == "nixl_tiers index":
            thread.join(60)
    assert retired.closed
