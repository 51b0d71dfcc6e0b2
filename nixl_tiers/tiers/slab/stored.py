"""What is stored in the parts of a path with slabs, as commands see it (`tiers/stored.py`): shards, and what is left of
those whose deletion did not end. A shard's journal is read without a lock, as each record has a checksum."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import NAMESPACE_NAME, PAGE, Geometry, align
from nixl_tiers.base.manifest import Manifest
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory import seal
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.disk import read_past_cache
from nixl_tiers.tiers.folder import Folder, NotOwned
from nixl_tiers.tiers.manifests import read_manifest
from nixl_tiers.tiers.slab.journal import CHUNK_RECORDS, NAME, NOTHING, RECORD_BYTES, ROW, UNKNOWN, JournalFile, decode
from nixl_tiers.tiers.slab.layout import SlabLayout, described, slab_name, slab_number
from nixl_tiers.tiers.slab.parts import DESCRIPTION, holder_now, part_number
from nixl_tiers.tiers.slab.shards import DELETING, Shards, is_shard, written_ns
from nixl_tiers.tiers.stored import CheckedRow, Problems, Step, StoredNamespace, defect, reason

_TRIES: Final = 4  # a row that an engine is replacing looks damaged for a moment
_PAUSE_S: Final = 0.25  # between them: an engine that writes a row records it at once


def find(config: FileConfig, before_s: float | None) -> Iterator[StoredNamespace]:
    """The namespaces in the parts of a path, for `find_stored`."""
    try:
        with Folder.to_inspect(config.path) as base:
            names = [name for name in sorted(base.names()) if base.has_folder(name)]
            for name in names:
                if part_number(name) is not None:
                    yield from _in_part(base, name, before_s)
            for name in filter(DELETING.fullmatch, names):
                yield LeftOver.of(base, name)
    except OSError as error:
        raise TierDown(f"{config.path} cannot be read ({reason(error)})") from None


def _in_part(base: Folder, name: str, before_s: float | None) -> Iterator[StoredNamespace]:
    place = base.path / name
    try:
        with base.folder(name) as part:
            shards = [each for each in sorted(part.names()) if NAMESPACE_NAME.fullmatch(each) and part.has_folder(each)]
            holder = holder_now(base, part)
            for shard in shards:
                try:
                    with suppress(FileNotFoundError), part.folder(shard) as folder:  # deleted meanwhile
                        if is_shard(folder.path):
                            yield StoredShard.found(folder, holder, before_s)
                except OSError as error:
                    problem = f"{place / shard} cannot be read ({reason(error)})"
                    yield StoredShard(str(place), shard, before_s, holder=holder, problem=problem)
    except OSError as error:
        yield StoredShard(str(place), "", problem=f"{place} cannot be read ({reason(error)})")


class StoredShard(StoredNamespace):
    """`place`: the part."""

    layout: ClassVar[str] = "slabs"

    @classmethod
    def found(cls, folder: Folder, holder: str, before_s: float | None) -> Self:
        """Raises OSError."""
        found = cls(str(folder.path.parent), folder.path.name, before_s, holder=holder)
        raw = read_manifest(folder)
        manifest = found.manifest = None if raw is None else Manifest.decode(raw)
        found.last_used_s = max(written_ns(folder.path) / 1e9, 0.0 if manifest is None else manifest.last_used)
        if before_s is not None and found.last_used_s >= before_s:
            return found
        if before_s is not None and holder:
            found.refused = f"{found.place} is held by {holder}, so nothing in it is deleted"
        found.nbytes = _taken_bytes(folder)
        try:
            with closing(_Slots(folder)) as slots:
                slots.count(found)
                found.problem = str(slots.problems)
        except TierDown as error:
            found.problem = str(error)
        return found

    def check(self, before_read: Step) -> Iterator[CheckedRow]:
        place = Path(self.place)
        try:
            with (
                Folder.to_inspect(place.parent) as base,
                base.folder(place.name) as part,
                part.folder(self.name) as folder,
                closing(_Slots(folder)) as slots,
            ):
                yield from slots.check(before_read)
                self.problem = str(slots.problems) or self.problem
        except OSError as error:
            raise TierDown(f"{place / self.name} cannot be read ({reason(error)})") from None

    def delete(self, step: Step) -> None:
        shard = Path(self.place, self.name)

        def delete(quota: Shards) -> None:
            if self.before_s is None or written_ns(shard) / 1e9 < self.before_s:
                quota.delete_shard(shard)

        self._delete(shard, delete, step)

    def _delete(self, path: Path, delete: Callable[[Shards], object], step: Step) -> None:
        """By the lock of the tier's path and that of the part, as engines do it."""
        quota = Shards(Path(self.place).parent, 1 << 62)
        try:
            with suppress(FileNotFoundError), quota.locked():
                delete(quota)
            step(self.rows)
        except (OSError, TierRefused) as error:
            self.problem = f"{path} cannot be deleted ({reason(error) if isinstance(error, OSError) else error})"


class LeftOver(StoredShard):
    """What is left of a shard whose deletion did not end: the next engine on the path ends it. Rows in it are not told
    apart, and no engine serves them. `place`: its own directory."""

    @classmethod
    def of(cls, base: Folder, name: str) -> Self:
        found, problems = cls(str(base.path / name), name[-32:]), Problems()
        with problems.reading(found.place), base.folder(name) as folder:
            found.nbytes = _taken_bytes(folder)
        found.problem = str(problems)
        return found

    def check(self, before_read: Step) -> Iterator[CheckedRow]:
        return iter(())

    def delete(self, step: Step) -> None:
        path = Path(self.place)
        self._delete(path, lambda quota: quota.finish_deletion(path.name), step)


