"""Where the parts of the host region lie, and what its header says.

A header page (identity, sizes, what pages there are, the times of the last steps), one fingerprint record per cell, one
for all ranks and one for the revision, one control word per (row, cell), and from a 2 MiB boundary on the rows.
"""

from __future__ import annotations

import os
import struct
from typing import Final

from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import PAGE, Geometry, align
from nixl_tiers.memory.huge_pages import HUGE_PAGE_BYTES, is_hugetlb
from nixl_tiers.memory.memfd import CHECK, header_of

_MAGIC: Final = b"nixlregn"
_VERSION: Final = 1
# magic, version, cells, cell_payload, sub_blocks, rows, whether transparent huge pages are wanted, identity
HEADER: Final = struct.Struct("<8sQQQQQ?16s")
# Of the header page:
STEPS_AT: Final = 1024  # the times of the last steps
HELD_UNTIL_AT: Final = PAGE - 24  # until when movers start no stores, a float64
HUGE_BYTES_AT: Final = PAGE - 16  # how many bytes lie in huge pages
RECORD_BYTES: Final = 512  # of one fingerprint (rank_records.py)


class RegionError(RuntimeError):
    """The host region cannot be created or attached as asked. One sentence that says why."""


class Layout:
    """Where the parts are, in bytes from the start: a function of geometry and rows, so that it can be checked."""

    def __init__(self, geometry: Geometry, rows: int, *, hugetlb: bool) -> None:
        self.records = PAGE
        self.control = self.records + align((geometry.cells + 2) * RECORD_BYTES)
        self.rows = align(self.control + rows * geometry.cells * 8, HUGE_PAGE_BYTES)
        end = self.rows + rows * geometry.row_bytes
        self.total = align(end, HUGE_PAGE_BYTES) if hugetlb else end


def header(geometry: Geometry, rows: int, identity: bytes, *, transparent: bool) -> bytes:
    """The header page's beginning, with its check word."""
    sizes = (geometry.cells, geometry.cell_payload, geometry.sub_blocks, rows)
    packed = HEADER.pack(_MAGIC, _VERSION, *sizes, transparent, identity)
    return packed + CHECK.pack(xxh3_64_intdigest(packed))


def checked(fd: int) -> tuple[Geometry, int, bool, bytes]:
    """Geometry, rows, whether it asks for transparent huge pages, and identity of the region behind `fd`. RegionError
    names what is wrong with it."""
    try:
        fields = header_of(fd, HEADER, _MAGIC, _VERSION, "region")
        _, _, cells, cell_payload, sub_blocks, rows, transparent, identity = fields
    except ValueError as error:
        raise RegionError(str(error)) from error
    try:
        geometry = Geometry(cells, cell_payload, sub_blocks)
    except ValueError as error:
        raise RegionError(f"the region behind descriptor {fd} has an impossible geometry: {error}") from error
    size = os.fstat(fd).st_size
    expected = Layout(geometry, rows, hugetlb=is_hugetlb(fd)).total
    if rows < 1 or size != expected:
        raise RegionError(f"the region behind descriptor {fd} has {size} bytes where its header needs {expected}")
    return geometry, rows, transparent, identity
