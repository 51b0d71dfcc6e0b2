"""The seal: a checksum trailer at a row's end, which names the row's key and proves its bytes.

Format: docs/reference/formats.md. Nothing else is trusted about a row that is read back: a row with a wrong seal is a
miss, regardless of journal, index and listing.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from xxhash import xxh3_64_digest, xxh3_128_digest

from nixl_tiers.base import native
from nixl_tiers.base.chunk import MAX_KEY_BYTES, NAMESPACE_BYTES, Geometry, Key, check_key

if TYPE_CHECKING:
    from numpy.typing import NDArray


MAGIC: Final = b"nixltier"
VERSION: Final = 1
HASH_XXH3: Final = 1
KNOWN_FLAGS: Final = 0
PIECE_LOG2: Final = 16
DIGEST_BYTES: Final = 16

TAILS: Final = (4096, 64 << 10)
"""How many bytes at the end of a row to look for its seal in: nearly always the first, in any case the second."""

_HEAD: Final = struct.Struct("<8sHHIQQ16sQQIIBBHI")
_SEALED_AT: Final = struct.calcsize("<8sHHIQ")  # the head's field of that name
_KEY_AT: Final = _HEAD.size
_PRESENT_AT: Final = _KEY_AT + MAX_KEY_BYTES
_MAX_SEAL_BYTES: Final = 0xFFFF
# What a seal may contain. Other piece sizes make no sense, and a reader must not loop over pieces of one byte.
_PIECES_LOG2: Final = range(10, 41)


class Verdict(IntEnum):
    """The result of verifying a row. Anything but OK means: not the requested row, or corrupt."""

    OK = 0
    NOT_A_SEAL = 1  # nothing was sealed here, or the row was cut short
    VERSION = 2  # a format, flag or hash that this program does not know
    NAMESPACE = 3  # another model, layout, tenant or epoch
    KEY = 4  # another chunk
    SHAPE = 5  # another row geometry
    DIGEST = 6  # the bytes are not those that were sealed


@dataclass(frozen=True)
class SealHeader:
    """The content of an intact version-1 seal. Sizes in bytes, `sealed_at` in Unix seconds (0: not recorded)."""

    namespace: bytes
    epoch: int
    key: Key
    present: int  # bit b: sub-block b was written by vLLM; others are zero
    cells: int
    cell_payload: int
    sub_blocks: int
    flags: int
    sealed_at: int
    piece_bytes: int
    digests: tuple[bytes, ...]  # one a cell

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.cells, self.cell_payload, self.sub_blocks)


def cell_digest(payload: memoryview, piece_bytes: int = 1 << PIECE_LOG2) -> bytes:
    """16 bytes over one cell's payload: XXH3-128 of the XXH3-64 digests of its pieces, the last one perhaps short."""
    pieces = [xxh3_64_digest(payload[at : at + piece_bytes]) for at in range(0, len(payload), piece_bytes)]
    return xxh3_128_digest(b"".join(pieces))


def _digest(cell: NDArray[np.uint8], copy: NDArray[np.uint8] | None, piece_bytes: int) -> bytes:
    """The digest of a cell's payload, copied in the same pass if `copy` is given."""
    if copy is None:
        return cell_digest(cell.data, piece_bytes)
    return xxh3_128_digest(hash_copy(copy, cell, piece_bytes))


def read(raw: bytes | bytearray | memoryview | NDArray[np.uint8]) -> SealHeader | None:
    """The seal at the end of `raw`, which is a seal block, a row, or any tail of a row that holds its seal.

    None unless the seal is whole and of a format that this program knows. Says nothing about the row's payload.
    """
    data = bytes(raw)
    at = data.rfind(MAGIC)
    while at >= 0:
        header = _parse(data[at:])
        if header is not None:
            return header
        at = data.rfind(MAGIC, 0, at + len(MAGIC) - 1)
    return None


def find(row: NDArray[np.uint8]) -> SealHeader | None:
    """`read` of a row, or any tail of it."""
    return next((found for tail in TAILS if (found := read(row[-tail:])) is not None), None)


def _parse(seal: bytes) -> SealHeader | None:
    if len(seal) < _HEAD.size:
        return None
    (magic, version, seal_bytes, flags, epoch, sealed_at, namespace, payload_bytes, cell_payload, cells, sub_blocks,
     piece_log2, hash_id, key_bytes, _) = _HEAD.unpack_from(seal)  # fmt: skip
    if (magic, version, hash_id) != (MAGIC, VERSION, HASH_XXH3) or flags & ~KNOWN_FLAGS:
        return None
    if seal_bytes != len(seal) or xxh3_128_digest(seal[:-DIGEST_BYTES]) != seal[-DIGEST_BYTES:]:
        return None
    try:
        geometry = Geometry(cells, cell_payload, sub_blocks)
    except ValueError:
        return None
    if geometry.seal_bytes != seal_bytes or geometry.payload_bytes != payload_bytes or piece_log2 not in _PIECES_LOG2:
        return None
    key = seal[_KEY_AT : _KEY_AT + key_bytes]
    digests_at = len(seal) - DIGEST_BYTES * (cells + 1)
    present = int.from_bytes(seal[_PRESENT_AT:digests_at], "little")
    if not 0 < key_bytes <= MAX_KEY_BYTES or any(seal[_KEY_AT + key_bytes : _PRESENT_AT]) or present >> sub_blocks:
        return None
    digests = tuple(seal[at : at + DIGEST_BYTES] for at in range(digests_at, len(seal) - DIGEST_BYTES, DIGEST_BYTES))
    return SealHeader(
        namespace, epoch, key, present, cells, cell_payload, sub_blocks, flags, sealed_at, 1 << piece_log2, digests
    )


