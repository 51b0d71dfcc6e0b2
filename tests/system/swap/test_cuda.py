"""The CUDA path's host side on a fake driver: real kernels, compiled for a CPU, on streams as late as CUDA allows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.swap.fake_gpu import FakeGpu
from tests.swap.scenario import (
    scenario_of,
)
from tests.swap.test_cuda import machine, swap_of, with_kernels

__all__ = ["machine", "with_kernels"]  # fixtures


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
