"""Where the parts of the host region lie, what its header says, and what the ranks publish in it.

A header page (identity, sizes, what pages there are, the times of the last steps), one record per rank, one for all
ranks and one for the model's names, one control word per (row, cell), and from a 2 MiB boundary on the rows. Ranks that
hold the same bytes share a cell (swap/plan.py), so that there may be more ranks than cells.

`RankRecords`: a rank's record holds the fingerprint of its layout and weights, the digest of its layers, how many rows
it has the memory of, and how often its weights have been changed since. The record for all holds what only one rank has
to find out.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import NAMESPACE_BYTES, PAGE, Geometry, align
from nixl_tiers.memory.memfd import CHECK, header_of
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES, is_hugetlb

_MAGIC: Final = b"nixlregn"
_VERSION: Final = 5
# magic, version, cells, cell_payload, sub_blocks, rows, ranks, whether transparent huge pages are wanted, identity
HEADER: Final = struct.Struct("<8sQQQQQQ?16s")
# Of the header page:
STEPS_AT: Final = 1024  # the times of the last steps
HELD_UNTIL_AT: Final = PAGE - 24  # until when movers start no stores, a float64
HUGE_BYTES_AT: Final = PAGE - 16  # how many bytes lie in huge pages
RECORD_BYTES: Final = 512  # of one rank, or of all


class RegionError(RuntimeError):
    """The host region cannot be created or attached as asked. One sentence that says why."""


class Layout:
    """Where the parts are, in bytes from the start: a function of these sizes, so that it can be checked."""

    def __init__(self, geometry: Geometry, rows: int, ranks: int, *, hugetlb: bool) -> None:
        self.records = PAGE
        self.control = self.records + align((ranks + 2) * RECORD_BYTES)
        self.rows = align(self.control + rows * geometry.cells * 8, HUGE_PAGE_BYTES)
        end = self.rows + rows * geometry.row_bytes
        self.total = align(end, HUGE_PAGE_BYTES) if hugetlb else end


class Header(NamedTuple):
    """What a region says of itself. `transparent`: whether it asks for transparent huge pages; `identity`: 16 bytes."""

    geometry: Geometry
    rows: int
    ranks: int
    transparent: bool
    identity: bytes

    def packed(self) -> bytes:
        """The header page's beginning, with its check word."""
        geometry = self.geometry
        sizes = (geometry.cells, geometry.cell_payload, geometry.sub_blocks, self.rows, self.ranks)
        packed = HEADER.pack(_MAGIC, _VERSION, *sizes, self.transparent, self.identity)
        return packed + CHECK.pack(xxh3_64_intdigest(packed))


def checked(fd: int) -> Header:
    """What the region behind `fd` says of itself. RegionError names what is wrong with it."""
    try:
        fields = header_of(fd, HEADER, _MAGIC, _VERSION, "region")
        _, _, cells, cell_payload, sub_blocks, rows, ranks, transparent, identity = fields
    except ValueError as error:
        raise RegionError(str(error)) from error
    try:
        geometry = Geometry(cells, cell_payload, sub_blocks)
    except ValueError as error:
        raise RegionError(f"the region behind descriptor {fd} has an impossible geometry: {error}") from error
    if ranks < cells or ranks % cells:
        raise RegionError(f"the region behind descriptor {fd} has {cells} cells for {ranks} ranks")
    size = os.fstat(fd).st_size
    expected = Layout(geometry, rows, ranks, hugetlb=is_hugetlb(fd)).total
    if rows < 1 or size != expected:
        raise RegionError(f"the region behind descriptor {fd} has {size} bytes where its header needs {expected}")
    return Header(geometry, rows, ranks, transparent, identity)


# Of a record: check word, length of the note, digest, note; the layers' digest; how much of the rows' memory is there
# (backing.py); and how often the weights changed.
_RECORD: Final = struct.Struct("<H16s")
_WEIGHTS: Final = struct.Struct("Q")  # counts the beginnings and the ends of changes: odd while one runs
_WEIGHTS_AT: Final = RECORD_BYTES - 16
_READY: Final = struct.Struct("Q")  # how many rows have their memory, plus one; 0: nobody sees to that
_READY_AT: Final = RECORD_BYTES - 24
_TOUCHED: Final = struct.Struct("Q")  # of how many pieces of the rows this rank has allocated its own cells
_TOUCHED_AT: Final = RECORD_BYTES - 32
_LAYERS_AT: Final = _TOUCHED_AT - NAMESPACE_BYTES
MAX_NOTE_BYTES: Final = 400


