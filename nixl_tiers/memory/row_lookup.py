"""Many keys looked up in a row table by one call of a small C function, where that was built."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final

from nixl_tiers.base import native
from nixl_tiers.base.chunk import Key
from nixl_tiers.memory.row_table_format import Layout

ABI: Final = 1  # ROW_LOOKUP_ABI of csrc/row_lookup.c
PIECE: Final = 1024  # keys of one call
_Found = ctypes.c_bool * PIECE
_NUMBERS: Final = ("words", "buckets", "rows", "records", "row_bytes", "record_bytes", "seed")


class Table(ctypes.Structure):
    """As in csrc/row_lookup.c."""

    _fields_ = (("memory", ctypes.c_void_p), *((name, ctypes.c_uint64) for name in _NUMBERS))

    @classmethod
    def of(cls, address: int, layout: Layout, seed: int) -> Table:
        """The table at this address, which has to be there as long as this is used."""
        return cls(
            memory=address,
            words=layout.words,
            buckets=layout.buckets,
            rows=layout.rows,
            records=layout.records,
            row_bytes=layout.row_bytes,
            record_bytes=layout.record_bytes,
            seed=seed,
        )


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled function, or None where it was not built, is for another machine, or is older than this file."""
    return _open(native.location("nixl_tiers.memory._row_lookup"))


def _open(path: str | None) -> ctypes.CDLL | None:
    # It takes microseconds: a call that gave the interpreter's lock away might wait a thousand times as long for it.
    library = native.opened(path, "nixl_tiers_row_lookup_abi", ABI, keeps_lock=True)
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.nixl_tiers_row_lookup.argtypes = [ctypes.POINTER(Table), ctypes.c_char_p, size, size, pointer]
        library.nixl_tiers_row_lookup.restype = ctypes.c_int
    return library


def has_many(table: Table, keys: Sequence[Key]) -> list[bool] | None:
    """Of each key, whether it has a row; None where that has to be found out one by one."""
    library, count, length = _library(), len(keys), len(keys[0])
    if library is None or len(set(map(len, keys))) > 1:
        return None
    answers: list[bool] = []
    for start in range(0, count, PIECE):
        some, found = keys[start : start + PIECE], _Found()
        if not library.nixl_tiers_row_lookup(table, b"".join(some), len(some), length, found):
            return None
        answers += found[: len(some)]
    return answers
