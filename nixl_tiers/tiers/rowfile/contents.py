"""What is in a directory of row files, for the thread that sweeps: read anew each time, since engines share it.

What is no row of a tier stays: links, files and directories of other users, names of other forms, and a row's name in a
fan-out directory where it does not belong.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import Final

from nixl_tiers.base.chunk import NAMESPACE_NAME, PAGE, align
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.memory.seal import TAILS
from nixl_tiers.memory.seal import read as read_seal
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder, NotOwned, taken_bytes
from nixl_tiers.tiers.rowfile.budget import SIZED_ROWS, Swept
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.evict import Row
from nixl_tiers.tiers.rowfile.expire import SealedFiles
from nixl_tiers.tiers.rowfile.names import FANOUT_NAME, RowPath, TempNames

logger = logging.getLogger(__name__)

NAME_BYTES: Final = 512  # of a directory, for one more name in it
ORPHAN_S: Final = 900.0  # an unfinished file that is older has lost its writer, on whichever machine that was
CANNOT_READ: Final = "cannot be read"
_ROW_NAME: Final = re.compile(r"(?:[0-9a-f]{2})+\.row")


def row_bytes_of(status: os.stat_result) -> int:
    """What a row's file takes, with its name."""
    return align(taken_bytes(status)) + NAME_BYTES


class Contents(SealedFiles):
    """Any call may wait for the file system. What has gone meanwhile is left out, and so is what cannot be read, but by
    `sweep`."""

    def __init__(self, directory: RowDirectory, namespace: str, row_bytes: int, log_once: LogOnce) -> None:
        """`namespace`: the one that this process serves, whose directories are in the margin of its budget.
        `row_bytes`: what one of its rows takes."""
        self._directory = directory
        self._served = namespace
        self._row_bytes = row_bytes
        self._log_once = log_once

    # --- rows, for eviction and expiry ------------------------------------------------------------------------------

    def namespaces(self) -> Sequence[str]:
        names = list[str]()
        with self._reading(), self._directory.base() as base:
            names += _namespaces(base)
        return names

    def rows(self, namespace: str, fanout: str) -> Sequence[Row]:
        rows = list[Row]()
        with self._reading(), self._directory.fanout(namespace, fanout) as folder:
            for name in folder.names():
                if RowPath.of_file(namespace, fanout, name) is None:
                    continue
                with self._reading():
                    status = folder.stat(name)
                    if stat.S_ISREG(status.st_mode):
                        rows.append(Row(namespace, fanout, name, status.st_mtime_ns, row_bytes_of(status)))
        return rows

    def unlink(self, rows: Sequence[Row]) -> Sequence[Row]:
        gone = list[Row]()
        for place, some in groupby(rows, key=lambda row: (row.namespace, row.fanout)):
            with self._reading(), self._directory.fanout(*place) as folder:
                gone += filter(None, self._directory.threads.map(partial(self._unlink, folder), some))
        return gone

    def _unlink(self, folder: Folder, row: Row) -> Row | None:
        with self._reading("cannot be deleted"):
            if folder.stat(row.name).st_mtime_ns == row.used_ns:
                folder.unlink(row.name)
                return row
        return None

    def sealed_at(self, rows: Sequence[Row]) -> Sequence[int | None]:
        """Of rows of one fan-out directory."""
        sealed: list[int | None] = [None] * len(rows)
        with self._reading(), self._directory.fanout(rows[0].namespace, rows[0].fanout) as folder:
            sealed[:] = self._directory.threads.map(partial(self._sealed_at, folder), rows)
        return sealed

    def _sealed_at(self, folder: Folder, row: Row) -> int | None:
        with self._reading(), folder.opened(row.name, os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            for tail in TAILS:
                if (seal := read_seal(os.pread(descriptor, tail, max(0, size - tail)))) is not None:
                    return seal.sealed_at
        return None

    def touch(self, row: Row) -> None:
        with self._reading(), self._directory.fanout(row.namespace, row.fanout) as folder:
            self._directory.server_time.touch(row.name, folder.descriptor)

    def refresh_time(self) -> None:
        """Of the server, for ages."""
        with self._reading():
            self._directory.refresh_time()

    # --- a sweep ----------------------------------------------------------------------------------------------------

    def sweep(self) -> Swept:
        """Names and directories of all namespaces, and unfinished files, of which orphans are deleted. Raises OSError
        if anything of it cannot be read."""
        found = Swept()
        with self._directory.base() as base:
            with _unless_gone(), base.folder(INCOMING) as incoming:
                for name in incoming.names():
                    if not self._directory.temp_names.is_in_use(name):
                        self._sweep_unfinished(incoming, name, found)
            for namespace in _namespaces(base):
                with _unless_gone(), base.folder(namespace) as home:
                    self._sweep_namespace(home, namespace, found)
                if not found.rows.get(namespace, (0, 0))[0]:
                    self._remove_empty(base, namespace)
        return found

    def _sweep_namespace(self, home: Folder, namespace: str, found: Swept) -> None:
        names, sizes, directories = 0, list[int](), 1
        for fanout in filter(FANOUT_NAME.fullmatch, home.names()):
            with _unless_gone(), home.folder(fanout) as folder:
                rows = [name for name in folder.names() if _ROW_NAME.fullmatch(name)]
                names += len(rows)
                directories += 1
                for name in rows[: SIZED_ROWS - len(sizes)]:
                    with self._reading():
                        sizes.append(row_bytes_of(folder.stat(name)))
                if not rows:
                    self._remove_empty(home, fanout)
        found.add_rows(namespace, names, sizes or [self._row_bytes])
        if namespace != self._served:
            found.other_bytes += (directories + 1) * PAGE  # and a manifest

    def _remove_empty(self, parent: Folder, name: str) -> None:
        """A directory that has no rows, and is not of the namespace that is served; whoever uses it makes it again."""
        if not self._directory.writes or self._served in (name, parent.path.name):
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
            age_s = self._directory.server_time.now_s() - status.st_mtime
            orphan = TempNames.matches(name) and (self._directory.temp_names.is_orphan(name) or age_s > ORPHAN_S)
            if orphan and self._directory.writes:
                incoming.unlink(name)
                logger.info("deleted %s, an orphan: nobody writes it any more", incoming.path / name)
                return
        except FileNotFoundError:
            return
        except OSError as error:
            self.report(CANNOT_READ, error)
        found.add_unfinished(nbytes, self._row_bytes)

    # --- errors -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self, what: str = CANNOT_READ) -> Iterator[None]:
        with _unless_gone():
            try:
                yield
            except (FileNotFoundError, NotOwned):
                raise
            except OSError as error:
                self.report(what, error)

    def report(self, what: str, error: OSError) -> None:
        """In the log."""
        path = error.filename or self._directory.path
        self._log_once.report(what, f"{path} {what} ({error.strerror or error})")


def _namespaces(base: Folder) -> list[str]:
    return [name for name in base.names() if NAMESPACE_NAME.fullmatch(name)]


def _unless_gone() -> suppress:
    """What has gone, or another user has put there, is left out."""
    return suppress(FileNotFoundError, NotOwned)