class RankRecords:
    """Of one region, of `count` ranks. A record is read whole or not at all."""

    def __init__(self, region: mmap.mmap, fd: int, at: int, count: int) -> None:
        """`at`: of the first record in the region, which `fd` stands for. One record a rank, and two more."""
        self._map = region
        self._fd = fd
        self._at = at
        self.count = count
        self._weights_at = [at + rank * RECORD_BYTES + _WEIGHTS_AT for rank in range(count)]

    def publish(self, rank: int, digest: bytes, note: str = "") -> None:
        """Publish this rank's fingerprint (16 bytes) to the scheduler, with a note cut to 400 bytes."""
        self._write_record(self._record(rank), digest, note)

    def published(self) -> list[tuple[bytes, str] | None]:
        """(fingerprint, note) of each rank, None where it has not published yet."""
        return [self._read_record(self._record(rank)) for rank in range(self.count)]

    def publish_ready(self, rank: int, rows: int) -> None:
        """Publish to all processes that this rank has the memory of the first `rows` rows."""
        self._put(_READY, self._record(rank) + _READY_AT, rows + 1)

    def publish_layers(self, rank: int, digest: bytes) -> None:
        """Publish what this rank's layers compute with (16 bytes), before its fingerprint."""
        at = self._record(rank) + _LAYERS_AT
        self._map[at : at + NAMESPACE_BYTES] = digest

    @property
    def layers(self) -> list[bytes]:
        """The digest of each rank's layers that has published its fingerprint; zeros if it has none."""
        starts = (self._record(rank) + _LAYERS_AT for rank in range(self.count))
        return [self._map[at : at + NAMESPACE_BYTES] for at in starts]

    @property
    def ready_rows(self) -> int | None:
        """Of how many rows, from the first, every rank has the memory; None where none of them sees to that, and when
        the region is closed."""
        words = self._words(_READY, _READY_AT)
        return min(words) - 1 if words and all(words) else 0 if any(words) else None

    def publish_touched(self, rank: int, pieces: int) -> None:
        """Publish to the other ranks that this one's own cells of so many pieces are allocated."""
        self._put(_TOUCHED, self._record(rank) + _TOUCHED_AT, pieces)

    @property
    def fewest_touched(self) -> int:
        """What the rank that has come least far has published."""
        return min(self._words(_TOUCHED, _TOUCHED_AT), default=0)

    def publish_weights(self, rank: int, *, changing: bool) -> None:
        """Publish to the scheduler that this rank's weights begin to change, or that this change has ended."""
        at = self._weights_at[rank]
        with contextlib.suppress(ValueError):  # unmapped: nobody reads it any more
            (word,) = _WEIGHTS.unpack_from(self._map, at)
            if word % 2 != changing:
                _WEIGHTS.pack_into(self._map, at, word + 1)

    @property
    def weights(self) -> tuple[int, ...]:
        """One number a rank, odd while its weights are being changed. Equal to an earlier answer only if nothing has
        changed since."""
        return tuple([_WEIGHTS.unpack_from(self._map, at)[0] for at in self._weights_at])

    def shared_by_ranks(self, find: Callable[[], tuple[bytes, str]], timeout_s: float) -> tuple[bytes, str]:
        """What `find` (a digest of 16 bytes, a note) returns in the rank that comes first. The others wait for its
        result, and one of them takes over if that rank dies. RegionError if this takes longer than `timeout_s`."""
        at = self._at + self.count * RECORD_BYTES
        deadline = time.monotonic() + timeout_s
        while (found := self._read_record(at)) is None:
            # A POSIX lock, because the kernel takes it from a process that dies. Its byte is never written to.
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except OSError:
                if time.monotonic() > deadline:
                    raise RegionError(f"another rank did not publish it within {timeout_s:g} s") from None
                time.sleep(0.01)
                continue
            try:
                if self._read_record(at) is None:
                    self._write_record(at, *find())
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)
        return found

    def publish_model(self, name: str, revision: str) -> None:
        """Publish the model's name and revision to the scheduler, whose process is not told them."""
        self._write_record(self._model, bytes(NAMESPACE_BYTES), f"{name}\n{revision}")

    @property
    def model(self) -> tuple[str, str]:
        """Name and revision that a rank has published. Empty: none, or a name of 400 bytes or more."""
        found = self._read_record(self._model)
        name, whole, revision = ("" if found is None else found[1]).partition("\n")
        return (name if whole else ""), revision

    # --- inside ------------------------------------------------------------------------------------------------

    def _put(self, word: struct.Struct, at: int, value: int) -> None:
        with contextlib.suppress(ValueError):  # unmapped: nobody reads it any more
            word.pack_into(self._map, at, value)

    def _words(self, word: struct.Struct, at: int) -> list[int]:
        """Of each rank; none when the region is closed."""
        try:
            return [word.unpack_from(self._map, self._record(rank) + at)[0] for rank in range(self.count)]
        except ValueError:
            return []

    def _record(self, rank: int) -> int:
        if not 0 <= rank < self.count:
            raise ValueError(f"rank {rank} is not one of the region's {self.count}")
        return self._at + rank * RECORD_BYTES

    @property
    def _model(self) -> int:
        return self._at + (self.count + 1) * RECORD_BYTES

    def _write_record(self, at: int, digest: bytes, note: str) -> None:
        if len(digest) != NAMESPACE_BYTES:
            raise ValueError(f"a fingerprint has {NAMESPACE_BYTES} bytes, this one has {len(digest)}")
        text = note.encode()[:MAX_NOTE_BYTES].decode(errors="ignore").encode()
        record = _RECORD.pack(len(text), digest) + text
        # The check word last: a half-written record does not pass for one.
        self._map[at + 8 : at + 8 + len(record)] = record
        self._map[at : at + 8] = CHECK.pack(xxh3_64_intdigest(record))

    def _read_record(self, at: int) -> tuple[bytes, str] | None:
        raw = self._map[at : at + RECORD_BYTES]
        (check,) = CHECK.unpack_from(raw)
        length, digest = _RECORD.unpack_from(raw, CHECK.size)
        note = raw[CHECK.size + _RECORD.size :][:length]
        if not check or check != xxh3_64_intdigest(raw[CHECK.size : CHECK.size + _RECORD.size] + note):
            return None
        return digest, note.decode(errors="replace")
