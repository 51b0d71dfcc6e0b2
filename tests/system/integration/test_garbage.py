"""Invalid packets of movers: they end the mover, and affect nothing else."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.types import BreakerLimits, Limits
from nixl_tiers.memory.columns import ColumnsError
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover import restarts
from nixl_tiers.mover.child import _read
from nixl_tiers.mover.protocol import (
    MAX_PACKET,
    Down,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    ListedColumns,
    Load,
    Opened,
    RowsEnded,
    Slots,
    ToCoordinator,
    decode_to_coordinator,
    encode,
)
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from nixl_tiers.tiers.base import Entry, Move
from tests.support.core import end_step, finish, look_up
from tests.support.file_tier import file_tier
from tests.support.leaks import ResourceCount
from tests.support.load import get, put
from tests.support.times import changed
from tests.support.waiting import serves, until

GEOMETRY = Geometry(1, 60_000)
ROWS = 16
TIMEOUT_S = 120.0
FINISHED = encode(Finished(1, bytes(64), 0.1))
NOISE = random.Random(1).randbytes
FROM_MOVERS = {
    "noise": NOISE(300),
    "half a message": FINISHED[: len(FINISHED) // 2],
    "too long": encode(Listed(0, [Entry(n, b"key-%05d" % n, n) for n in range(MAX_PACKET // 12)], last=False)),
    "a number": b"\x07",
    "a message to movers": encode(Load(1, [Move(0, 0, b"key")])),
    "an outcome that there is not": encode(Finished(1, b"\xee", 0.1)),
    "rows with such an outcome": encode(RowsEnded(1, [0], b"\xee")),
    "more slots than the capacity has": encode(Opened(0, 2**31)),
    "columns without a descriptor": encode(ListedColumns(0)),
    "nothing, and a descriptor": b"",
}


def coordinator_of(tmp_path: Path, **fields: object) -> tuple[Coordinator, HostRegion]:
    tier = file_tier(tmp_path / "kv", "32MiB", **fields)
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes}, tier]})
    region = HostRegion.create(GEOMETRY, ROWS)
    limits = replace(Limits(), retry_s=0.1, breaker=BreakerLimits(min_backoff_s=0.1, max_backoff_s=0.2))
    times = changed(restart_backoff_s=(0.05,))
    return Coordinator(config, Namespace.of({"of": "garbage"}), region, limits=limits, times=times), region


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TieredStore]:
    """A store whose mover sends every file of the directory `packets` as a packet."""
    monkeypatch.setattr(restarts, "KILLS_AN_HOUR", 1000)
    (tmp_path / "packets").mkdir()
    coordinator, _ = coordinator_of(
        tmp_path, type="tests.system.mover.packet_injector:PacketInjectorConfig", packets=str(tmp_path / "packets")
    )
    coordinator.start()
    store = TieredStore(coordinator)
    yield store
    store.close()


def test_a_mover_that_sends_an_invalid_packet_is_replaced(store: TieredStore, tmp_path: Path) -> None:
    """The store answers at once and rightly, and before long out of the tier again."""
    until(lambda: serves(store.stats()["file"]), "the tier", TIMEOUT_S)
    keys = [b"key-%d" % n for n in range(2 * ROWS)]
    assert put(store, keys) == len(keys)
    assert store.flush(TIMEOUT_S)
    fds = ResourceCount.take().fds

    def hits() -> int:
        found, wrong = get(store, keys)
        assert not wrong
        return sum(found)

    for number, (name, packet) in enumerate(FROM_MOVERS.items(), 1):
        (tmp_path / "packet").write_bytes(packet)
        (tmp_path / "packet").rename(tmp_path / "packets" / "packet")
        until(
            lambda number=number: store.stats()["file"]["kills"] == number, f"the end of a mover that sent {name}", 120
        )
        hits()
        until(lambda: hits() > ROWS, "more than the host holds", TIMEOUT_S)
        assert store.stats()["file"]["deaths"] == number
    until(lambda: ResourceCount.take().fds <= fds, "descriptors to be closed", TIMEOUT_S)


# --- without a mover ------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**32, 2**62, 2**63]))
KEYS = st.one_of(st.sampled_from([b"key-%d" % n for n in range(20)]), st.binary(max_size=120))
ENTRIES = st.lists(st.builds(Entry, NUMBERS, KEYS, NUMBERS), max_size=4)
MESSAGES = st.one_of(
    st.builds(RowsEnded, st.integers(0, 9), st.lists(NUMBERS), st.binary(max_size=5)),
    st.builds(Finished, st.integers(0, 9), st.binary(max_size=5), st.floats(), st.lists(st.tuples(NUMBERS, NUMBERS))),
    st.builds(Listed, st.integers(0, 1), ENTRIES, st.booleans()),
    st.builds(Opened, st.integers(0, 1), NUMBERS),
    st.builds(Slots, st.integers(0, 1), NUMBERS),
    st.builds(ExistenceChecked, st.integers(0, 9), st.lists(KEYS, max_size=4)),
    st.builds(Down, st.text(max_size=5), st.integers(0, 1)),
    st.builds(Heartbeat, NUMBERS),
)
EVENTS = st.lists(
    st.one_of(
        MESSAGES,
        st.tuples(st.just("put"), st.integers(0, 19), st.integers(1, 5)),
        st.tuples(st.just("look up"), st.integers(0, 19), st.integers(1, 5)),
        st.just(("open", 0, 0)),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=60)
@given(events=EVENTS)
def test_no_message_of_a_mover_loses_a_row_or_gives_it_two_owners(events: list[Any]) -> None:
    coordinator, region = coordinator_of(Path("/unused"))
    try:
        for number, event in enumerate(events):
            if not isinstance(event, tuple):
                receive(coordinator, event)
            elif event[0] == "open":
                receive(coordinator, Opened(0, 64))
                receive(coordinator, Listed(0, [], last=True))
            else:
                what, first, count = event
                act(
                    coordinator, region, what, [b"key-%d" % n for n in range(first, first + count)], f"request-{number}"
                )
            coordinator._link.on_tick(time.monotonic(), [1000])
        coordinator._link.on_reaped(0)
        assert sorted(claim(coordinator, region)) == list(range(ROWS))
        assert all(value >= 0 for value in coordinator.counters()["file"].values())
    finally:
        region.close()


def receive(coordinator: Coordinator, message: ToCoordinator) -> None:
    """As the supervisor does: what does not decode, or cannot be applied, is the end of its mover."""
    try:
        coordinator._link.on_message(0, decode_to_coordinator(encode(message)))
    except (ValueError, OverflowError):
        coordinator._link.on_killed(0)
        coordinator._link.on_reaped(0)


def act(coordinator: Coordinator, region: HostRegion, what: str, keys: list[bytes], request: str) -> None:
    if what == "put":
        plan = coordinator.prepare_store(request, keys)
        if len(plan.rows):
            region.mark(np.array(plan.rows), 0, plan.store_seq, True)
        coordinator.complete_store(plan.keys)
    else:
        for key in keys:
            look_up(coordinator, key, request)
    end_step(coordinator)
    finish(coordinator, request)


def claim(coordinator: Coordinator, region: HostRegion) -> list[int]:
    """Every row of the host that can be had."""
    plan = coordinator.prepare_store("claim", [b"claim-%d" % n for n in range(ROWS)])
    if len(plan.rows):
        region.mark(np.array(plan.rows), 0, plan.store_seq, False)
    coordinator.complete_store(plan.keys)
    return list(plan.rows)


@settings(deadline=None)
@given(data=st.data())
def test_what_comes_from_a_mover_is_a_message_or_an_error(data: st.DataObject) -> None:
    packet = bytearray(data.draw(st.one_of(st.binary(max_size=200), MESSAGES.map(encode))))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, 199), st.integers(0, 255)), max_size=3)):
        if place < len(packet):
            packet[place] = value
    try:
        message, table = _read(bytes(packet[: data.draw(st.integers(0, 200))]), [])
    except (msgspec.DecodeError, UnicodeDecodeError, ColumnsError):
        return
    assert isinstance(message, ToCoordinator)
    assert table is None
