"""Whatever a mover sends, no row is lost or has two owners."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import (
    Down,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    Opened,
    RowsEnded,
    Slots,
    ToCoordinator,
    decode_to_coordinator,
    encode,
)
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.tiers.base import Entry
from tests.support.core import end_step, finish, look_up
from tests.support.file_tier import file_tier

GEOMETRY = Geometry(1, 60_000)
ROWS = 16

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
    cpu = {"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes}
    config = configuration.load({"tiers": [cpu, file_tier("/unused", "32MiB")]})
    with HostRegion.create(GEOMETRY, ROWS) as region:
        coordinator = Coordinator(config, Namespace.of({"of": "garbage"}), region)
        for number, event in enumerate(events):
            if not isinstance(event, tuple):
                receive(coordinator, event)
            elif event[0] == "open":
                receive(coordinator, Opened(0, 64))
                receive(coordinator, Listed(0, [], last=True))
            else:
                what, first, count = event
                keys = [b"key-%d" % n for n in range(first, first + count)]
                act(coordinator, region, what, keys, f"request-{number}")
            coordinator._link.on_tick(time.monotonic(), [1000])
        coordinator._link.on_reaped(0)
        assert sorted(claim(coordinator, region)) == list(range(ROWS))
        assert all(value >= 0 for value in coordinator.counters()["file"].values())


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