class Sealer:
    """Seals and verifies rows of one geometry for one namespace and epoch. Holds no scratch: any thread may use it."""

    def __init__(self, geometry: Geometry, namespace: bytes, epoch: int) -> None:
        """Raise ValueError for a namespace that is not 16 bytes, an epoch beyond 64 bits, or too long a seal."""
        if len(namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, this one has {len(namespace)}")
        if not 0 <= epoch < 1 << 64:
            raise ValueError(f"epoch must be within 0 and 2**64 - 1, not {epoch}")
        if geometry.seal_bytes > _MAX_SEAL_BYTES:
            raise ValueError(
                f"a row of {geometry.cells} cells and {geometry.sub_blocks} sub-blocks needs a seal of "
                f"{geometry.seal_bytes} bytes; the format ends at {_MAX_SEAL_BYTES}"
            )
        self.geometry = geometry
        self.namespace = bytes(namespace)
        self.epoch = epoch
        self._seal_at = geometry.row_bytes - geometry.seal_bytes
        self._digests_at = geometry.seal_bytes - DIGEST_BYTES * (geometry.cells + 1)
        starts = [cell * geometry.cell_bytes for cell in range(geometry.cells)]
        self._cells = [(at, at + geometry.cell_payload) for at in starts]
        # All that is neither payload nor seal. The last gap ends where the seal starts, in the padding or in its page.
        ends = [end for _, end in self._cells]
        self._gaps = list(zip(ends, [*starts[1:], self._seal_at], strict=True))
        self._zeros = bytes(max(end - at for at, end in self._gaps))

    def seal(
        self,
        row: NDArray[np.uint8],
        key: Key,
        *,
        present: int | None = None,
        sealed_at: int = 0,
        copy: NDArray[np.uint8] | None = None,
    ) -> None:
        """Seal `row` (uint8, (row_bytes,), writable) in place as `key`; `copy`: an array like it that becomes the
        sealed row too, in the same pass.

        `present`: bit b means that vLLM wrote sub-block b; None means all. Sub-blocks that it did not write, and all
        padding, are zeroed in every cell: their old bytes belong to another request.
        `sealed_at`: Unix seconds. Raises ValueError for a wrong key, shape or bitmap.
        """
        geometry = self.geometry
        check_key(key)
        whole = (1 << geometry.sub_blocks) - 1
        if present is None:
            present = whole
        elif not 0 <= present <= whole:
            raise ValueError(f"present names sub-blocks beyond the {geometry.sub_blocks} of this row")
        if not 0 <= sealed_at < 1 << 64:
            raise ValueError(f"sealed_at must be within 0 and 2**64 - 1 seconds, not {sealed_at}")
        view = row.data
        if view.shape != (geometry.row_bytes,) or view.itemsize != 1:
            raise ValueError(f"a row is {geometry.row_bytes} bytes, not an array of shape {view.shape}")
        for start, end in self._gaps:
            view[start:end] = self._zeros[: end - start]
        size = geometry.sub_block_bytes
        for first, last in _runs(whole & ~present):
            for at, _ in self._cells:
                row[at + first * size : at + last * size] = 0
        head = _HEAD.pack(
            MAGIC, VERSION, geometry.seal_bytes, 0, self.epoch, sealed_at, self.namespace, geometry.payload_bytes,
            geometry.cell_payload, geometry.cells, geometry.sub_blocks, PIECE_LOG2, HASH_XXH3, len(key), 0,
        )  # fmt: skip
        bitmap = present.to_bytes(self._digests_at - _PRESENT_AT, "little")
        digests = (
            _digest(row[start:end], None if copy is None else copy[start:end], 1 << PIECE_LOG2)
            for start, end in self._cells
        )
        seal = b"".join((head, key.ljust(MAX_KEY_BYTES, b"\0"), bitmap, *digests))
        seal += xxh3_128_digest(seal)
        view[self._seal_at :] = seal
        if copy is not None:
            self._complete(copy, seal)

    def _complete(self, copy: NDArray[np.uint8], seal: bytes) -> None:
        """Write what is neither hashed nor copied with it: gaps and seal."""
        for start, end in self._gaps:
            copy[start:end] = 0
        copy[self._seal_at :].data[:] = seal

    def verify(self, row: NDArray[np.uint8], key: Key, copy: NDArray[np.uint8] | None = None) -> Verdict:
        """Whether `row` (uint8, contiguous) is `key`'s row of this geometry, namespace and epoch, every bit of it.

        `copy`: an array like it. If the verdict is OK it is the row from now on, and its bytes are those that were
        verified; else it may hold anything. Never raises, whatever the bytes are. Cheap checks come first: the payload
        is hashed only if all else agrees.
        """
        geometry = self.geometry
        view = row.data
        if view.shape != (geometry.row_bytes,) or view.itemsize != 1:
            return Verdict.SHAPE
        seal = bytes(view[self._seal_at :])
        (magic, version, seal_bytes, flags, epoch, _, namespace, payload_bytes, cell_payload, cells, sub_blocks,
         piece_log2, hash_id, key_bytes, _) = _HEAD.unpack_from(seal)  # fmt: skip
        if magic != MAGIC:
            return Verdict.NOT_A_SEAL
        if version != VERSION or flags & ~KNOWN_FLAGS or hash_id != HASH_XXH3 or piece_log2 not in _PIECES_LOG2:
            return Verdict.VERSION
        if xxh3_128_digest(seal[:-DIGEST_BYTES]) != seal[-DIGEST_BYTES:]:
            return Verdict.DIGEST
        if (seal_bytes, payload_bytes, cell_payload, cells, sub_blocks) != (
            geometry.seal_bytes, geometry.payload_bytes, geometry.cell_payload, geometry.cells, geometry.sub_blocks,
        ):  # fmt: skip
            return Verdict.SHAPE
        if namespace != self.namespace or epoch != self.epoch:
            return Verdict.NAMESPACE
        if key_bytes != len(key) or seal[_KEY_AT:_PRESENT_AT] != key.ljust(MAX_KEY_BYTES, b"\0"):
            return Verdict.KEY
        for start, end in self._gaps:
            if bytes(view[start:end]) != self._zeros[: end - start]:
                return Verdict.DIGEST
        piece_bytes = 1 << piece_log2
        at = self._digests_at
        for start, end in self._cells:
            part = None if copy is None else copy[start:end]
            if _digest(row[start:end], part, piece_bytes) != seal[at : at + DIGEST_BYTES]:
                return Verdict.DIGEST
            at += DIGEST_BYTES
        if copy is not None:
            self._complete(copy, seal)
        return Verdict.OK

    def sealed_at(self, row: NDArray[np.uint8]) -> int:
        """When `row` was sealed, if `verify` finds it to be OK: Unix seconds, 0 if that was not recorded."""
        return int.from_bytes(row.data[self._seal_at + _SEALED_AT : self._seal_at + _SEALED_AT + 8], "little")


def missing_of(row: NDArray[np.uint8], geometry: Geometry) -> int:
    """Of a row whose seal was verified: how many sub-blocks at its beginning must not be used, 0 for a whole row.

    All sub-blocks after them were written by vLLM.
    """
    start = geometry.row_bytes - geometry.seal_bytes + _PRESENT_AT
    end = geometry.row_bytes - DIGEST_BYTES * (geometry.cells + 1)
    present = int.from_bytes(row[start:end].tobytes(), "little")
    return (~present & geometry.present(0)).bit_length()


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of ones in `bits` as (first, one past the last)."""
    first = 0
    while bits >> first:
        first += ((bits >> first) & -(bits >> first)).bit_length() - 1
        last = first
        while bits >> last & 1:
            last += 1
        yield first, last
        first = last


@cache
def _library() -> ctypes.CDLL:
    return _open(native.HASH_COPY)


def _open(library: native.Library) -> ctypes.CDLL:
    found = native.opened(library)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    found.nixl_tiers_hash_copy.argtypes = [pointer, pointer, size, size, pointer]
    found.nixl_tiers_hash_copy.restype = size
    return found


def hash_copy(target: NDArray[np.uint8], source: NDArray[np.uint8], piece_bytes: int) -> bytes:
    """Copy `source` to `target` (contiguous, of one length, not overlapping) and return the XXH3-64 digests of its
    pieces, one after the other, each 8 bytes, big-endian; the last piece may be short.

    The digests are those of the copy, even if `source` is written to meanwhile.
    """
    nbytes = len(source)
    digests = np.empty(-(-nbytes // piece_bytes), np.uint64)
    done = _library().nixl_tiers_hash_copy(
        target.ctypes.data, source.ctypes.data, nbytes, piece_bytes, digests.ctypes.data
    )
    whole = -(-done // piece_bytes)
    rest = []
    for at in range(done, nbytes, piece_bytes):
        piece = slice(at, min(at + piece_bytes, nbytes))
        target[piece] = source[piece]
        rest.append(xxh3_64_digest(target[piece].data))
    return digests[:whole].tobytes() + b"".join(rest)
