"""Conformance of the file tier with `backend: gds_mt`: run by test_conformance.py in a pytest of its own.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from nixl_tiers.tiers.nixl_agent import Agent, Span, Transfer, TransferState
from tests.support.no_gpu import Counters, bypassed, counters
from tests.system.tiers.media import SlabFiles

BACKEND: Any = os.environ.get("GDS_CASES_BACKEND", "gds_mt")


@pytest.fixture(scope="session", autouse=True)
def bytes_of_this_run(record_testsuite_property: Callable[[str, object], None]) -> Iterator[None]:
    """How many bytes went through cuFile, for the report."""
    opened = Agent.gds_mt() if BACKEND == "gds_mt" else None  # its statistics go when the last agent does
    yield
    for name, nbytes in counters()._asdict().items():
        record_testsuite_property(f"cufile_{name}", nbytes)
    del opened


@pytest.fixture(autouse=True)
def every_byte_goes_through_cufile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A silent fall-back to POSIX passes every other test."""
    begun: list[tuple[str, int, Transfer]] = []
    start = Agent._start

    def recorded(agent: Agent, operation: str, spans: Sequence[Span]) -> Transfer:
        transfer = start(agent, operation, spans)
        begun.append((operation, sum(nbytes for _, nbytes, _, _ in spans), transfer))
        return transfer

    monkeypatch.setattr(Agent, "_start", recorded)
    before = counters()
    yield
    done = [(operation, size) for operation, size, transfer in begun if transfer.state() is TransferState.DONE]
    least, most = (
        Counters(*(sum(size for which, size, *_ in transfers if which == way) for way in ("READ", "WRITE")))
        for transfers in (done, begun)
    )
    assert bypassed(before, counters(), least, most) == ""


class TestSlabsThroughCuFile(StorageTierTests):
    @pytest.fixture
    def medium(self, cufile_place: Path) -> Medium:
        return SlabFiles(cufile_place, backend=BACKEND)
