"""The rows that tiers have stored, as commands see them beside running engines: `inspect` and `purge`.

A tier exports a function that finds what is stored at its place (`StorageConfig.stored_rows`). Nothing is written but
by `delete`, no lock is held but for a moment, and it does not matter whose the rows are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry, Key
from nixl_tiers.base.manifest import Manifest
from nixl_tiers.config.kinds import import_object, in_one_line
from nixl_tiers.config.tier import StorageConfig
from nixl_tiers.memory import seal
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import TierRefused
from nixl_tiers.tiers.folder import NotOwned

Step = Callable[[int], None]
"""Called with a number: of rows that were deleted, of bytes that are about to be read."""

_REASONS: Final = {
    Verdict.NOT_A_SEAL: "it has no seal",
    Verdict.VERSION: "its seal has a format that this version does not know",
    Verdict.NAMESPACE: "it belongs to another namespace",
    Verdict.KEY: "it is another chunk",
    Verdict.SHAPE: "it has another size than its seal says",
    Verdict.DIGEST: "its bytes are not those that were sealed",
}


def find_stored(config: StorageConfig, before_s: float | None = None) -> Iterable[StoredNamespace]:
    """All namespaces that are at the place of a tier now, whichever engine has stored them. `before_s`: None: to look
    at. Else for a purge: what is to be deleted, which is what was last used, or on S3 written, before that time (Unix
    seconds; slabs as a whole), in each version that the medium keeps. Raises TierDown, TierRefused."""
    try:
        find = import_object(config.stored_rows)
    except Exception as error:
        what = f'type: "{config.type}": its stored_rows "{config.stored_rows}"'
        raise TierRefused(f"{what} cannot be imported ({in_one_line(error)})") from error
    found: Iterable[StoredNamespace] = find(config, before_s)
    return found


@dataclass
class StoredNamespace(ABC):
    """One namespace at one place, as it was when it was found. Times are Unix seconds, None where there is no row or
    nothing is known. Calls raise TierDown, TierRefused; what else they cannot read or delete is in `problem` then."""

    place: str  # the directory or prefix that holds it
    name: str  # its digest in hexadecimal; empty: what is at this place cannot be told, for `problem`
    before_s: float | None = None  # as given to `find_stored`: what else is there does not count
    rows: int = 0
    nbytes: int = 0
    oldest_s: float | None = None  # slabs: when rows were sealed; files: when they were last used; s3: written
    newest_s: float | None = None
    last_used_s: float | None = None
    manifest: Manifest | None = None
    holder: str = ""  # which process uses it now, for people; empty: none, as far as that can be known
    unknown_slots: int = 0  # of slabs after a crash: without a valid record, so there may be rows in them
    refused: str = ""  # why a purge deletes nothing of it, as a sentence
    problem: str = ""  # what could not be read or deleted, as a sentence

    layout: ClassVar[str]

    def include(self, oldest_s: float, newest_s: float) -> None:
        """Rows of these times are in it."""
        self.oldest_s = oldest_s if self.oldest_s is None else min(self.oldest_s, oldest_s)
        self.newest_s = newest_s if self.newest_s is None else max(self.newest_s, newest_s)

    @abstractmethod
    def check(self, before_read: Step) -> Iterator[CheckedRow]:
        """Read every row, and verify each. `before_read` is called with how many bytes are read next, and may wait."""

    @abstractmethod
    def delete(self, step: Step) -> None:
        """Delete what was counted. What was stored or used since stays."""


@dataclass(frozen=True)
class CheckedRow:
    """One row that was looked at."""

    name: str
    nbytes: int  # that were read
    verdict: Literal["ok", "corrupt", "missing", "unreadable", "changed"]
    """`changed`: an engine has replaced or deleted it meanwhile."""
    reason: str = ""


@dataclass(frozen=True)
class StoredRow:
    key: Key
    name: str  # for people
    nbytes: int  # that it takes
    time_s: float  # when it was last used, or written


R = TypeVar("R", bound=StoredRow)


class NamespaceByKey(StoredNamespace, Generic[R]):
    """Of a medium that keeps each row by itself, found by its key: as a file, an object."""

    @abstractmethod
    def stored(self, problems: Problems) -> Iterator[R]:
        """The rows that are there now. What is deleted meanwhile is no problem. Each may be used until the next."""

    @abstractmethod
    def read(self, row: R) -> NDArray[np.uint8] | None:
        """All of it; None if it has gone. Raises OSError."""

    def count(self, row: R) -> None:
        if self.before_s is None or row.time_s < self.before_s:
            self.rows += 1
            self.nbytes += row.nbytes
            self.include(row.time_s, row.time_s)

    def tell_last_use(self) -> None:
        """By its newest row and its manifest."""
        manifest_s = None if self.manifest is None else float(self.manifest.last_used)
        self.last_used_s = max((at for at in (self.newest_s, manifest_s) if at is not None), default=None)

    def check(self, before_read: Step) -> Iterator[CheckedRow]:
        problems = Problems()
        for row in self.stored(problems):
            before_read(row.nbytes)
            try:
                found = self.read(row)
            except OSError as error:
                yield CheckedRow(row.name, 0, "unreadable", reason(error))
                continue
            if found is None:
                yield CheckedRow(row.name, 0, "changed")
            else:
                why = defect(found, bytes.fromhex(self.name), row.key)
                yield CheckedRow(row.name, len(found), "corrupt" if why else "ok", why)
        self.problem = str(problems) or self.problem

    def counted(self, problems: Problems) -> Iterator[R]:
        """For `delete`: the rows that were counted, but for those that were used or written since."""
        return (row for row in self.stored(problems) if self.newest_s is not None and row.time_s <= self.newest_s)


class Problems:
    """What could not be read or deleted: the first one as a sentence, and how many others there were."""

    def __init__(self) -> None:
        self._first = ""
        self._count = 0

    def add(self, what: object, error: OSError | str, done: str = "read") -> None:
        """`done`: what could not be done with it."""
        why = reason(error) if isinstance(error, OSError) else error
        self._first = self._first or f"{what} cannot be {done} ({why})"
        self._count += 1

    @contextmanager
    def reading(self, what: object, done: str = "read") -> Iterator[None]:
        """An OSError of the block is a problem, unless that has gone, or something foreign is in its place."""
        try:
            yield
        except (FileNotFoundError, NotOwned):
            pass
        except OSError as error:
            self.add(what, error, done)

    def __str__(self) -> str:
        return self._first + (f", and {self._count - 1} more" if self._count > 1 else "")


def reason(error: OSError) -> str:
    return error.strerror or str(error)


def defect(row: NDArray[np.uint8], namespace: bytes, key: Key, geometry: Geometry | None = None) -> str:
    """Why this is not the row of that key, in words; "": it is. `geometry`: as it must be; None: as its seal says."""
    found = seal.find(row)
    if found is None:
        return _REASONS[Verdict.NOT_A_SEAL]
    # The namespace covers the epoch, so the seal's own epoch is the one to compare with.
    verdict = Sealer(geometry or found.geometry, namespace, found.epoch).verify(row, key)
    return "" if verdict is Verdict.OK else _REASONS[verdict]
