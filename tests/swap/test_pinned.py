from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.pages import node_of, place
from nixl_tiers.swap.driver import Device
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan, Share
from tests.swap.fake_gpu import FakeGpu

ROWS = 10


@pytest.fixture
def pin(fake_library: Path) -> Iterator[tuple[FakeGpu, CopyPlan, Callable[..., PinnedRegion]]]:
    geometry = Geometry(1, 3 * 4096)
    memory = np.frombuffer(mmap.mmap(-1, ROWS * geometry.row_bytes), np.uint8)
    plan = CopyPlan([[]], geometry, Share(0), memory.ctypes.data, ROWS)
    fake = FakeGpu(fake_library)
    device = Device(fake.driver, 0)
    yield fake, plan, lambda **how: PinnedRegion(device, plan, **how)
    device.close()
    assert fake.live()["registrations"] == 0
    fake.check()


def test_the_region_is_pinned_in_chunks_of_whole_rows(
    pin: tuple[FakeGpu, CopyPlan, Callable[..., PinnedRegion]],
) -> None:
    fake, plan, make = pin
    pinned = make(chunk_bytes=4 * plan.geometry.row_bytes - 1)
    assert pinned.complete
    assert fake.live()["registrations"] == 4
    pinned.release()
    pinned.release()
    assert not pinned.complete
    pinned = make(chunk_bytes=1)  # never less than a row
    assert fake.live()["registrations"] == ROWS
    pinned.release()


def test_failed_pinning_is_rolled_back_with_advice(
    pin: tuple[FakeGpu, CopyPlan, Callable[..., PinnedRegion]], caplog: pytest.LogCaptureFixture
) -> None:
    fake, plan, make = pin
    fake.fail("cuMemHostRegister_v2", 2, after=2)
    with caplog.at_level(logging.WARNING):
        pinned = make(chunk_bytes=3 * plan.geometry.row_bytes)
    assert not pinned.complete
    assert fake.live()["registrations"] == 0
    assert len(caplog.records) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in caplog.text
    assert "the memory limit of this process must hold the whole cpu tier" in caplog.text


def test_rows_pinned_by_others_are_not_unpinned(
    pin: tuple[FakeGpu, CopyPlan, Callable[..., PinnedRegion]],
) -> None:
    fake, _, make = pin
    theirs = make()
    ours = make()
    assert ours.complete
    ours.release()
    assert fake.live()["registrations"] == 1
    theirs.release()


def test_partly_pinned_rows_do_not_count_as_pinned(
    pin: tuple[FakeGpu, CopyPlan, Callable[..., PinnedRegion]], caplog: pytest.LogCaptureFixture
) -> None:
    """The driver reports "already registered" for a part too; a batch would refuse the rest, at every transfer."""
    fake, plan, make = pin
    row, device = plan.geometry.row_bytes, Device(fake.driver, 0)
    for first, nbytes in ((0, 4096), (2 * row, row), (0, ROWS * row - 4096)):
        with device.current() as driver:
            driver.register(plan.region_address + first, nbytes)
        pinned = make(chunk_bytes=3 * row)
        assert not pinned.complete
        assert "cuMemHostRegister_v2 failed: unknown error (712)" in caplog.text
        assert fake.live()["registrations"] == 1
        with device.current() as driver:
            driver.unregister(plan.region_address + first)
    device.close()


def test_the_node_of_a_device_is_what_sysfs_says(tmp_path: Path) -> None:
    for name, text in (("0000:1b:00.0", "1\n"), ("0000:1c:00.0", "-1\n"), ("0000:1d:00.0", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    names = ("0000:1b:00.0", "0000:1c:00.0", "0000:1d:00.0", "0000:1e:00.0")
    assert [node_of(name, tmp_path) for name in names] == [1, None, None, None]


def test_numa_placement_changes_no_byte_and_may_be_refused() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    memory[:] = 7
    place(memory.ctypes.data, memory.size, {0})
    assert (memory == 7).all()
    assert not place(memory.ctypes.data + 1, memory.size, {0})
    assert not place(memory.ctypes.data, memory.size, {0, 5000})
    assert not place(memory.ctypes.data, memory.size, set())


GET_MEMPOLICY = 239
MPOL_F_ADDR = 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
@pytest.mark.parametrize(("nodes", "mode"), [({0}, 1), ({0, 1}, 3)], ids=["preferred", "interleaved"])
def test_numa_placement_of_shared_memory_holds_for_all_processes(nodes: set[int], mode: int) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 20)
    ours, theirs = (np.frombuffer(mmap.mmap(fd, 1 << 20), np.uint8) for _ in range(2))
    os.close(fd)
    if not place(ours.ctypes.data, ours.size, nodes):
        pytest.skip("the kernel refuses: no NUMA, or a container without SYS_NICE")
    found, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    syscall = ctypes.CDLL(None).syscall
    arguments = (ctypes.byref(found), mask, ctypes.c_ulong(1024), ctypes.c_void_p(theirs.ctypes.data))
    assert syscall(ctypes.c_long(GET_MEMPOLICY), *arguments, ctypes.c_ulong(MPOL_F_ADDR)) == 0
    assert found.value == mode
    assert mask[0] & 1, "a node that the machine lacks is left out"
