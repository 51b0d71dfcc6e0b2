"""The CUDA path's host side on a fake driver: real kernels, compiled for a CPU, on streams as late as CUDA allows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.swap.fake_gpu import FakeGpu
from tests.swap.scenario import (
    assert_same,
    scenario_of,
)
from tests.swap.test_cuda import swap_of


def test_threads_may_wait_for_each_others_transfers(machine: Callable[..., FakeGpu]) -> None:
    rng = np.random.default_rng(9)
    scenario = scenario_of(rng, [[2048] * 2], blocks=32, rows=16, sub_blocks=2)
    swap = swap_of(machine(9), scenario, "staged")
    blocks, places = scenario.transfer(rng, 32)
    expected = scenario.store(0, blocks, places)
    failed: list[BaseException] = []

    def move(index: int) -> None:
        try:
            part = slice(index * 8, index * 8 + 8)
            transfer = swap.store(0, blocks[part], places[part])
            transfer.done()
            transfer.wait()
        except Exception as error:  # noqa: BLE001 - looked at by the main thread
            failed.append(error)

    threads = [threading.Thread(target=move, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert_same(scenario.region, expected, "region")
    swap.close()


def test_a_stream_can_be_held_while_another_thread_waits(
    machine: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hold a stream takes no time: not even as long as another thread waits for the same bytes."""
    rng = np.random.default_rng(9)
    scenario = scenario_of(rng, [[2048] * 2], blocks=12, rows=6, sub_blocks=2)
    fake = machine(9)
    swap = swap_of(fake, scenario, "staged")
    transfer = swap.store(0, range(12), range(12))
    waits, go_on = threading.Event(), threading.Event()
    original = fake.driver.wait

    def slow(event: int) -> None:
        waits.set()
        assert go_on.wait(60)
        original(event)

    monkeypatch.setattr(fake.driver, "wait", slow)
    waiter = threading.Thread(target=transfer.wait)
    waiter.start()
    assert waits.wait(60)
    held = threading.Thread(target=transfer.hold, args=(0,))
    held.start()
    held.join(60)
    assert not held.is_alive()
    assert not transfer.done()
    go_on.set()
    waiter.join(60)
    assert transfer.done()
    swap.close()
