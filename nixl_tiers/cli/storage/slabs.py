"""A path with `layout: slabs`: each part's shards, their journals and slab files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.cli.storage.base import Checked, Namespace, Pace, Problems, Step, Storage, Unusable, Victims
from nixl_tiers.cli.storage.reading import RowBuffer, folders, manifest_in, open_file, read_small
from nixl_tiers.cli.storage.seals import defect, find_seal
from nixl_tiers.tiers.base import TierRefused
from nixl_tiers.tiers.disk import SLAB_LOCK
from nixl_tiers.tiers.slab import journal_file
from nixl_tiers.tiers.slab.journal_file import RECORD, RECORD_BYTES, Records, decode
from nixl_tiers.tiers.slab.parts import (
    DELETING,
    DESCRIPTION,
    LOCK,
    NAMESPACE,
    holder_of,
    is_shard,
    part_number,
    used_ns,
)
from nixl_tiers.tiers.slab.quota import SlabQuota

_SLAB: Final = re.compile(r"slab-(\d{5})\.kv")
_CHUNK: Final = 4096  # records at a time
_TRIES: Final = 4  # a row that an engine is replacing looks damaged for a moment
_PAUSE_S: Final = 0.25  # between them: an engine writes its journal within 0.1 s
_LOCK_TRIES: Final = 50
_LOCK_PAUSE_S: Final = 0.02


class SlabStorage(Storage):
    def __init__(self, path: Path) -> None:
        self._path = path

    def namespaces(self, step: Step, *, old_versions: bool = False) -> list[Namespace]:
        try:
            found = folders(self._path)
        except OSError as error:
            raise Unusable(f"{self._path} cannot be read ({error.strerror})") from None
        parts = [part for part in found if part_number(part.name) is not None]
        rests = [rest for rest in found if DELETING.fullmatch(rest.name)]
        return [each for part in parts for each in self._of_part(part, step)] + [*map(_rest, rests)]

    def _of_part(self, part: Path, step: Step) -> Iterator[Namespace]:
        try:
            shards = [shard for shard in folders(part) if NAMESPACE.fullmatch(shard.name)]
            holder = holder_now(part)
        except OSError as error:
            yield Namespace(str(part), "slabs", "", 0, 0, problem=f"{part} cannot be read ({error.strerror})")
            return
        for shard in shards:
            try:
                if is_shard(shard):
                    yield _describe(shard, holder, step)
            except FileNotFoundError:  # deleted meanwhile
                pass
            except OSError as error:
                problem = f"{shard} cannot be read ({error.strerror})"
                yield Namespace(str(part), "slabs", shard.name, 0, 0, holder=holder, problem=problem)

    def check(self, namespace: Namespace, pace: Pace) -> Iterator[Checked]:
        path = Path(namespace.place, namespace.name)
        if _is_rest(namespace):
            return
        try:
            with _Shard(path) as shard:
                yield from shard.check(pace)
                problem = str(shard.problems)
        except OSError as error:
            problem = f"{path} cannot be read ({error.strerror})"
        if problem:
            raise Unusable(problem)

    def victims(self, namespace: Namespace, before_s: float | None) -> Victims:
        shard = Path(namespace.place, namespace.name)
        try:
            if _is_rest(namespace):
                rest = _rest(Path(namespace.place))
                return Victims(0, rest.nbytes, problem=rest.problem)
            if not is_shard(shard) or (before_s is not None and (namespace.last_used_s or 0.0) >= before_s):
                return Victims(0, 0)
            if holder := holder_now(shard.parent):
                return Victims(0, 0, f"{shard.parent} is held by {holder}, so nothing in it is deleted")
            now = _describe(shard, "", lambda _: None)
        except FileNotFoundError:
            return Victims(0, 0)
        except OSError as error:
            raise Unusable(f"{shard} cannot be read ({error.strerror})") from None
        return Victims(now.rows, now.nbytes, problem=now.problem)

    def delete(self, namespace: Namespace, before_s: float | None, step: Step) -> str:
        """By the lock of the path and that of the part, as engines do it."""
        rest = _is_rest(namespace)
        shard = Path(namespace.place) if rest else Path(namespace.place, namespace.name)
        if before_s is not None and not rest and used_ns(shard) / 1e9 >= before_s:
            return ""
        quota = SlabQuota(self._path, 1 << 62)
        try:
            with quota.locked():
                if rest:
                    quota.finish_deletion(shard.name)
                else:
                    quota.delete_shard(shard)
        except FileNotFoundError:
            pass
        except (OSError, TierRefused) as error:
            return f"{shard} cannot be deleted ({getattr(error, 'strerror', None) or error})"
        step(namespace.rows)
        return ""


def _rest(directory: Path) -> Namespace:
    """What is left of a shard whose deletion did not end: the next engine on the path ends it. Rows in it are not told
    apart, and no engine serves them."""
    nbytes, problem = 0, ""
    try:
        nbytes = sum(file.lstat().st_blocks * 512 for file in directory.iterdir())
    except FileNotFoundError:  # an engine has deleted it meanwhile
        pass
    except OSError as error:
        problem = f"{directory} cannot be read ({error.strerror})"
    return Namespace(str(directory), "slabs", directory.name[-32:], 0, nbytes, problem=problem)


def _is_rest(namespace: Namespace) -> bool:
    return DELETING.fullmatch(Path(namespace.place).name) is not None


def holder_now(part: Path) -> str:
    """Which process holds a part, for people; "": none. Raises OSError.

    A part's lock is tried while the path's lock is held, in shared mode: no mover looks for a free part meanwhile, so
    none takes this process for the holder of one.
    """
    descriptor = open_file(part / LOCK)
    if descriptor is None:
        return ""
    path_lock = open_file(part.parent / SLAB_LOCK)
    try:
        for _ in range(_LOCK_TRIES):
            if path_lock is None or _try_shared(path_lock):
                return "" if _try_shared(descriptor) else holder_of(read_small(part / LOCK) or b"")
            time.sleep(_LOCK_PAUSE_S)
        return f"an unknown process ({part.parent / SLAB_LOCK} is locked)"
    finally:
        os.close(descriptor)  # and so unlocked, before the path is
        if path_lock is not None:
            os.close(path_lock)


def _try_shared(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe(shard: Path, holder: str, step: Step) -> Namespace:
    """Raises OSError."""
    manifest = manifest_in(shard)
    times = [used_ns(shard) / 1e9, 0.0 if manifest is None else float(manifest.last_used)]
    nbytes = sum(file.lstat().st_blocks * 512 for file in (shard, *shard.iterdir()))
    rows, unknown, oldest, newest, problem = 0, 0, [], [], ""
    try:
        with _Shard(shard) as opened:
            for slots, records in opened.records():
                held = records.valid & (records.lengths > 0)
                rows += int(held.sum())
                unknown += int((~records.valid & opened.allocated(slots)).sum())
                sealed = records.sealed_at[held & (records.sealed_at > 0)]
                if len(sealed):
                    oldest.append(float(sealed.min()))
                    newest.append(float(sealed.max()))
                step(int(held.sum()))
            problem = str(opened.problems)
    except Unusable as error:
        problem = str(error)
    return Namespace(
        str(shard.parent),
        "slabs",
        shard.name,
        rows,
        nbytes,
        oldest_s=min(oldest, default=None),
        newest_s=max(newest, default=None),
        last_used_s=max(times) or None,
        manifest=manifest,
        holder=holder,
        unknown_slots=unknown,
        problem=problem,
    )


class _Slabs(NamedTuple):
    """What namespace.json says."""

    geometry: Geometry
    slots: int
    slots_per_slab: int


class _Shard:
    """A shard's journal and slabs, read without locks: each record has a checksum."""

    def __init__(self, path: Path) -> None:
        """Raises Unusable, OSError."""
        self._path = path
        self.problems = Problems()
        self._slabs = _slabs(path)
        self._room = {  # slab -> slots
            int(match[1]): file.lstat().st_size // self._slabs.geometry.row_bytes
            for file in path.iterdir()
            if (match := _SLAB.fullmatch(file.name))
        }
        self._salt = 0
        self._journal = open_file(path / journal_file.NAME)
        if self._journal is not None:
            header = journal_file.Header.read(os.pread(self._journal, PAGE, 0))
            if header is None:  # then every record says nothing
                os.close(self._journal)
                self._journal = None
            else:
                self._salt = header.salt
        self._buffer = RowBuffer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer.__exit__()
        if self._journal is not None:
            os.close(self._journal)

    def records(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """All slots' records, some thousands at a time; what is not in the file is not valid."""
        for first in range(0, self._slabs.slots, _CHUNK):
            slots = np.arange(first, min(first + _CHUNK, self._slabs.slots), dtype=np.int64)
            yield slots, self._read(slots)

    def _read(self, slots: NDArray[np.int64]) -> Records:
        """Of neighbouring slots. Those that cannot be read are not valid."""
        raw = b""
        if self._journal is not None:
            try:
                raw = os.pread(self._journal, len(slots) * RECORD_BYTES, PAGE + int(slots[0]) * RECORD_BYTES)
            except OSError as error:
                self.problems.add(self._path / journal_file.NAME, error)
        return decode(np.frombuffer(raw.ljust(len(slots) * RECORD_BYTES, b"\0"), RECORD), slots, self._salt)

    def allocated(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        slabs, indexes = np.divmod(slots, self._slabs.slots_per_slab)
        room = np.array([self._room.get(int(slab), 0) for slab in range(int(slabs[-1]) + 1)], dtype=np.int64)
        inside: NDArray[np.bool_] = indexes < room[slabs]
        return inside

    def check(self, pace: Pace) -> Iterator[Checked]:
        for slots, records in self.records():
            allocated = self.allocated(slots)
            for place in np.flatnonzero((records.lengths > 0) | (~records.valid & allocated)).tolist():
                slot = int(slots[place])
                try:
                    if records.valid[place]:
                        pace.take(self._slabs.geometry.row_bytes)
                        yield self._check(slot, records.key(place))
                    else:
                        pace.take(PAGE)
                        yield from self._check_unrecorded(slot, pace)
                except OSError as error:
                    yield Checked(self._name(slot), 0, "unreadable", str(error.strerror))

    def _check(self, slot: int, key: bytes) -> Checked:
        """A row that the journal has."""
        row_bytes = self._slabs.geometry.row_bytes
        verdict: Literal["missing", "corrupt"] = "missing"
        reason = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(_PAUSE_S)
            row = self._row(slot)
            if len(row) < row_bytes:
                verdict, reason = "missing", "its slab file ends before it"
            elif reason := defect(row, self._namespace, key, self._slabs.geometry):
                verdict = "corrupt"
            else:
                return Checked(self._name(slot), row_bytes, "ok")
            now = self._read(np.array([slot], np.int64))
            if not now.valid[0] or now.key(0) != key:
                return Checked(self._name(slot), row_bytes, "changed")
        return Checked(self._name(slot), row_bytes, verdict, reason)

    def _check_unrecorded(self, slot: int, pace: Pace) -> Iterator[Checked]:
        """A slot of which the journal says nothing: an engine writes to it now, or the journal was damaged. A seal in
        it that does not match the bytes is what is left of an older row."""
        geometry = self._slabs.geometry
        tail = self._row(slot, tail=True)
        found = find_seal(tail) if len(tail) else None
        if found is None or found.namespace != self._namespace or found.geometry != geometry:
            return
        pace.take(geometry.row_bytes)
        row = self._row(slot)
        if len(row) == geometry.row_bytes and not defect(row, self._namespace, found.key, geometry):
            yield Checked(self._name(slot), geometry.row_bytes, "ok")

    @property
    def _namespace(self) -> bytes:
        return bytes.fromhex(self._path.name)

    def _name(self, slot: int) -> str:
        return f"{self._path}: slot {slot}"

    def _row(self, slot: int, *, tail: bool = False) -> NDArray[np.uint8]:
        """A slot's bytes, or its last pages with the seal; fewer where the file ends. Raises OSError."""
        slab, index = divmod(slot, self._slabs.slots_per_slab)
        nbytes = self._slabs.geometry.row_bytes
        skip = nbytes - _seal_pages(self._slabs.geometry) if tail else 0
        row = self._buffer.read(self._path / f"slab-{slab:05d}.kv", index * nbytes + skip, nbytes - skip)
        return np.zeros(0, np.uint8) if row is None else row


def _seal_pages(geometry: Geometry) -> int:
    return min(geometry.row_bytes, -(-geometry.seal_bytes // PAGE) * PAGE)


def _slabs(path: Path) -> _Slabs:
    raw = read_small(path / DESCRIPTION)
    if raw is None:
        raise Unusable(f"{path / DESCRIPTION} is missing, so its slots cannot be told apart")
    try:
        found = json.loads(raw)
        geometry = Geometry(int(found["cells"]), int(found["cell_payload"]), int(found["sub_blocks"]))
        slabs = _Slabs(geometry, int(found["slots"]), int(found["slots_per_slab"]))
        if int(found["row_bytes"]) != geometry.row_bytes or slabs.slots < 1 or slabs.slots_per_slab < 1:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Unusable(f"{path / DESCRIPTION} is damaged, so its slots cannot be told apart") from None
    return slabs
