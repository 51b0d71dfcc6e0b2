"""Page-locking, piece by piece, on the fake driver; and where memory lies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.swap import pinned as pinned_module
from nixl_tiers.swap.driver import Device
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan, Share
from tests.swap.fake_gpu import FakeGpu

ROWS = 10
OUT_OF_MEMORY = 2
Pin = tuple[FakeGpu, CopyPlan, Callable[[], PinnedRegion]]


@pytest.fixture
def pin(fake_library: Path) -> Iterator[Pin]:
    geometry = Geometry(1, 3 * 4096)
    memory = np.frombuffer(mmap.mmap(-1, ROWS * geometry.row_bytes), np.uint8)
    plan = CopyPlan([[]], geometry, Share(0), memory.ctypes.data, ROWS)
    fake = FakeGpu(fake_library)
    device = Device(fake.driver, 0)
    yield fake, plan, lambda: PinnedRegion(device, plan)
    device.close()
    assert fake.live()["registrations"] == 0
    assert fake.calls("a capture broken") == 0
    fake.check()


def test_a_first_piece_that_fails_leaves_copies_slow_and_says_why(pin: Pin, caplog: pytest.LogCaptureFixture) -> None:
    fake, _, make = pin
    fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    pinned = make()
    assert not pinned.lock(0, 4)
    assert not pinned.complete
    assert not pinned.lock(4, ROWS), "no row may be locked where others are not"
    (record,) = caplog.records
    said = record.getMessage()
    assert "CUDA_ERROR_OUT_OF_MEMORY (2), for 0.0 GiB at 0.0 of 0.0 GiB" in said
    assert f"Linux {os.uname().release}), so that copies to and from the GPU will be slow" in said
    assert "a memory limit of this process that does not hold the whole cpu tier; a kernel, from 6.11 on" in said


def test_a_later_piece_that_fails_ends_the_rows_and_keeps_those_before(
    pin: Pin, caplog: pytest.LogCaptureFixture
) -> None:
    fake, _, make = pin
    pinned = make()
    assert pinned.lock(0, 4)
    fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    assert not pinned.lock(4, 8)
    assert pinned.complete, "of the rows that are used"
    assert fake.live()["registrations"] == 1
    assert "the cpu tier ends there, with 4 of 10 rows" in caplog.text
    pinned.release()


def test_of_rows_that_are_locked_at_once_all_are_or_none(pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, plan, make = pin
    monkeypatch.setattr(pinned_module, "PIECE_BYTES", 3 * plan.geometry.row_bytes)
    fake.fail("cuMemHostRegister_v2", OUT_OF_MEMORY, after=2)
    pinned = make()
    pinned.lock_first(ROWS)
    assert not pinned.complete
    assert fake.live()["registrations"] == 0


def test_rows_locked_by_others_count_and_are_not_unlocked(pin: Pin) -> None:
    fake, _, make = pin
    theirs, ours = make(), make()
    assert theirs.lock(0, ROWS)
    assert ours.lock(0, ROWS)
    assert ours.complete
    ours.release()
    assert fake.live()["registrations"] == 1
    theirs.release()


def test_partly_locked_rows_do_not_count(pin: Pin, caplog: pytest.LogCaptureFixture) -> None:
    """The driver reports "already registered" for a part too; a batch would refuse the rest, at every transfer."""
    fake, plan, make = pin
    row, device = plan.geometry.row_bytes, Device(fake.driver, 0)
    for first, nbytes in ((0, 4096), (2 * row, row), (0, ROWS * row - 4096)):
        with device.current() as driver:
            driver.register(plan.region_address + first, nbytes)
        pinned = make()
        assert not pinned.lock(0, ROWS)
        assert "cuMemHostRegister_v2 failed: unknown error (712)" in caplog.text
        assert fake.live()["registrations"] == 1
        with device.current() as driver:
            driver.unregister(plan.region_address + first)
    device.close()
