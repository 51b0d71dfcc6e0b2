"""Random scenarios for swap tests: vLLM's memory, a region, a plan between them, and the oracle of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from tests.support.places import places_of

Bytes = NDArray[np.uint8]
GUARD = 192  # bytes of engine memory before the first and after the last page that no copy may touch


@dataclass
class CopyScenario:
    """`memory[i]` holds the pages of one tensor between two guards; `layers[g]` gives (tensor, first byte, stride,
    bytes, offset in the sub-block) for each segment of group g, in the oracle's own terms."""

    geometry: Geometry
    cell: int
    rows: int
    blocks: int
    memory: list[Bytes]
    region: Bytes
    layers: list[list[tuple[int, int, int, int, int]]]
    plan: CopyPlan

    def store(self, group: int, blocks: list[int], places: list[int]) -> Bytes:
        """What the region must hold after a store. The region itself is not changed."""
        expected = self.region.copy()
        for block, place in zip(blocks, places, strict=True):
            start = self._start(place)
            expected[start : start + self.geometry.sub_block_bytes] = 0
            for tensor, first, stride, nbytes, offset in self.layers[group]:
                page = self.memory[tensor][first + block * stride : first + block * stride + nbytes]
                expected[start + offset : start + offset + nbytes] = page
        return expected

    def load(self, group: int, blocks: list[int], places: list[int]) -> list[Bytes]:
        """What the engine's memory must hold after a load. The memory itself is not changed."""
        expected = [tensor.copy() for tensor in self.memory]
        for block, place in zip(blocks, places, strict=True):
            start = self._start(place)
            for tensor, first, stride, nbytes, offset in self.layers[group]:
                page = self.region[start + offset : start + offset + nbytes]
                expected[tensor][first + block * stride : first + block * stride + nbytes] = page
        return expected

    def _start(self, place: int) -> int:
        row, sub = divmod(place, self.geometry.sub_blocks)
        padded_cell = -(-self.geometry.cell_payload // 4096) * 4096
        sub_block = self.geometry.cell_payload // self.geometry.sub_blocks
        return row * self.geometry.row_bytes + self.cell * padded_cell + sub * sub_block

    def transfer(self, rng: np.random.Generator, n: int | None = None) -> tuple[list[int], list[int]]:
        """Random distinct blocks and places for one transfer."""
        most = min(self.blocks, self.rows * self.geometry.sub_blocks)
        n = int(rng.integers(1, most + 1)) if n is None else n
        blocks = rng.permutation(self.blocks)[:n]
        places = rng.permutation(self.rows * self.geometry.sub_blocks)[:n]
        return blocks.tolist(), places.tolist()


def scenario_of(
    rng: np.random.Generator,
    page_bytes: list[list[int]],
    *,
    blocks: int,
    rows: int,
    sub_blocks: int = 1,
    cells: int = 1,
    cell: int = 0,
    stride_padding: int = 0,
    gap: int = 0,
    shared: bool = False,
    together: bool = False,
    halves: bool = False,
    misaligned: bool = False,
) -> CopyScenario:
    """A scenario whose group g has one segment per entry of page_bytes[g], `gap` bytes before each in the sub-block.

    shared: all groups use the tensors of group 0, as far as those go (and page_bytes must agree).
    together: all layers of a block lie side by side in one tensor. halves: two segments share a tensor, the second's
    pages behind all of the first's. misaligned: tensors begin at odd addresses.
    """
    skew = int(rng.integers(1, 64)) if misaligned else 0
    sub_block = max(sum(pages) + gap * (len(pages) + 1) for pages in page_bytes)
    geometry = Geometry(cells=cells, cell_payload=sub_block * sub_blocks, sub_blocks=sub_blocks)
    memory: list[Bytes] = []
    layers: list[list[tuple[int, int, int, int, int]]] = []
    for index, pages in enumerate(page_bytes):
        layers.append([])
        offset = gap
        block_bytes = sum(pages) + stride_padding
        base = len(memory)
        if together:
            memory.append(_random(rng, 2 * GUARD + skew + blocks * block_bytes))
        for number, nbytes in enumerate(pages):
            if together:
                layers[-1].append((base, GUARD + skew + sum(pages[:number]), block_bytes, nbytes, offset))
            else:
                stride = nbytes + stride_padding
                if shared and index and number < len(page_bytes[0]):
                    assert nbytes == page_bytes[0][number]
                    tensor = number
                elif halves and number % 2:
                    tensor = len(memory) - 1
                else:
                    memory.append(_random(rng, 2 * GUARD + skew + (1 + halves) * blocks * stride))
                    tensor = len(memory) - 1
                first = GUARD + skew + (halves and number % 2) * blocks * stride
                layers[-1].append((tensor, first, stride, nbytes, offset))
            offset += nbytes + gap
    region = _random(rng, rows * geometry.row_bytes)
    segments = [
        [
            Segment(memory[tensor].ctypes.data + first, stride, nbytes, offset, blocks)
            for tensor, first, stride, nbytes, offset in group
        ]
        for group in layers
    ]
    for group in segments:
        rng.shuffle(group)
    plan = CopyPlan(
        [[Segment(*s) for s in group] for group in segments], geometry, Share(cell), region.ctypes.data, rows
    )
    return CopyScenario(geometry, cell, rows, blocks, memory, region, layers, plan)


LAYOUTS: dict[str, dict[str, Any]] = {
    "keys and values before blocks": {"page_bytes": [[2048] * 8], "halves": True},
    "blocks first": {"page_bytes": [[4096] * 4]},
    "blocks first, pages inside larger strides": {"page_bytes": [[4096] * 4], "stride_padding": 4096},
    "one latent page": {"page_bytes": [[1152 * 16] * 3]},
    "latent pages and an index": {"page_bytes": [[656 * 64, 132 * 64] * 2]},
    "layers of a block together": {"page_bytes": [[2048] * 6], "together": True},
    "groups over shared tensors": {"page_bytes": [[2048] * 4, [2048] * 4, [2048] * 3], "shared": True},
    "two ranks": {"page_bytes": [[2048] * 4], "cells": 2, "cell": 1},
    "pages across tiles": {"page_bytes": [[1040] * 5]},
    "gaps": {"page_bytes": [[2048] * 3], "gap": 48},
}  # as engines have them; every size is a multiple of 16


def layout_of(name: str, rng: np.random.Generator, sub_blocks: int) -> CopyScenario:
    """A scenario of one of LAYOUTS, in chunks of so many blocks."""
    return scenario_of(rng, blocks=30, rows=9, sub_blocks=sub_blocks, **LAYOUTS[name])


def move_parts_of_chunks(
    scenario: CopyScenario,
    group: int,
    rng: np.random.Generator,
    store: Callable[..., object],
    load: Callable[..., object],
) -> None:
    """A load from the middle of a chunk to the middle of another, and a store that leaves blocks out; checks all bytes.

    `store`, `load`: take (group, blocks, places) and return when the bytes have arrived.
    """
    sub_blocks = scenario.geometry.sub_blocks
    rows = rng.permutation(scenario.rows)[:3]
    first, count = sub_blocks // 2, 2 * sub_blocks
    places = places_of(scenario.plan, rows, first, count)
    assert sub_blocks == 1 or places[0] % sub_blocks
    blocks = rng.permutation(scenario.blocks)[:count]
    expected, before = scenario.load(group, blocks.tolist(), places.tolist()), scenario.region.copy()
    load(group, blocks, places)
    for tensor, wanted in zip(scenario.memory, expected, strict=True):
        assert_same(tensor, wanted, "engine memory after a load of parts of chunks")
    assert_same(scenario.region, before, "region, which a load only reads")
    present = np.sort(rng.permutation(count)[: max(1, count // 2)])
    region = scenario.store(group, blocks[present].tolist(), places[present].tolist())
    store(group, blocks[present], places[present])
    assert_same(scenario.region, region, "region after a store with absent blocks")


def random_scenario(rng: np.random.Generator) -> CopyScenario:
    """Any layout that an engine may have, in sizes that are awkward on purpose."""
    sizes = [1, 8, 63, 64, 255, 256, 320, 512, 513, 768, 1000, 1024, 4096, 4097, 9000, 33000]
    together = bool(rng.integers(2))
    shared = not together and bool(rng.integers(2))
    layers = int(rng.integers(1, 12))
    if shared:
        nbytes = int(rng.choice(sizes))
        pages = [[nbytes] * layers, [nbytes] * int(rng.integers(1, layers + 1))]
    else:
        groups = int(rng.integers(1, 4))
        uniform = bool(rng.integers(2))
        pages = [
            [int(rng.choice(sizes))] * layers if uniform else rng.choice(sizes, layers).tolist() for _ in range(groups)
        ]
    cells = int(rng.integers(1, 4))
    return scenario_of(
        rng,
        pages,
        blocks=int(rng.integers(1, 12)),
        rows=int(rng.integers(1, 6)),
        sub_blocks=int(rng.integers(1, 5)),
        cells=cells,
        cell=int(rng.integers(cells)),
        stride_padding=int(rng.choice([0, 0, 8, 100])),
        gap=int(rng.choice([0, 0, 8, 37])),
        shared=shared,
        together=together,
        misaligned=bool(rng.integers(2)),
    )


def _random(rng: np.random.Generator, nbytes: int) -> Bytes:
    """Random bytes that begin on a page: copies differ where both sides are aligned."""
    room = rng.integers(0, 256, nbytes + 4096, dtype=np.uint8)
    start = -room.ctypes.data % 4096
    return room[start : start + nbytes]


def assert_same(actual: Bytes, expected: Bytes, what: str) -> None:
    """Fails with the first byte that differs: arrays of a megabyte make poor messages."""
    wrong = np.flatnonzero(actual != expected)
    assert not wrong.size, f"{what}: {wrong.size} bytes differ, the first at {wrong[0]} of {expected.size}"
