"""Where every byte of a transfer is: vLLM's pages on one side, one cell of the region's rows on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nixl_tiers.base.chunk import Geometry

MAX_IDS: Final = 1 << 32  # blocks and places travel as 32-bit numbers


class Segment(NamedTuple):
    """One layer's page of a group, in bytes: block b is at `address + b * block_stride` in vLLM's memory and
    at `offset` inside a sub-block of the cell. A layer whose keys and values lie apart takes two segments."""

    address: int
    block_stride: int
    nbytes: int
    offset: int
    blocks: int | None = None  # how many blocks there are; None: unknown, and not checked


class Gap(NamedTuple):
    """Bytes of a sub-block that no segment of a group covers; a store zeroes them."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class GroupPlan:
    """One KV group: its segments by offset (neighbours on both sides merged), its gaps, how many blocks it has."""

    segments: tuple[Segment, ...]
    gaps: tuple[Gap, ...]
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Bytes that one block moves."""
        return sum(segment.nbytes for segment in self.segments)

    def segment_table(self) -> NDArray[np.uint64]:
        """(n, 4) swap_segment of swap.h."""
        return np.array([segment[:4] for segment in self.segments], np.uint64).reshape(-1, 4)

    def gap_table(self) -> NDArray[np.uint64]:
        """(n, 2) swap_gap of swap.h."""
        return np.array(self.gaps, np.uint64).reshape(-1, 2)


class Share(NamedTuple):
    """What one rank moves: it loads cell `cell` of every row, and writes it in those whose number is `turn` modulo
    `turns`. Ranks that hold the same bytes (replicated KV heads, MLA's latents) share a cell: they write it in turns,
    so that it is stored once, and all load it, each over its own link."""

    cell: int
    turn: int = 0
    turns: int = 1

    @classmethod
    def of(cls, rank: int, copies: int) -> Share:
        """`copies`: how many consecutive ranks hold the same bytes."""
        return cls(rank // copies, rank % copies, copies)

    def writes(self, rows: NDArray[np.int64]) -> NDArray[np.bool_] | slice:
        """Which of them this rank writes, as an index."""
        return slice(None) if self.turns == 1 else rows % self.turns == self.turn


class CopyPlan:
    """Which bytes move between a rank's blocks and its cell of the region's rows.

    `segments` holds one sequence per KV group; `share` says which cell and whose turn it is; `region_address` is the
    address of row 0.
    Raises ValueError where segments overlap in the cell, stick out of a sub-block, or have impossible sizes.
    """

    def __init__(
        self,
        segments: Sequence[Sequence[Segment]],
        geometry: Geometry,
        share: Share,
        region_address: int,
        rows: int,
    ) -> None:
        if not 0 <= share.cell < geometry.cells:
            raise ValueError(f"cell {share.cell} is not one of the row's {geometry.cells}")
        if rows < 1 or rows * geometry.sub_blocks > MAX_IDS:
            raise ValueError(f"{rows} rows of {geometry.sub_blocks} blocks are not between 1 and {MAX_IDS} places")
        self.geometry = geometry
        self.share = share
        self.region_address = region_address
        self.rows = rows
        self.groups = tuple(_group(index, group, geometry.sub_block_bytes) for index, group in enumerate(segments))

    @property
    def cell_offset(self) -> int:
        """Where this rank's cell begins inside a row, in bytes."""
        return self.share.cell * self.geometry.cell_bytes

    @property
    def row_layout(self) -> tuple[int, int, int, int, int]:
        """The fields of swap_rows of swap.h."""
        geometry = self.geometry
        sub_block_bytes, sub_blocks = geometry.sub_block_bytes, geometry.sub_blocks
        return self.region_address, geometry.row_bytes, self.cell_offset, sub_block_bytes, sub_blocks

    def pairs(self, group: int, blocks: ArrayLike, places: ArrayLike) -> NDArray[np.uint32]:
        """(n, 2) checked pairs (block, place) of one transfer: what a copy is given besides the plan itself.

        Raises ValueError where a block or a place is out of range: nothing has moved by then.
        """
        if not 0 <= group < len(self.groups):
            raise ValueError(f"group {group} is not one of the plan's {len(self.groups)}")
        block_ids, place_ids = _integers(blocks, "blocks"), _integers(places, "places")
        if len(block_ids) != len(place_ids):
            raise ValueError(f"{len(block_ids)} blocks do not pair with {len(place_ids)} places")
        _check_range(block_ids, self.groups[group].blocks, "block")
        _check_range(place_ids, self.rows * self.geometry.sub_blocks, "place")
        pairs = np.empty((len(block_ids), 2), dtype=np.uint32)
        pairs[:, 0] = block_ids
        pairs[:, 1] = place_ids
        return pairs

    def place_offsets(self, places: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Byte offset of each place's sub-block from the region's row 0 (twin of swap_place_address in swap.h)."""
        row, sub = np.divmod(places.astype(np.int64), self.geometry.sub_blocks)
        offsets: NDArray[np.int64] = (
            row * self.geometry.row_bytes + self.cell_offset + sub * self.geometry.sub_block_bytes
        )
        return offsets


def _group(index: int, segments: Sequence[Segment], sub_block_bytes: int) -> GroupPlan:
    ordered = sorted(segments, key=lambda segment: segment.offset)
    merged: list[Segment] = []
    gaps: list[Gap] = []
    end = 0
    for segment in ordered:
        where = f"group {index}, segment at offset {segment.offset}"
        if segment.nbytes < 1 or segment.address < 0:
            raise ValueError(f"{where}: {segment.nbytes} bytes at address {segment.address} cannot be")
        if segment.block_stride < segment.nbytes:
            raise ValueError(f"{where}: blocks of {segment.nbytes} bytes overlap at a stride of {segment.block_stride}")
        if segment.blocks is not None and segment.blocks < 1:
            raise ValueError(f"{where}: it has {segment.blocks} blocks")
        if segment.offset < end:
            raise ValueError(f"{where}: it overlaps the one before it, which ends at {end}")
        if segment.offset > end:
            gaps.append(Gap(end, segment.offset - end))
        end = segment.offset + segment.nbytes
        if end > sub_block_bytes:
            raise ValueError(f"{where}: it ends at {end}, beyond the sub-block of {sub_block_bytes} bytes")
        if merged and _continues(merged[-1], segment):
            merged[-1] = merged[-1]._replace(nbytes=merged[-1].nbytes + segment.nbytes)
        else:
            merged.append(segment)
    if end < sub_block_bytes:
        gaps.append(Gap(end, sub_block_bytes - end))
    limits = [segment.blocks for segment in ordered if segment.blocks is not None]
    return GroupPlan(tuple(merged), tuple(gaps), min(limits, default=MAX_IDS))


def _continues(before: Segment, after: Segment) -> bool:
    """Whether two segments are one: adjacent in the cell and, for every block, in vLLM's memory."""
    return (
        after.offset == before.offset + before.nbytes
        and after.address == before.address + before.nbytes
        and after.block_stride == before.block_stride
        and after.blocks == before.blocks
        and after.block_stride >= before.nbytes + after.nbytes
    )


def _integers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{what} must be a flat array of integers, not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64, copy=False)


def _check_range(values: NDArray[np.int64], limit: int, what: str) -> None:
    if not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= limit:
        raise ValueError(f"{what} {low if low < 0 else high} is out of range: there are {limit}")


class Memory:
    """`shape` bytes at `address`, `strides` apart, for numpy (host memory) or torch (CUDA memory) to view uncopied."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], *, cuda: bool = False) -> None:
        interface: dict[str, Any] = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": "|u1",
            "version": 3,
        }
        if cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface
