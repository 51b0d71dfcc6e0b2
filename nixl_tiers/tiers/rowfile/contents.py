"""What is in a directory of row files, for the thread that sweeps: read anew each time, since engines share it.

What is no row of a tier stays: links, files and directories of other users, names of other forms, and a row's name in a
fan-out directory where it does not belong.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, TypeVar

from nixl_tiers.base.chunk import NAMESPACE_NAME, PAGE, align
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.memory.seal import TAILS
from nixl_tiers.memory.seal import read as read_seal
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder, NotOwned, taken_bytes
from nixl_tiers.tiers.rowfile.budget import SIZED_ROWS, Swept
from nixl_tiers.tiers.rowfile.directory import RowDirectory, row_files
from nixl_tiers.tiers.rowfile.evict import Row
from nixl_tiers.tiers.rowfile.names import FANOUT_NAME
from nixl_tiers.tiers.stored import Problems, reason

logger = logging.getLogger(__name__)

NAME_BYTES: Final = 512  # of a directory, for one more name in it
_ROW_NAME: Final = re.compile(r"(?:[0-9a-f]{2})+\.row")
T = TypeVar("T")


def row_bytes_of(status: os.stat_result) -> int:
    """What a row's file takes, with its name."""
    return align(taken_bytes(status)) + NAME_BYTES


class _Logged(Problems):
    """In the log, of what `reads` is told before."""

    def __init__(self, log_once: LogOnce, reads: Callable[[], None]) -> None:
        self._log_once = log_once
        self._reads = reads

    def add(self, what: object, error: OSError | str, done: str = "read") -> None:
        why = reason(error) if isinstance(error, OSError) else error
        self._log_once.report(f"cannot be {done}", f"{what} cannot be {done} ({why})")

    @contextmanager
    def reading(self, what: object, done: str = "read") -> Iterator[None]:
        self._reads()
        with super().reading(what, done):
            yield


class Contents:
    """Any call may wait for the file system. What has gone meanwhile is left out, and so is what cannot be read, but by
    `sweep`."""

    def __init__(self, directory: RowDirectory, namespace: str, row_bytes: int, log_once: LogOnce) -> None:
        """`namespace`: the one that this process serves, whose directories are in the margin of its budget.
        `row_bytes`: what one of its rows takes."""
        self.directory = directory
        self._served = namespace
        self._row_bytes = row_bytes
        self._problems = _Logged(log_once, self._moves)
        self.moved_s = 0.0
        """When the directory was last asked for something, of the monotonic clock."""

    def _moves(self) -> None:
        self.moved_s = time.monotonic()

    # --- rows, for eviction and expiry ------------------------------------------------------------------------------

    def namespaces(self) -> Sequence[str]:
        names = list[str]()
        with self._problems.reading(self.directory.path), self.directory.base() as base:
            names += _namespaces(base)
        return names

    def rows(self, namespace: str, fanout: str) -> Sequence[Row]:
        """Those in a fan-out directory, by their names and a `stat` of each."""
        rows, place = list[Row](), self.directory.path / namespace / fanout
        with self._problems.reading(place), self.directory.fanout(namespace, fanout) as folder:
            for path, status in row_files(folder, namespace, fanout, self._problems):
                rows.append(Row(namespace, fanout, path.name, status.st_mtime_ns, row_bytes_of(status)))
        return rows

    def unlink(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Look at each once more, and delete it if it was neither used nor replaced. Those that these calls, and no
        other engine's, have taken away."""
        return [row for row in self._each(rows, self._unlink) if row is not None]

    def _unlink(self, folder: Folder, row: Row) -> Row | None:
        with self._problems.reading(folder.path / row.name, "deleted"):
            if folder.stat(row.name).st_mtime_ns == row.used_ns:
                folder.unlink(row.name)
                return row
        return None

    def sealed_at(self, rows: Sequence[Row]) -> Sequence[int | None]:
        """Of each when it was sealed, in Unix seconds. None: it has no seal, or is gone."""
        return self._each(rows, self._sealed_at)

    def _sealed_at(self, folder: Folder, row: Row) -> int | None:
        with self._problems.reading(folder.path / row.name), folder.opened(row.name, os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            for tail in TAILS:
                if (seal := read_seal(os.pread(descriptor, tail, max(0, size - tail)))) is not None:
                    return seal.sealed_at
        return None

    def touch(self, rows: Sequence[Row]) -> None:
        """Set their modification times to the server's."""
        self._each(rows, self._touch)

    def _touch(self, folder: Folder, row: Row) -> None:
        with self._problems.reading(folder.path / row.name):
            self.directory.server_time.touch(row.name, folder.descriptor)

    def _each(self, rows: Sequence[Row], call: Callable[[Folder, Row], T]) -> Sequence[T]:
        """For rows of one fan-out directory, on several threads; for none if that cannot be opened."""
        if rows:
            place = rows[0][:2]
            with self._problems.reading(self.directory.path.joinpath(*place)), self.directory.fanout(*place) as folder:
                return [*self.directory.threads.map(partial(call, folder), rows)]
        return []

    def server_s(self) -> float:
        """Unix seconds by the file server, whose clock is read again now and then."""
        with self._problems.reading(self.directory.path):
            self.directory.refresh_time()
        return self.directory.server_time.now_s()

    # --- a sweep ----------------------------------------------------------------------------------------------------

    def sweep(self) -> Swept | None:
        """Names and directories of all namespaces, and unfinished files, of which orphans are deleted. None if anything
        of it cannot be read."""
        found = Swept()
        try:
            with self.directory.base() as base:
                with _unless_gone(), base.folder(INCOMING) as incoming:
                    for name in incoming.names():
                        if not self.directory.temp_names.is_in_use(name):
                            self._sweep_unfinished(incoming, name, found)
                for namespace in _namespaces(base):
                    with _unless_gone(), base.folder(namespace) as home:
                        self._sweep_namespace(home, namespace, found)
                    if not found.rows.get(namespace, (0, 0))[0]:
                        self._remove_empty(base, namespace)
        except OSError as error:
            self._problems.add(error.filename or self.directory.path, error)
            return None
        return found

    def _sweep_namespace(self, home: Folder, namespace: str, found: Swept) -> None:
        names, sizes, directories = 0, list[int](), 1
        for fanout in filter(FANOUT_NAME.fullmatch, home.names()):
            self._moves()
            with _unless_gone(), home.folder(fanout) as folder:
                rows = [name for name in folder.names() if _ROW_NAME.fullmatch(name)]
                names += len(rows)
                directories += 1
                for name in rows[: SIZED_ROWS - len(sizes)]:
                    with self._problems.reading(folder.path / name):
                        sizes.append(row_bytes_of(folder.stat(name)))
                if not rows:
                    self._remove_empty(home, fanout)
        if namespace == self._served or not sizes:
            sizes.append(self._row_bytes)
        found.rows[namespace] = names, max(sizes)
        if namespace != self._served:
            found.other_bytes += (directories + 1) * PAGE  # and a manifest

    def _remove_empty(self, parent: Folder, name: str) -> None:
        """A directory that has no rows, and is not of the namespace that is served; whoever uses it makes it again."""
        if not self.directory.writes or self._served in (name, parent.path.name):
            return
        with suppress(OSError):  # it is not empty after all
            with parent.folder(name) as folder:
                if folder.names() == [MANIFEST_NAME]:
                    folder.unlink(MANIFEST_NAME)
            parent.rmdir(name)

    def _sweep_unfinished(self, incoming: Folder, name: str, found: Swept) -> None:
        """A file in `.incoming`, which counts as a row unless it was an orphan."""
        nbytes = self._row_bytes
        try:
            status = incoming.stat(name)
            nbytes = taken_bytes(status)
            age_s = self.directory.server_time.now_s() - status.st_mtime
            if self.directory.writes and self.directory.temp_names.is_orphan(name, age_s):
                incoming.unlink(name)
                logger.info("deleted %s, an orphan: nobody writes it any more", incoming.path / name)
                return
        except FileNotFoundError:
            return
        except OSError as error:
            self._problems.add(incoming.path / name, error)
        found.add_unfinished(nbytes, self._row_bytes)


def _namespaces(base: Folder) -> list[str]:
    return [name for name in base.names() if NAMESPACE_NAME.fullmatch(name)]


def _unless_gone() -> suppress:
    """What has gone, or another user has put there, is left out."""
    return suppress(FileNotFoundError, NotOwned)