class _Slots:
    """The slots of a shard that is open to be read, with their records."""

    def __init__(self, folder: Folder) -> None:
        """Raises TierDown, OSError."""
        self.problems = Problems()
        self._folder = folder
        self._namespace = bytes.fromhex(folder.path.name)
        self._geometry, self._layout = _description(folder)
        self._row_bytes = self._layout.row_bytes
        sizes = {name: status.st_size for name, status in _files(folder).items()}
        room = {slab: sizes[name] // self._row_bytes for name in sizes if (slab := slab_number(name)) is not None}
        self._has_room = self._layout.with_room(room)
        self._journal: JournalFile | None = None
        with self.problems.reading(folder.path / NAME):
            self._journal = JournalFile(folder, self._layout.slots, writes=False)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def count(self, found: StoredNamespace) -> None:
        """Enter the rows by their records. Slots without one are told only where the last engine has not closed the
        journal, or it is damaged: else they were never used."""
        journal = self._journal
        ended = not found.holder and (journal is None or not journal.closed)
        for records in self._records():
            found.unknown_slots += ended and int(np.count_nonzero(records["what"] == UNKNOWN))
            times = records["sealed_at"][records["what"] == ROW]
            found.rows += len(times)
            if len(times := times[times > 0]):
                found.include(float(times.min()), float(times.max()))

    def check(self, before_read: Step) -> Iterator[CheckedRow]:
        for records in self._records():
            for record in records[np.isin(records["what"], (ROW, UNKNOWN))]:
                slot = int(record["slot"])
                name = f"{self._folder.path}: slot {slot}"
                try:
                    if record["what"] == ROW:
                        before_read(self._row_bytes)
                        yield CheckedRow(name, self._row_bytes, *self._judged(slot, _key(record)))
                    elif self._has_row(slot, before_read):
                        yield CheckedRow(name, self._row_bytes, "ok")
                except OSError as error:
                    yield CheckedRow(name, 0, "unreadable", reason(error))

    def _judged(self, slot: int, key: bytes) -> tuple[Literal["ok", "changed", "missing", "corrupt"], str]:
        """A row that the journal has, and why."""
        is_short, why = False, ""
        for attempt in range(_TRIES):
            time.sleep(_PAUSE_S if attempt else 0)
            row = self._row(slot)
            is_short = len(row) < self._row_bytes
            why = "its slab file ends before it" if is_short else defect(row, self._namespace, key, self._geometry)
            if not why:
                return "ok", ""
            if _key(self._read(slot, 1)[0]) != key:
                return "changed", ""
        return ("missing" if is_short else "corrupt"), why

    def _has_row(self, slot: int, before_read: Step) -> bool:
        """Whether there is a row in a slot of which the journal says nothing: an engine writes to it now, or the
        journal was damaged. A seal in it that does not match the bytes is what is left of an older row."""
        before_read(PAGE)
        found = seal.find(self._row(slot, min(self._row_bytes, align(self._geometry.seal_bytes))))
        if found is None or (found.namespace, found.geometry) != (self._namespace, self._geometry):
            return False
        before_read(self._row_bytes)
        row = self._row(slot)
        return len(row) == self._row_bytes and not defect(row, self._namespace, found.key, self._geometry)

    def _row(self, slot: int, tail_bytes: int = 0) -> NDArray[np.uint8]:
        """A slot's bytes, or only the last ones; fewer where the file ends. Raises OSError."""
        slab, index = divmod(slot, self._layout.slots_per_slab)
        nbytes = tail_bytes or self._row_bytes
        try:
            return read_past_cache(self._folder, slab_name(slab), (index + 1) * self._row_bytes - nbytes, nbytes)
        except (FileNotFoundError, NotOwned):
            return np.zeros(0, np.uint8)

    def _records(self) -> Iterator[NDArray[np.void]]:
        """What those of all slots say, some thousands at a time. UNKNOWN: there may be a row all the same."""
        for first in range(0, self._layout.slots, CHUNK_RECORDS):
            found = self._read(first, min(CHUNK_RECORDS, self._layout.slots - first))
            found["what"][(found["what"] == UNKNOWN) & ~self._has_room[found["slot"]]] = NOTHING
            yield found

    def _read(self, first: int, count: int) -> NDArray[np.void]:
        """Those that cannot be read say nothing."""
        if self._journal is not None:
            try:
                return self._journal.read(first, count)
            except OSError as error:
                self.problems.add(self._journal.path, error)
        return decode(bytes(count * RECORD_BYTES), first, 0)


def _key(record: np.void) -> bytes:
    return bytes(record["key"].tobytes()[: int(record["key_bytes"])])


def _description(folder: Folder) -> tuple[Geometry, SlabLayout]:
    """Raises TierDown, OSError."""
    what = f"{folder.path / DESCRIPTION} is missing"
    with suppress(FileNotFoundError, NotOwned):
        what = f"{folder.path / DESCRIPTION} is damaged"
        with suppress(ValueError, RecursionError):
            if (found := described(json.loads(folder.read(DESCRIPTION)))) is not None:
                return found
    raise TierDown(f"{what}, so its slots cannot be told apart")


def _files(folder: Folder) -> dict[str, os.stat_result]:
    found = {}
    for name in folder.names():
        with suppress(FileNotFoundError):  # deleted or renamed meanwhile
            found[name] = folder.stat(name)
    return found


def _taken_bytes(folder: Folder) -> int:
    return 512 * sum(each.st_blocks for each in (os.fstat(folder.descriptor), *_files(folder).values()))
