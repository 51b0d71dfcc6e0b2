"""The CUDA path's host side on a fake driver: real kernels, compiled for a CPU, on streams as late as CUDA allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.swap import kernels, stream
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.driver import CudaError
from nixl_tiers.swap.strategies import NAMES
from tests.swap.fake_gpu import FakeGpu, leftovers
from tests.swap.scenario import (
    LAYOUTS,
    CopyScenario,
    assert_same,
    layout_of,
    move_parts_of_chunks,
    random_scenario,
    scenario_of,
)

OUT_OF_MEMORY, LAUNCH_FAILED = 2, 719
OLD, NEW = 12060, 13000
STRATEGIES = NAMES


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("here", lambda: b"image\0")]))


@pytest.fixture
def machine(fake_library: Path, with_kernels: None) -> Iterator[Callable[..., FakeGpu]]:
    """Makes fakes; each must be left clean, unless the test took its GPU down."""
    made: list[tuple[FakeGpu, bool]] = []

    def make(seed: int = 0, version: int = NEW, *, survives: bool = True) -> FakeGpu:
        made.append((FakeGpu(fake_library, seed, version), survives))
        return made[-1][0]

    yield make
    for fake, survives in made:
        if survives:
            fake.check()
            assert list(leftovers(fake)) == []


def swap_of(fake: FakeGpu, scenario: CopyScenario, strategy: str, compute_stream: int = 0) -> CudaSwap:
    fake.own(scenario)
    names = (strategy,) * len(scenario.layers)
    return CudaSwap(scenario.plan, compute_stream=lambda: compute_stream, driver=fake.driver, strategies=names)


def use_slots_of(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SLOT_BYTES", nbytes)


def waiting(start: Callable[..., stream.Transfer]) -> Callable[..., None]:
    return lambda *how: start(*how).wait()


def move_all(scenario: CopyScenario, swap: CudaSwap, rng: np.random.Generator) -> None:
    """Stores and loads of every group, several in flight at once, and all of the memory compared."""
    for group in range(len(scenario.layers)):
        blocks, places = scenario.transfer(rng)
        half = len(blocks) // 2
        expected = scenario.store(group, blocks, places)
        parts = (slice(half), slice(half, None))
        started = [swap.store(group, blocks[part], places[part]) for part in parts]
        for transfer in reversed(started):
            transfer.wait()
            assert transfer.done()
            assert transfer.elapsed_s() >= 0
        assert_same(scenario.region, expected, "region")

        blocks, places = scenario.transfer(rng)
        expected_memory = scenario.load(group, blocks, places)
        swap.load(group, blocks, places).wait()
        for tensor, wanted in zip(scenario.memory, expected_memory, strict=True):
            assert_same(tensor, wanted, "engine memory")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(200, 212))
def test_every_strategy_copies_the_right_bytes(machine: Callable[..., FakeGpu], seed: int, strategy: str) -> None:
    """Any layout; a strategy that does not support one leaves it to the copy engine."""
    rng = np.random.default_rng(seed)
    scenario = random_scenario(rng)
    fake = machine(seed, OLD if seed % 4 == 0 else NEW)
    swap = swap_of(fake, scenario, strategy)
    assert swap.pinned
    move_all(scenario, swap, rng)
    swap.close()
    swap.close()
    assert not swap.pinned


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_engines(machine: Callable[..., FakeGpu], layout: str, strategy: str) -> None:
    """In chunks of any number of blocks: whole ones, and from the middle of one to the middle of another."""
    rng = np.random.default_rng(7)
    for sub_blocks in (1, 2, 5):
        scenario = layout_of(layout, rng, sub_blocks)
        fake = machine(3)
        swap = swap_of(fake, scenario, strategy)
        move_all(scenario, swap, rng)
        for group in range(len(scenario.layers)):
            move_parts_of_chunks(scenario, group, rng, waiting(swap.store), waiting(swap.load))
        launched = fake.calls("cuLaunchKernel")
        assert (launched > 0) == (strategy != "copy_engine")
        swap.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks_per_slot", [1, 3])
def test_slots_of_the_staging_buffer_are_not_overrun(
    machine: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch, seed: int, blocks_per_slot: int
) -> None:
    """Many turns of all slots, in one transfer and over several, none of which is waited for before the last."""
    rng = np.random.default_rng(seed)
    scenario = scenario_of(rng, [[2048] * 3], blocks=40, rows=12, sub_blocks=3, gap=16)
    use_slots_of(blocks_per_slot * scenario.geometry.sub_block_bytes, monkeypatch)
    swap = swap_of(machine(seed), scenario, "staged")
    for store in (True, False):
        blocks, places = scenario.transfer(rng, 36)
        expected = scenario.store(0, blocks, places)
        expected_memory = scenario.load(0, blocks, places)
        move = swap.store if store else swap.load
        transfers = [move(0, blocks[i : i + 9], places[i : i + 9]) for i in range(0, 36, 9)]
        for transfer in transfers:
            transfer.wait()
        if store:
            assert_same(scenario.region, expected, "region")
        else:
            for tensor, wanted in zip(scenario.memory, expected_memory, strict=True):
                assert_same(tensor, wanted, "engine memory")
    swap.close()


@pytest.mark.parametrize("seed", range(8))
def test_alternating_strategies_keep_their_order(machine: Callable[..., FakeGpu], seed: int) -> None:
    """Two stores to the same places by strategies on different CUDA streams: the later one is what stays."""
    rng = np.random.default_rng(seed)
    scenario = scenario_of(rng, [[2048] * 3], blocks=16, rows=4, sub_blocks=3)
    fake = machine(seed)
    swap = swap_of(fake, scenario, "staged")
    places = list(range(12))
    for _ in range(20):
        for strategy in ("staged", "copy_engine"):
            swap._strategies = (strategy,)
            blocks = rng.permutation(16)[:12].tolist()
            transfer = swap.store(0, blocks, places)
        expected = scenario.store(0, blocks, places)
        transfer.wait()
        fake.finish()  # what was late would come now
        assert_same(scenario.region, expected, "region")
    swap.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_step_thread_never_waits_for_a_full_queue(
    machine: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Behind a long kernel nothing is copied. The driver blocks whoever submits too much then, the fake as the real one
    (and it counts the main thread's waiting as a violation): submissions return all the same, and few are pending."""
    use_slots_of(1, monkeypatch)
    rng = np.random.default_rng(3)
    scenario = scenario_of(rng, [[256] * 100], blocks=64, rows=32, sub_blocks=2)
    fake = machine(3)
    swap = swap_of(fake, scenario, strategy)
    blocks, places = scenario.transfer(rng, 64)
    expected = scenario.store(0, blocks, places)
    fake.limit_queues(1000)
    fake.hold(0, held=True)
    fake.write(0, np.zeros(1, np.uint8), 1)
    transfers = [swap.store(0, blocks, places) for _ in range(4)]
    assert not any(transfer.done() for transfer in transfers)
    fake.hold(0, held=False)
    for transfer in transfers:
        transfer.wait()
    assert_same(scenario.region, expected, "region")
    assert fake.deepest_queue() < 1000
    swap.close()


