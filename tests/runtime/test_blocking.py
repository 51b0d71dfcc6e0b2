"""Ctrl-C at any moment of a call: it is interrupted, no row is leaked, and nobody is locked out."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.blocking import SAME_S, Interrupts
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from tests.support.leaks import host_rows_in_use

SIZE = 4 << 10
ROWS = 8


@pytest.fixture
def store() -> Iterator[TieredStore]:
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": ROWS * 2 * SIZE}]})  # a page for the seal
    region = HostRegion.create(Geometry(1, SIZE), ROWS)
    with TieredStore(Coordinator(config, Namespace.of({}), region)) as store:
        yield store


@pytest.fixture(autouse=True)
def python_s_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at_line(line: int, call: Callable[[], Any]) -> bool:
    """Make `call`, with a SIGINT when it comes to its `line`-th line of ours; False if it has fewer."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "nixl_tiers" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count >= line


def interrupted_at(line: int, call: Callable[[], Any]) -> bool:
    try:
        assert not at_line(line, call), "the interrupt was lost"
    except KeyboardInterrupt:
        return True
    return False


def test_a_put_or_get_interrupted_at_any_line_leaks_no_row(store: TieredStore) -> None:
    rows = np.arange(3 * ROWS // 4, dtype=np.uint8)[:, None].repeat(SIZE, 1)
    out = np.zeros_like(rows)
    put_ends = get_ends = False
    line = 0
    while not (put_ends and get_ends):
        line += 1
        keys = [b"%d-%d" % (line, n) for n in range(len(rows))]
        put_ends = put_ends or not interrupted_at(line, lambda keys=keys: store.put(keys, rows))
        assert store.put(keys, rows) == len(rows), line
        get_ends = get_ends or not interrupted_at(line, lambda keys=keys: store.get(keys, out))
        out[:] = 0xEE
        assert store.get(keys, out) == [True] * len(keys)
        assert np.array_equal(out, rows)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert line > 50
    store.reset()
    assert host_rows_in_use(store) == 0


CALLS: dict[str, Callable[[TieredStore], object]] = {
    "locate": lambda store: store.locate([b"a"] * 200),
    "prefetch": lambda store: store.prefetch([b"a"]),
    "stats": lambda store: store.stats(),
    "flush": lambda store: store.flush(120),
    "wait_ready": lambda store: store.wait_ready(120),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_interrupted_at_any_line_lets_other_threads_go_on(
    store: TieredStore, call: Callable[[TieredStore], object]
) -> None:
    line, ends = 0, False
    while not ends:
        line += 1
        ends = not interrupted_at(line, lambda: call(store))
        held = store.coordinator._hold.lock._is_owned()  # type: ignore[union-attr]
        assert not held, f"the core is held for ever after line {line}"
    assert line > 5


def test_partly_filled_rows_are_misses(store: TieredStore) -> None:
    write = store._write

    def with_a_bad_row(chunk_of: Any, interrupts: Any) -> Any:
        return write({**chunk_of, b"b": np.zeros(5, np.uint8)}, interrupts)  # numpy raises when it comes to the second

    store._write = with_a_bad_row  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="could not broadcast"):
        store.put([b"a", b"b"], np.zeros((2, SIZE), np.uint8))
    assert store.locate([b"a", b"b"]) == [None, None]
    assert host_rows_in_use(store) == 0


def test_an_interrupt_is_deferred_to_a_point_and_a_second_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0  # it passes when the test says so: two interrupts are one only within SAME_S
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Interrupts() as interrupts:
        interrupts.point()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.point()
        interrupts.point()
        signal.raise_signal(signal.SIGINT)
        try:
            signal.raise_signal(signal.SIGINT)  # a launcher has passed it on, too
        except KeyboardInterrupt:
            pytest.fail("one interrupt counts as two")
        now += SAME_S + 0.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
