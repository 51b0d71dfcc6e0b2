"""The torch path: its index arithmetic on CPU tensors everywhere, the whole of it where there is a GPU."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nixl_tiers.chunk import Geometry  # noqa: E402
from nixl_tiers.swap.cuda import CudaSwap, PinnedRegion, StagedCopy, runs  # noqa: E402
from nixl_tiers.swap.plan import CopyPlan, Segment  # noqa: E402
from tests.swap.world import World, assert_same, random_world, world_of  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("staging_bytes", [1, 20_000, 16 << 20], ids=["one block", "a few blocks", "all blocks"])
@pytest.mark.parametrize("seed", range(200, 215))
def test_staged_copies_move_the_right_bytes(seed: int, staging_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(rng)
    copy = StagedCopy(world.plan, CPU, staging_bytes)
    for group in range(len(world.layers)):
        blocks, places = world.transfer(rng)
        expected = world.store(group, blocks, places)
        copy.store(group, world.plan.pairs(group, blocks, places))
        assert_same(world.region, expected, "region")

        blocks, places = world.transfer(rng)
        expected_memory = world.load(group, blocks, places)
        copy.load(group, world.plan.pairs(group, blocks, places))
        for tensor, wanted in zip(world.memory, expected_memory, strict=True):
            assert_same(tensor, wanted, "engine memory")


def test_runs_are_as_long_as_places_stand_side_by_side() -> None:
    offsets = np.array([0, 10, 20, 40, 30, 40, 50, 0])
    assert list(runs(offsets, 10)) == [(0, 3, 0), (3, 4, 40), (4, 7, 30), (7, 8, 0)]
    assert list(runs(np.array([7]), 10)) == [(0, 1, 7)]


def test_whole_chunks_are_one_copy_each() -> None:
    world = world_of(np.random.default_rng(1), [[4096] * 2], blocks=8, rows=3, sub_blocks=4)
    offsets = world.plan.place_offsets(world.plan.places([2, 0], 1, 7))
    assert [last - first for first, last, _ in runs(offsets, world.geometry.sub_block_bytes)] == [3, 4]


def test_a_tensor_needs_to_know_how_many_blocks_there_are() -> None:
    plan = CopyPlan([[Segment(4096, 64, 64, 0)]], Geometry(1, 64), 0, 1 << 20, 1)
    with pytest.raises(ValueError, match="segment at offset 0 does not say how many blocks"):
        StagedCopy(plan, CPU)


@pytest.mark.parametrize(
    ("segment", "sub_block", "dtype"),
    [
        (Segment(1 << 20, 64, 64, 0, 2), 64, torch.int64),
        (Segment((1 << 20) + 4, 64, 64, 0, 2), 64, torch.int32),
        (Segment(1 << 20, 66, 64, 0, 2), 64, torch.int16),
        (Segment(1 << 20, 64, 62, 0, 2), 64, torch.int16),
        (Segment(1 << 20, 64, 56, 4, 2), 64, torch.int32),
        (Segment(1 << 20, 64, 56, 0, 2), 57, torch.uint8),
    ],
)
def test_no_element_is_wider_than_its_alignment(segment: Segment, sub_block: int, dtype: torch.dtype) -> None:
    """A GPU faults where a CPU only takes longer."""
    plan = CopyPlan([[segment]], Geometry(1, sub_block), 0, 1 << 20, 1)
    ((views,),) = StagedCopy(plan, CPU)._views
    assert [view.dtype for view in views] == [dtype, dtype]


class FakeDriver:
    """cuMemHostRegister that fails from the call given on."""

    def __init__(self, fails_at: int = 1 << 30, error: int = 2) -> None:
        self.registered: dict[int, int] = {}
        self.calls, self.fails_at, self.error = 0, fails_at, error

    def cuMemHostRegister_v2(  # noqa: N802
        self, address: ctypes.c_void_p, size: ctypes.c_size_t, flags: ctypes.c_uint
    ) -> int:
        self.calls += 1
        if self.calls > self.fails_at:
            return self.error
        self.registered[address.value or 0] = size.value
        return 0

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        del self.registered[address.value or 0]
        return 0


def pinned_plan() -> CopyPlan:
    return CopyPlan([[]], Geometry(1, 3 * 4096), 0, 1 << 30, 10)


def test_pinning_covers_the_region_in_chunks_of_whole_rows() -> None:
    plan, driver = pinned_plan(), FakeDriver()
    row = plan.geometry.row_bytes
    pinned = PinnedRegion(plan, driver, chunk_bytes=4 * row - 1)
    assert pinned.complete
    assert driver.registered == {(1 << 30) + i * row: min(3, 10 - i) * row for i in (0, 3, 6, 9)}
    pinned.release()
    pinned.release()
    assert driver.registered == {}
    assert PinnedRegion(plan, driver, chunk_bytes=1).complete  # a chunk is never less than a row
    assert len(driver.registered) == 10


def test_pinning_that_fails_half_way_is_rolled_back_and_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    plan, driver = pinned_plan(), FakeDriver(fails_at=2)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedRegion(plan, driver, chunk_bytes=3 * plan.geometry.row_bytes)
    assert not pinned.complete
    assert driver.registered == {}
    assert len(caplog.records) == 1
    assert "CUDA error 2" in caplog.text
    assert "ulimit -l" in caplog.text


def test_rows_that_are_pinned_already_are_left_to_who_pinned_them() -> None:
    driver = FakeDriver(fails_at=0, error=712)
    pinned = PinnedRegion(pinned_plan(), driver)
    assert pinned.complete
    pinned.release()
    assert driver.calls == 1


class GpuWorld:
    """A world whose engine memory is mirrored by GPU tensors, and whose region is page-aligned shared memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tensors = [torch.from_numpy(tensor).cuda() for tensor in world.memory]
        self.mapping = mmap.mmap(-1, world.region.size)
        self.region = np.frombuffer(self.mapping, dtype=np.uint8)
        self.region[:] = world.region
        segments = [
            [
                Segment(self.tensors[tensor].data_ptr() + first, stride, nbytes, offset, world.blocks)
                for tensor, first, stride, nbytes, offset in group
            ]
            for group in world.layers
        ]
        self.plan = CopyPlan(segments, world.geometry, world.cell, self.region.ctypes.data, world.rows)

    def store_and_check(self, swap: CudaSwap, group: int, blocks: list[int], places: list[int]) -> None:
        expected = self.world.store(group, blocks, places)
        swap.store(group, blocks, places).wait()
        assert_same(self.region, expected, "region")
        self.world.region[:] = expected

    def load_and_check(self, swap: CudaSwap, group: int, blocks: list[int], places: list[int]) -> None:
        expected = self.world.load(group, blocks, places)
        swap.load(group, blocks, places).wait()
        for tensor, wanted, ours in zip(self.tensors, expected, self.world.memory, strict=True):
            assert_same(tensor.cpu().numpy(), wanted, "engine memory")
            ours[:] = wanted


