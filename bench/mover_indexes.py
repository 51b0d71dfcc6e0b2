"""The books that a mover keeps of its rows, filled with keys of 36 bytes, as vLLM's: for `scale`.

Slabs keep their journal on the disk and share the rest with the engine: docs/internals/tier-index.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from nixl_tiers.base.chunk import Key
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.quota import DirQuota

ROW_BYTES, CAPACITY, NAMESPACE = 2 << 20, 1 << 60, "0" * 32


def keys(rows: int) -> Iterator[Key]:
    random = np.random.default_rng(0)
    for start in range(0, rows, 4096):
        raw = random.bytes(36 * min(4096, rows - start))
        yield from (raw[at : at + 36] for at in range(0, len(raw), 36))


def row_files(rows: int) -> object:
    """The quota, as a tier fills it while it stores; it also says which rows the core knows."""
    quota = DirQuota(CAPACITY, ROW_BYTES)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(ROW_BYTES)
        status = Path(file.name).stat()
    for number, key in enumerate(keys(rows)):
        quota.record(RowPath.of("0" * 32, key), status, 1_700_000_000 + number // 100, stored=True)
    return quota


INDEXES: dict[str, Callable[[int], object]] = {
    "row files": row_files,
}
