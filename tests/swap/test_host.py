from __future__ import annotations

import ctypes

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.swap import host
from nixl_tiers.swap.host import HostSwap
from nixl_tiers.swap.plan import CopyPlan, Gap, GroupPlan, Segment, Share
from nixl_tiers.swap.submit import first_parts, parts_of
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


@pytest.mark.parametrize("seed", range(12))
def test_any_geometry(kernel: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_both_ways(random_scenario(rng), rng)


ODD = {
    "large and small layers": {"page_bytes": [[65536, 512, 65536, 512, 300000]]},
    "a group of which nothing lives on this rank": {"page_bytes": [[512], []]},
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


def test_a_transfer_large_enough_to_stream(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_library", lambda: library)
    rng = np.random.default_rng(2)
    scenario = scenario_of(rng, [[16384] * 10, [512] * 70], blocks=64, rows=16, sub_blocks=4, gap=64)
    assert scenario.plan.groups[0].block_bytes * 64 > 4 << 20
    blocks, places = scenario.transfer(rng, 64)
    for group in (0, 1):
        expected = scenario.store(group, blocks, places)
        HostSwap(scenario.plan).store(group, blocks, places)
        assert_same(scenario.region, expected, "region")
        rng.shuffle(blocks)
        expected_memory = scenario.load(group, blocks, places)
        HostSwap(scenario.plan).load(group, blocks, places)
        for tensor, wanted in zip(scenario.memory, expected_memory, strict=True):
            assert_same(tensor, wanted, "engine memory")


@pytest.mark.parametrize(
    ("group", "blocks", "places", "message"),
    [
        (0, [0, 12], [0, 1], "block 12 is out of range: there are 12"),
        (0, [0, -1], [0, 1], "block -1 is out of range"),
        (0, [0, 1 << 40], [0, 1], "block 1099511627776 is out of range"),
        (0, [0, 1], [0, 20], "place 20 is out of range: there are 20"),
        (0, [0, 1], [-1, 0], "place -1 is out of range"),
        (0, [0, 1], [0], "2 blocks do not pair with 1 places"),
        (0, [0.0], [0], "blocks must be a flat array of integers"),
        (1, [0], [0], "group 1 is not one of the plan's 1"),
        (-1, [0], [0], "group -1 is not one of the plan's 1"),
    ],
)
def test_out_of_range_raises_before_a_byte_moves(
    kernel: str, group: int, blocks: list[int], places: list[int], message: str
) -> None:
    rng = np.random.default_rng(5)
    scenario = scenario_of(rng, [[512] * 3], blocks=12, rows=5, sub_blocks=4)
    region, memory = scenario.region.copy(), [tensor.copy() for tensor in scenario.memory]
    swap = HostSwap(scenario.plan)
    for call in (swap.store, swap.load):
        with pytest.raises(ValueError, match=message):
            call(group, blocks, places)
    assert_same(scenario.region, region, "region")
    for tensor, before in zip(scenario.memory, memory, strict=True):
        assert_same(tensor, before, "engine memory")


GEOMETRY = Geometry(cells=2, cell_payload=4 * 3000, sub_blocks=4)


def plan_of(*segments: Segment, rows: int = 8) -> CopyPlan:
    return CopyPlan([segments], GEOMETRY, Share(1), 1 << 20, rows)


def test_offsets_do_not_overflow_32_bits() -> None:
    geometry = Geometry(cells=1, cell_payload=1 << 20, sub_blocks=16)
    plan = CopyPlan([[]], geometry, Share(0), 0, 1 << 28)
    offset = plan.place_offsets(np.array([(1 << 32) - 1], dtype=np.uint32))
    assert offset.tolist() == [((1 << 28) - 1) * geometry.row_bytes + 15 * (1 << 16)]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 3000, 2000, 0), Segment(0, 3000, 1001, 1999)], "segment at offset 1999: it overlaps"),
        ([Segment(0, 3000, 2000, 1001)], "ends at 3001, beyond the sub-block of 3000"),
        ([Segment(0, 3000, 2000, -1)], "offset -1"),
        ([Segment(0, 3000, 0, 0)], "0 bytes"),
        ([Segment(0, 1999, 2000, 0)], "overlap at a stride of 1999"),
        ([Segment(0, 3000, 3000, 0, 0)], "it has 0 blocks"),
    ],
)
def test_impossible_segments_are_refused(segments: list[Segment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*segments)


def test_impossible_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="cell 2 is not one of the row's 2"):
        CopyPlan([], GEOMETRY, Share(2), 0, 1)
    with pytest.raises(ValueError, match="0 rows"):
        CopyPlan([], GEOMETRY, Share(0), 0, 0)
    with pytest.raises(ValueError, match="not between 1 and 4294967296 places"):
        CopyPlan([], GEOMETRY, Share(0), 0, (1 << 30) + 1)


def test_the_block_limit_is_the_smallest_of_a_group() -> None:
    plan = plan_of(Segment(0, 1000, 1000, 0, 9), Segment(9000, 1000, 1000, 1000, 7), Segment(0, 1000, 1000, 2000))
    assert plan.pairs(0, [6], [0]).tolist() == [[6, 0]]
    with pytest.raises(ValueError, match="block 7 is out of range: there are 7"):
        plan.pairs(0, [0, 7], [0, 1])


def test_what_no_segment_covers_is_copied_from_nowhere() -> None:
    """A tile that begins in a gap is zeroed by the kernel, which has no address to read there."""
    segments = Segment(4096, 2048, 1024, 512), Segment(8192, 2048, 512, 2048)
    group = GroupPlan(segments, (Gap(0, 512), Gap(1536, 512)), 4)
    parts = parts_of(group)
    assert parts.tolist() == [[0, 0, 512, 0], [4096, 2048, 1024, 512], [0, 0, 512, 1536], [8192, 2048, 512, 2048]]
    assert first_parts(parts).tolist() == [0, 3]