@pytest.fixture
def gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    yield
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("staging_bytes", [20_000, 16 << 20], ids=["a few blocks", "all blocks"])
@pytest.mark.parametrize("seed", range(300, 315))
def test_gpu_any_geometry(gpu: None, seed: int, staging_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    here = GpuWorld(random_world(rng))
    swap = CudaSwap(here.plan, "cuda", staging_bytes)
    assert swap.pinned
    for group in range(len(here.world.layers)):
        here.store_and_check(swap, group, *here.world.transfer(rng))
        here.load_and_check(swap, group, *here.world.transfer(rng))
    swap.close()
    swap.close()
    assert not swap.pinned


@pytest.mark.gpu
def test_gpu_transfers_wait_for_the_compute_before_them(gpu: None) -> None:
    """A store begins behind slow work on the caller's stream that writes the very blocks."""
    here = GpuWorld(world_of(np.random.default_rng(2), [[65536] * 4], blocks=64, rows=16, sub_blocks=4))
    swap = CudaSwap(here.plan)
    busy = torch.randn((4096, 4096), device="cuda")
    for turn in range(4):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        for tensor, ours in zip(here.tensors, here.world.memory, strict=True):
            tensor.fill_(turn + 1)
            ours[:] = turn + 1
        here.store_and_check(swap, 0, list(range(64)), list(range(64)))
    transfer = swap.load(0, [0], [0])
    transfer.wait()
    assert transfer.done()
    assert transfer.elapsed_s() > 0
    swap.close()


@pytest.mark.gpu
def test_gpu_out_of_range_raises_before_a_byte_moves(gpu: None) -> None:
    here = GpuWorld(world_of(np.random.default_rng(3), [[512] * 3], blocks=8, rows=2, sub_blocks=4))
    swap = CudaSwap(here.plan)
    before = here.region.copy()
    with pytest.raises(ValueError, match="block 8 is out of range"):
        swap.store(0, [0, 8], [0, 1])
    with pytest.raises(ValueError, match="place 8 is out of range"):
        swap.load(0, [0, 1], [0, 8])
    swap.close()
    assert_same(here.region, before, "region")
