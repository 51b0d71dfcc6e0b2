"""The cold index: what a storage tier held at start, built by a mover in a memfd and mapped by the scheduler's process.

A dict of four million rows costs seconds and a gigabyte of Python; this costs the scheduler one mmap. It can be that
small because it only ever shrinks: rows that are stored or used are in the core's own tier index, and here rows are
only found, removed, and evicted coldest first. So rows are packed, sorted by hash, with a list of where each bucket
starts instead of empty places, and a second list gives them in order of use: exact LRU, without links.
docs/internals/cold-index.md has the layout and the measurements.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from nixl_tiers.chunk import PAGE, Key, align
from nixl_tiers.memory.memfd import CHECK, SIZE_SEALS, header_of, memfd

if TYPE_CHECKING:
    from numpy.typing import NDArray

DIGEST_BYTES: Final = 16

_MAGIC: Final = b"nixlindx"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sQQQQQQ")  # magic, version, rows, log2 of buckets, slots, salt, bytes a key
_WORD: Final = (1 << 64) - 1
_REMOVED: Final = 0xFFFFFFFF  # the slot of a row that has been removed
_ROWS_A_BUCKET: Final = 4  # at most, on average
_REFILL: Final = 256


class ColdIndexError(RuntimeError):
    """The index cannot be built, or the descriptor holds none. One sentence that says why."""


def key_digest(key: Key) -> bytes:
    """The 16 bytes that stand for a key in an index: BLAKE2b, because keys may come from users.

    Two keys with one digest would cost a row (the seal refuses to load one as the other), and finding such a pair
    takes 2**64 tries. Unkeyed, so that a mover may keep digests beside its journal instead of hashing at each start.
    """
    return hashlib.blake2b(key, digest_size=DIGEST_BYTES).digest()


def key_digests(keys: Iterable[Key]) -> NDArray[np.uint8]:
    """uint8 (n, 16): the digests of `keys`, as ColdIndexBuilder.add_many takes them. About a microsecond each."""
    return np.frombuffer(b"".join(map(key_digest, keys)), np.uint8).reshape(-1, DIGEST_BYTES)


class _Layout:
    """Where the parts are, in bytes from the start: a function of the header, so that it can be checked."""

    def __init__(self, rows: int, bucket_bits: int, slots_limit: int, key_bytes: int) -> None:
        self.rows, self.bucket_bits, self.slots_limit, self.key_bytes = rows, bucket_bits, slots_limit, key_bytes
        self.digests = PAGE  # uint8 (rows, 16), in order of hash
        self.slots = self.digests + DIGEST_BYTES * rows  # uint32 (rows,)
        self.ticks = self.slots + 4 * rows  # uint32 (rows,)
        self.order = self.ticks + 4 * rows  # uint32 (rows,): which row is the coldest, the next, ...
        self.starts = self.order + 4 * rows  # uint32 (buckets + 1,): the first row of each bucket, then `rows`
        self.taken = self.starts + 4 * ((1 << bucket_bits) + 1)  # one bit a slot
        self.keys = self.taken + -(-slots_limit // 8)  # uint8 (rows, key_bytes): the length of a key, the key, padding
        self.total = align(self.keys + key_bytes * rows)


class ColdIndexBuilder:
    """Collects rows and builds an index of them. Of two rows with one key, or one slot, the later used one is kept."""

    def __init__(self) -> None:
        self._digests: list[NDArray[np.uint8]] = []
        self._slots: list[NDArray[np.uint32]] = []
        self._ticks: list[NDArray[np.uint32]] = []
        self.left_out: NDArray[np.intp] = np.empty(0, np.intp)
        """After build: rows (numbered as they were added) that are not in the index; the medium may delete them."""
        self.order: NDArray[np.uint32] = np.empty(0, np.uint32)
        """After build: uint32 (rows of the index,), the number of each as it was added."""

    def add_many(self, digests: NDArray[np.uint8], slots: NDArray[np.uint32], ticks: NDArray[np.uint32]) -> None:
        """Add rows: `digests` uint8 (n, 16) of their keys, `slots` and `ticks` (when last used) uint32 (n,).

        The arrays are held until build, not copied. Among equal ticks, what is added first is the colder.
        ValueError unless shapes and types are these.
        """
        if digests.shape != (len(slots), DIGEST_BYTES) or digests.dtype != np.uint8:
            raise ValueError(f"digests must be uint8 ({len(slots)}, 16), not {digests.dtype} {digests.shape}")
        for name, column in (("slots", slots), ("ticks", ticks)):
            if column.shape != (len(slots),) or column.dtype != np.uint32:
                raise ValueError(f"{name} must be uint32 ({len(slots)},), not {column.dtype} {column.shape}")
        self._digests.append(digests)
        self._slots.append(slots)
        self._ticks.append(ticks)

    def build(self, slots_limit: int, keys: NDArray[np.uint8] | None = None) -> int:
        """The index as a new memfd, its size sealed, which the caller sends and closes. Empties the builder.

        Rows with a slot of `slots_limit` or above are left out. `keys`, for an index that names its coldest rows by
        key: uint8 (rows as added, 1 + longest key), each a length, the key, and padding. ColdIndexError if there is no
        memory.
        """
        digests: NDArray[np.uint8] = np.concatenate([np.empty((0, DIGEST_BYTES), np.uint8), *self._digests])
        slots = np.concatenate([np.empty(0, np.uint32), *self._slots])
        ticks = np.concatenate([np.empty(0, np.uint32), *self._ticks])
        self._digests, self._slots, self._ticks = [], [], []
        salt = secrets.randbits(64) | 1
        hashes = np.ascontiguousarray(digests).view("<u8")[:, 0] * np.uint64(salt)

        by_use = np.argsort(ticks, kind="stable")
        kept = by_use[_newest_of_each(slots, digests, hashes, by_use, slots_limit)]
        if len(kept) < len(slots):
            self.left_out = np.setdiff1d(np.arange(len(slots)), kept)
        if len(kept) >= _REMOVED:
            raise ColdIndexError(f"an index has room for {_REMOVED - 1} rows, not for {len(kept)}")
        by_hash = np.argsort(hashes[kept])  # numbers of places in `kept`, which is in order of use
        rows = kept[by_hash]
        self.order = rows.astype(np.uint32)

        bucket_bits = max(1, (-(-len(rows) // _ROWS_A_BUCKET) - 1).bit_length())
        key_bytes = 0 if keys is None else keys.shape[1]
        layout = _Layout(len(rows), bucket_bits, slots_limit, key_bytes)
        fd = _memfd(layout.total)
        try:
            header = _HEADER.pack(_MAGIC, _VERSION, len(rows), bucket_bits, slots_limit, salt, key_bytes)
            os.pwrite(fd, header + CHECK.pack(xxh3_64_intdigest(header)), 0)
            out = mmap.mmap(fd, layout.total)  # unmapped with the last array over it
            _matrix(out, layout.digests, len(rows), DIGEST_BYTES)[:] = digests[rows]
            _column(out, layout.slots, len(rows))[:] = slots[rows]
            _column(out, layout.ticks, len(rows))[:] = ticks[rows]
            _column(out, layout.order, len(rows))[by_hash] = np.arange(len(rows), dtype=np.uint32)
            starts = _column(out, layout.starts, (1 << bucket_bits) + 1)
            firsts = np.arange(1 << bucket_bits, dtype=np.uint64) << np.uint64(64 - bucket_bits)
            starts[:-1] = np.searchsorted(hashes[rows], firsts)
            starts[-1] = len(rows)
            taken = np.zeros(slots_limit, np.uint8)
            taken[slots[rows]] = 1
            _column(out, layout.taken, -(-slots_limit // 8), np.uint8)[:] = np.packbits(taken, bitorder="little")
            if keys is not None:
                _matrix(out, layout.keys, len(rows), key_bytes)[:] = keys[rows]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd


class SharedColdIndex:
    """The scheduler's side: find, remove, evict. Nothing is ever added. One thread at a time, and one process only.

    The content of the memfd is checked only as far as memory safety needs it: a row that differs from its index entry
    fails verification when it is loaded.
    """

    def __init__(self, fd: int, layout: _Layout, salt: int) -> None:
        """Map `fd`. Not for callers: use attach, which checks it."""
        rows, bucket_bits = layout.rows, layout.bucket_bits
        self.named = layout.key_bytes > 0
        """Whether `coldest` returns keys; else it returns their digests."""
        self.nbytes = layout.total
        self._map = mmap.mmap(fd, layout.total)
        self._views: list[memoryview] = []
        self._base = layout.digests
        self._slots = self._view(layout.slots, rows)
        self._ticks = self._view(layout.ticks, rows)
        self._starts = self._view(layout.starts, (1 << bucket_bits) + 1)
        self._layout = layout
        self._salt = salt
        self._shift = 64 - bucket_bits
        self._rows = rows
        self._slots_limit = layout.slots_limit
        self._left = rows
        self._coldest: list[int] = []  # the next rows in order of use, the coldest last
        self._cursor = 0  # how much of that order has been read

    @classmethod
    def attach(cls, fd: int) -> SharedColdIndex:
        """Map the index behind `fd`, and close `fd`. Takes the same time for any number of rows.

        ColdIndexError unless it is a memfd whose size is sealed and is what its header says: a file that could shrink
        would turn any access into a SIGBUS.
        """
        try:
            return cls(fd, *_checked(fd))
        except OSError as error:
            raise ColdIndexError(f"cannot map the index behind descriptor {fd}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __len__(self) -> int:
        return self._left

    def find(self, key: Key) -> tuple[int, int] | None:
        """(slot, tick) of the key's row, or None."""
        row = self._find(key)
        return None if row < 0 else (self._slots[row], self._ticks[row])

    def remove(self, key: Key) -> tuple[int, int] | None:
        """As find, and the row is removed: the caller keeps its slot, or frees it."""
        row = self._find(key)
        return None if row < 0 else (self._remove(row), self._ticks[row])

    def coldest(self, count: int) -> list[tuple[bytes, int]]:
        """Remove up to `count` rows, the least recently used first: (key if `named`, else its digest; slot)."""
        victims: list[tuple[bytes, int]] = []
        while len(victims) < count and self._left:
            if not self._coldest:
                self._refill()
            row = self._coldest.pop()
            if self._slots[row] != _REMOVED:
                victims.append((self._name(row), self._remove(row)))
        return victims

    def claim(self, taken: bytearray, slots_limit: int) -> None:
        """Mark this index's slots in a map of one byte a slot, at least `slots_limit` bytes.

        Rows in slots that are marked already, or that are not below `slots_limit`, are removed.
        """
        theirs, mine = np.frombuffer(taken, np.uint8)[:slots_limit], self._slot_map()
        both = min(len(theirs), len(mine))
        if mine[both:].any() or (mine[:both] & theirs[:both]).any():
            slots = _column(self._map, self._layout.slots, self._rows)
            rows = np.flatnonzero(slots != _REMOVED)
            lost = slots[rows] >= both
            lost[~lost] = theirs[slots[rows[~lost]]] != 0
            slots[rows[lost]] = _REMOVED
            self._left -= int(lost.sum())
            mine = self._slot_map()
        theirs[:both] |= mine[:both]

    def release(self, taken: bytearray) -> None:
        """Unmark the slots of the rows that are still here in a map that `claim` was given."""
        mine = self._slot_map()
        theirs = np.frombuffer(taken, np.uint8)[: len(mine)]
        theirs[mine[: len(theirs)] != 0] = 0

    def built(self, digest: bytes) -> int:
        """The number of the row of this digest among those that were built in, even if removed since; -1 if there is
        none."""
        if not self._rows:
            return -1
        bucket = (int.from_bytes(digest[:8], "little") * self._salt & _WORD) >> self._shift
        end = self._base + DIGEST_BYTES * self._starts[bucket + 1]
        at = self._map.find(digest, self._base + DIGEST_BYTES * self._starts[bucket], end)
        while at >= 0 and at % DIGEST_BYTES:  # across two digests
            at = self._map.find(digest, at + 1, end)
        return -1 if at < 0 else (at - self._base) // DIGEST_BYTES

    def close(self) -> None:
        """Unmap the memory. May be called again; the index is empty from then on."""
        self._left = self._rows = 0
        self._coldest = []
        for view in self._views:
            view.release()
        self._views = []
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, key: Key) -> int:
        """The number of the key's row, -1 if it is not here (any more)."""
        row = self.built(key_digest(key)) if self._left else -1
        return row if row >= 0 and self._slots[row] != _REMOVED else -1

    def _name(self, row: int) -> bytes:
        if self.named:
            at = self._layout.keys + self._layout.key_bytes * row
            return self._map[at + 1 : at + 1 + min(self._map[at], self._layout.key_bytes - 1)]
        at = self._base + DIGEST_BYTES * row
        return self._map[at : at + DIGEST_BYTES]

    def _slot_map(self) -> NDArray[np.uint8]:
        """uint8 (slots,): 1 for those of rows that are here."""
        if self._left == self._rows:
            packed = _column(self._map, self._layout.taken, -(-self._slots_limit // 8), np.uint8)
            return np.unpackbits(packed, count=self._slots_limit, bitorder="little")
        slots = _column(self._map, self._layout.slots, self._rows)
        here = np.zeros(self._slots_limit, np.uint8)
        here[slots[slots != _REMOVED]] = 1
        return here

    def _remove(self, row: int) -> int:
        slot = self._slots[row]
        self._slots[row] = _REMOVED
        self._left -= 1
        return slot

    def _refill(self) -> None:
        """Read on in the order of use, up to a row that is still here."""
        slots = _column(self._map, self._layout.slots, self._rows)
        count = _REFILL
        while not self._coldest and self._cursor < self._rows:
            count = min(count, self._rows - self._cursor)
            rows = _column(self._map, self._layout.order + 4 * self._cursor, count)
            self._cursor += count
            self._coldest = rows[slots[rows] != _REMOVED][::-1].tolist()
            count *= 2  # most of this part has been removed

    def _view(self, at: int, count: int) -> memoryview:
        whole = memoryview(self._map)
        part = whole[at : at + 4 * count]
        view = part.cast("I")
        self._views += [view, part, whole]
        return view


def _newest_of_each(
    slots: NDArray[np.uint32],
    digests: NDArray[np.uint8],
    hashes: NDArray[np.uint64],
    by_use: NDArray[np.intp],
    slots_limit: int,
) -> NDArray[np.bool_]:
    """bool (n,), in the order of `by_use`: whether that row is kept, so that each digest and each slot occurs once."""
    stays = slots[by_use] < slots_limit
    ordered = np.sort(hashes)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if len(twice):
        seen: set[bytes] = set()
        for place in np.flatnonzero(np.isin(hashes[by_use], twice) & stays)[::-1].tolist():
            digest = digests[by_use[place]].tobytes()
            if digest in seen:
                stays[place] = False
            seen.add(digest)
    places = np.flatnonzero(stays)
    last = np.zeros(slots_limit, np.uint32)
    last[slots[by_use[places]]] = places  # of equal slots, numpy keeps what is assigned last
    stays[places] = last[slots[by_use[places]]] == places
    return stays


def _column(of: mmap.mmap, at: int, count: int, dtype: type[Any] = np.uint32) -> NDArray[Any]:
    return np.frombuffer(of, dtype, count, at)


def _matrix(of: mmap.mmap, at: int, rows: int, width: int) -> NDArray[np.uint8]:
    return np.frombuffer(of, np.uint8, rows * width, at).reshape(rows, width)


def _memfd(nbytes: int) -> int:
    try:
        fd = memfd("nixl_tiers_index")
        try:
            os.posix_fallocate(fd, 0, nbytes)  # fail here: a page that cannot be allocated later would be a SIGBUS
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise ColdIndexError(f"the kernel gives no memfd of {nbytes} bytes for the index: {error.strerror}") from error
    return fd


def _checked(fd: int) -> tuple[_Layout, int]:
    """Layout and salt of the index behind `fd`. ColdIndexError names what is wrong with it."""
    try:
        _, _, rows, bucket_bits, slots, salt, key_bytes = header_of(fd, _HEADER, _MAGIC, _VERSION, "cold index")
    except ValueError as error:
        raise ColdIndexError(str(error)) from error
    size = os.fstat(fd).st_size
    layout = _Layout(rows, bucket_bits, slots, key_bytes)
    if not 1 <= bucket_bits <= 32 or rows >= _REMOVED or size != layout.total:
        raise ColdIndexError(f"the index behind descriptor {fd} has {size} bytes, which is not what its header says")
    return layout, salt
