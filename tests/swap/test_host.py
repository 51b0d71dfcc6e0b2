from __future__ import annotations

import ctypes

import numpy as np
import pytest

from nixl_tiers.swap import host
from nixl_tiers.swap.host import HostSwap
from tests.support.places import places_of
from tests.swap.scenario import (
    assert_same,
    scenario_of,
)


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


def test_partial_first_and_last_chunk(kernel: str) -> None:
    rng = np.random.default_rng(3)
    scenario = scenario_of(rng, [[640] * 3], blocks=32, rows=9, sub_blocks=4)
    blocks = rng.permutation(32)[:10].tolist()
    places = places_of(scenario.plan, np.array([8, 0, 3, 5]), first=3, count=10)
    expected = scenario.store(0, blocks, [35, 0, 1, 2, 3, 12, 13, 14, 15, 20])
    HostSwap(scenario.plan).store(0, blocks, places)
    assert_same(scenario.region, expected, "region")


def test_a_store_and_a_load_round_trip(kernel: str) -> None:
    rng = np.random.default_rng(4)
    scenario = scenario_of(rng, [[4096] * 6], blocks=24, rows=6, sub_blocks=4)
    swap, before = HostSwap(scenario.plan), [tensor.copy() for tensor in scenario.memory]
    blocks, places = scenario.transfer(rng, 24)
    swap.store(0, blocks, places)
    for tensor in scenario.memory:
        tensor[192:-192] = 0xEE
    swap.load(0, blocks, places)
    for tensor, wanted in zip(scenario.memory, before, strict=True):
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


def test_nothing_to_copy(kernel: str) -> None:
    rng = np.random.default_rng(6)
    scenario = scenario_of(rng, [[512], []], blocks=4, rows=2, sub_blocks=2)
    swap, region = HostSwap(scenario.plan), scenario.region.copy()
    swap.store(0, [], [])
    swap.load(0, np.array([], dtype=np.int64), np.array([], dtype=np.uint32))
    assert_same(scenario.region, region, "region")
    expected = scenario.store(1, [1], [2])  # a group without segments: nothing of it lives on this rank
    swap.load(1, [1], [2])
    swap.store(1, [1], [2])
    assert_same(scenario.region, expected, "region")