def test_more_pairs_than_a_launch_holds(machine: Callable[..., FakeGpu]) -> None:
    rng = np.random.default_rng(5)
    scenario = scenario_of(rng, [[16]], blocks=4100, rows=32, sub_blocks=130)
    fake = machine(5)
    swap = swap_of(fake, scenario, "staged")
    blocks, places = scenario.transfer(rng, 4100)
    expected = scenario.store(0, blocks, places)
    swap.store(0, blocks, places).wait()
    assert_same(scenario.region, expected, "region")
    assert fake.calls("cuLaunchKernel") == 2
    swap.close()


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(3))
def test_transfers_run_after_the_compute_before_them(
    machine: Callable[..., FakeGpu], seed: int, strategy: str, own_stream: bool
) -> None:
    """A store takes what the step before it writes; a load leaves what the step before it reads until it was read; and
    a stream that is held finds what was loaded."""
    rng = np.random.default_rng(seed)
    scenario = scenario_of(rng, [[2048] * 2], blocks=12, rows=4, sub_blocks=3)
    fake = machine(seed)
    with stream.Device(fake.driver, 0).current() as driver:
        compute = driver.stream(urgent=False) if own_stream else 0
    swap = swap_of(fake, scenario, strategy, compute)
    for tensor in scenario.memory:
        fake.write(compute, tensor, 17 + seed)
    stored = swap.store(0, range(12), range(12))
    held = [np.zeros_like(tensor) for tensor in scenario.memory]
    stored.wait()
    for tensor in scenario.memory:
        assert (tensor == 17 + seed).all()
    assert_same(scenario.region, scenario.store(0, list(range(12)), list(range(12))), "region")

    read_before = [np.zeros_like(tensor) for tensor in scenario.memory]
    scenario.region[:] = 99
    for tensor, out in zip(scenario.memory, read_before, strict=True):
        fake.read(compute, tensor, out)
    loaded = swap.load(0, range(12), range(12))
    loaded.hold(compute)
    for tensor, out in zip(scenario.memory, held, strict=True):
        fake.read(compute, tensor, out)
    fake.finish()
    for out in read_before:
        assert (out == 17 + seed).all()
    for tensor, out in zip(scenario.memory, held, strict=True):
        assert_same(out, tensor, "what the held stream read")
        assert (out == 99).sum() == 12 * 2048
    assert loaded.done()
    swap.close()
    with stream.Device(fake.driver, 0).current() as driver:
        if own_stream:
            driver.destroy_stream(compute)
    fake.driver.release_context(0)
    fake.driver.release_context(0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuLaunchKernel", "cuEventRecord", "cuCtxPushCurrent_v2"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_transfer_that_cannot_start_leaves_nothing_in_flight(
    machine: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch, strategy: str, call: str, after: int
) -> None:
    """Its rows are given to others at once: what was handed over before the failure must have ended."""
    use_slots_of(1, monkeypatch)
    rng = np.random.default_rng(after)
    scenario = scenario_of(rng, [[2048] * 3], blocks=12, rows=4, sub_blocks=3)
    fake = machine(after)
    swap = swap_of(fake, scenario, strategy)
    swap.store(0, [0], [0]).wait()  # strategies are created on first use
    fake.fail(call, OUT_OF_MEMORY, after)
    refused = pytest.raises(CudaError, match=rf"^{call} failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)$")
    with suppress(pytest.fail.Exception), refused:  # strategies that make the call less often succeed
        swap.store(0, range(12), range(12)).wait()
    before = scenario.region.copy()
    fake.finish()
    assert_same(scenario.region, before, "region after the failure")
    fake.fail(call, OUT_OF_MEMORY, 1 << 30)
    move_all(scenario, swap, rng)
    swap.close()


