"""A place with namespaces of rows, whatever its layout: what the commands ask of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from nixl_tiers.base.manifest import Manifest

Layout = Literal["slabs", "files", "s3"]
Step = Callable[[int], None]
"""Called with a number of rows that have been looked at."""


class Unusable(Exception):
    """The place cannot be read, or holds no tier. One sentence."""


@dataclass(frozen=True)
class Namespace:
    """One namespace at one place. Times are Unix seconds, None where there is no row or nothing is known."""

    place: str  # the directory or prefix that holds it
    layout: Layout
    name: str  # its digest in hexadecimal; empty: what is at this place cannot be told, for `problem`
    rows: int
    nbytes: int
    oldest_s: float | None = None  # slabs: when rows were sealed; files: when they were last used; s3: written
    newest_s: float | None = None
    last_used_s: float | None = None
    manifest: Manifest | None = None
    holder: str = ""  # which process uses it now, for people; empty: none, as far as that can be known
    unknown_slots: int = 0  # of slabs: without a valid record, so there may be rows in them
    problem: str = ""  # what could not be read, as a sentence


@dataclass(frozen=True)
class Checked:
    """One row that was looked at."""

    name: str
    nbytes: int
    verdict: Literal["ok", "corrupt", "missing", "unreadable", "changed"]
    """`changed`: an engine has replaced or deleted it meanwhile."""
    reason: str = ""


@dataclass(frozen=True)
class Victims:
    """What a purge of a namespace deletes."""

    rows: int
    nbytes: int
    refused: str = ""  # one sentence: why nothing of it is deleted
    problem: str = ""  # what could not be read, as a sentence


class Problems:
    """What could not be read or deleted: the first one as a sentence, and how many others there were."""

    def __init__(self) -> None:
        self._first = ""
        self._count = 0

    def add(self, what: object, error: OSError | str, done: str = "read") -> None:
        """`done`: what could not be done with it."""
        reason = error if isinstance(error, str) else error.strerror or error
        self._first = self._first or f"{what} cannot be {done} ({reason})"
        self._count += 1

    def __str__(self) -> str:
        return self._first + (f", and {self._count - 1} more" if self._count > 1 else "")


class Storage(ABC):
    """Calls raise Unusable if the place cannot be read."""

    @abstractmethod
    def namespaces(self, step: Step, *, old_versions: bool = False) -> list[Namespace]:
        """All that are there now. `old_versions`: of a bucket, each version of an object counts from now on, also of
        those that were deleted."""

    @abstractmethod
    def check(self, namespace: Namespace, pace: Pace) -> Iterator[Checked]:
        """Read every row of it, and verify each."""

    @abstractmethod
    def victims(self, namespace: Namespace, before_s: float | None) -> Victims:
        """What is there that is to be deleted, also what was stored or used after `namespaces` found it, which `delete`
        leaves. `before_s`: Unix seconds; only what was last used, or on S3 written, before; slabs as a whole."""

    @abstractmethod
    def delete(self, namespace: Namespace, before_s: float | None, step: Step) -> str:
        """Delete it, or its rows from before that time. Rows that were stored after `namespaces` found it stay. Returns
        what could not be deleted, as a sentence, or ""."""


class Pace:
    """Bounds how many bytes are read per second, on average since the first."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`bytes_per_s`: None: no bound. `clock`: seconds."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until so many more bytes may be read."""
        if self._bytes_per_s is None:
            return
        now = self._clock()
        if self._free_at_s > now:
            self._sleep(self._free_at_s - now)
        self._free_at_s = max(self._free_at_s, now) + nbytes / self._bytes_per_s
