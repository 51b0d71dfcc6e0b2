from __future__ import annotations

import threading

import numpy as np
import pytest

from nixl_tiers.swap.host import HostSwap
from tests.swap.scenario import (
    LAYOUTS,
    CopyScenario,
    assert_same,
    layout_of,
    move_parts_of_chunks,
    random_scenario,
    scenario_of,
)


def check_both_ways(scenario: CopyScenario, rng: np.random.Generator) -> None:
    """A store and a load of every group against the oracle, everything around them poisoned with random bytes."""
    swap = HostSwap(scenario.plan)
    for group in range(len(scenario.layers)):
        blocks, places = scenario.transfer(rng)
        expected_region, memory_before = scenario.store(group, blocks, places), [m.copy() for m in scenario.memory]
        swap.store(group, np.array(blocks), np.array(places, dtype=np.uint32))
        assert_same(scenario.region, expected_region, f"region after a store of group {group}")
        for tensor, before in zip(scenario.memory, memory_before, strict=True):
            assert_same(tensor, before, "engine memory, which a store only reads")

        blocks, places = scenario.transfer(rng)
        expected_memory, region_before = scenario.load(group, blocks, places), scenario.region.copy()
        swap.load(group, np.array(blocks, dtype=np.int32), np.array(places, dtype=np.uint32))
        assert_same(scenario.region, region_before, "region, which a load only reads")
        for tensor, expected in zip(scenario.memory, expected_memory, strict=True):
            assert_same(tensor, expected, f"engine memory after a load of group {group}")


@pytest.mark.parametrize("seed", range(40))
def test_any_geometry(kernel: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_both_ways(random_scenario(rng), rng)


ODD = {
    "large and small layers": {"page_bytes": [[65536, 512, 65536, 512, 300000]]},
    "odd sizes at odd addresses": {"page_bytes": [[777] * 9], "misaligned": True, "gap": 5},
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *ODD])
def test_layouts_of_engines(kernel: str, layout: str) -> None:
    """In chunks of any number of blocks: whole ones, and from the middle of one to the middle of another."""
    rng = np.random.default_rng(1)
    for sub_blocks in (1, 3, 8):
        if layout in ODD:
            scenario = scenario_of(rng, blocks=16, rows=3, sub_blocks=sub_blocks, cells=2, cell=1, **ODD[layout])
        else:
            scenario = layout_of(layout, rng, sub_blocks)
        check_both_ways(scenario, rng)
        swap = HostSwap(scenario.plan)
        for group in range(len(scenario.layers)):
            move_parts_of_chunks(scenario, group, rng, swap.store, swap.load)


def test_several_threads_at_once(kernel: str) -> None:
    rng = np.random.default_rng(7)
    scenario = scenario_of(rng, [[8192] * 12], blocks=64, rows=32, sub_blocks=4)
    swap, threads, failures = HostSwap(scenario.plan), 4, []
    shares = [np.arange(64)[i::threads] for i in range(threads)]
    before = [tensor.copy() for tensor in scenario.memory]
    start = threading.Barrier(threads)

    def work(share: np.ndarray) -> None:
        try:
            start.wait()
            for turn in range(4):
                swap.store(0, share, share + 64 * (turn % 2))
                swap.load(0, share, share + 64 * (turn % 2))
        except (AssertionError, ValueError, threading.BrokenBarrierError) as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(share,)) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    everything = list(range(64))
    for tensor, wanted in zip(scenario.memory, before, strict=True):
        assert_same(tensor, wanted, "engine memory")
    expected = scenario.store(0, everything + everything, everything + [64 + block for block in everything])
    assert_same(scenario.region, expected, "region")