def test_a_gpu_that_fails_while_copying_is_noticed(machine: Callable[..., FakeGpu]) -> None:
    scenario = scenario_of(np.random.default_rng(1), [[2048] * 3], blocks=12, rows=4, sub_blocks=3)
    fake = machine(1, survives=False)
    swap = swap_of(fake, scenario, "staged")
    fake.fail_running(2)
    with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
        swap.store(0, range(12), range(12)).wait()
    with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
        swap.load(0, range(12), range(12))
    swap.close()
    swap.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_transfer_outlives_its_swap(machine: Callable[..., FakeGpu], strategy: str) -> None:
    """Its events are destroyed by then, and so is what submitted it: neither is touched."""
    scenario = scenario_of(np.random.default_rng(1), [[2048] * 3], blocks=12, rows=4, sub_blocks=3)
    swap = swap_of(machine(1), scenario, strategy)
    transfers = [swap.store(0, range(12), range(12)) for _ in range(3)]
    swap.close()
    for transfer in transfers:
        transfer.wait()
        assert transfer.done()
        assert transfer.elapsed_s() == 0.0
        transfer.hold(0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_driver_that_shut_down_first_does_not_block_close(machine: Callable[..., FakeGpu], strategy: str) -> None:
    """As at the process's end, when libraries leave in an order of their own."""
    scenario = scenario_of(np.random.default_rng(1), [[2048] * 3], blocks=12, rows=4, sub_blocks=3)
    fake = machine(1, survives=False)
    swap = swap_of(fake, scenario, strategy)
    swap.store(0, range(12), range(12)).wait()
    fake.leave()
    swap.close()
    assert not swap.pinned


@pytest.mark.parametrize("call", [
    "cuMemHostRegister_v2", "cuMemAlloc_v2", "cuMemcpyHtoD_v2", "cuStreamCreateWithPriority", "cuEventCreate",
    "cuModuleGetFunction", "cuCtxGetStreamPriorityRange", "cuCtxPushCurrent_v2",
])  # fmt: skip
@pytest.mark.parametrize("after", range(4))
def test_a_failed_start_releases_everything(machine: Callable[..., FakeGpu], call: str, after: int) -> None:
    fake = machine()
    scenario = scenario_of(np.random.default_rng(1), [[2048] * 3], blocks=12, rows=4, sub_blocks=3, gap=16)
    fake.fail(call, OUT_OF_MEMORY, after)
    with suppress(CudaError):  # what is made later, or not at all, does not stop the start
        swap = swap_of(fake, scenario, "staged")
        fake.fail(call, OUT_OF_MEMORY, 1 << 30)
        move_all(scenario, swap, np.random.default_rng(2))
        swap.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_kernels_the_copy_engine_copies_everything(
    machine: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strategy: str
) -> None:
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("a file", lambda: b"nonsense")]))
    rng = np.random.default_rng(1)
    scenario = scenario_of(rng, [[2048] * 3], blocks=12, rows=4, sub_blocks=3)
    fake = machine()
    swap = swap_of(fake, scenario, strategy)
    assert "no swap kernels, the copy engine copies everything (a file: cuModuleLoadData failed" in caplog.text
    move_all(scenario, swap, rng)
    assert fake.calls("cuLaunchKernel") == 0
    swap.close()
