"""Which rows are deleted for their age (`max_age`), of all namespaces: all seals are read from time to time.

A modification time is when a row was last used, so only its seal tells how old it is; nothing is remembered of seals,
and a row that was not used for `max_age` needs none. A pass begins every tenth of `max_age`, a minute at least, so a
row is there for so much longer, and for as long as a pass takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Final

from nixl_tiers.tiers.base import SWEEPS_PER_AGE, expire_if_due
from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.evict import Row, rotated

if TYPE_CHECKING:
    from nixl_tiers.tiers.rowfile.contents import Contents

MIN_PASS_S: Final = 60.0
MAX_AHEAD_S: Final = 60.0  # no file is ahead of its server's clock by more, unless that was put back


def age_from(sealed_at: int | None, used_ns: int) -> float:
    """When the age of a row begins, in Unix seconds: at its sealing. Its modification time is when it was last used,
    and counts only without a seal (None). But a seal that is ahead of that was made by a clock that is ahead of the
    file server's: then that time is when the row was written, and is kept (such a row is not touched when used)."""
    return used_ns / 1e9 if sealed_at is None else min(sealed_at, used_ns / 1e9)


class Expiry:
    """On the thread that sweeps."""

    def __init__(self, files: Contents, budget: Budget, max_age_s: float, random: Random) -> None:
        self._files = files
        self._budget = budget
        self._max_age_s = max_age_s
        self._random = random
        self.pass_s = max(MIN_PASS_S, max_age_s / SWEEPS_PER_AGE)
        """Between the beginnings of two passes."""

    def steps(self, server_s: Callable[[], float]) -> Iterator[None]:
        """One pass, a fan-out directory of all namespaces at a time. `server_s`: Unix time by the file server."""
        for fanout in rotated(self._random):
            for namespace in self._files.namespaces():
                self._check(self._files.rows(namespace, fanout), server_s())
            yield

    def _check(self, rows: Sequence[Row], server_s: float) -> None:
        used = [row for row in rows if not expire_if_due(row.used_ns / 1e9, server_s, self._max_age_s)]
        begins = {row: age_from(at, row.used_ns) for row, at in zip(used, self._files.sealed_at(used), strict=False)}
        self._delete(
            [row for row in rows if expire_if_due(begins.get(row, row.used_ns / 1e9), server_s, self._max_age_s)]
        )
        self._files.touch([row for row, at in begins.items() if at > server_s + MAX_AHEAD_S])

    def _delete(self, rows: Sequence[Row]) -> None:
        for row in self._files.unlink(rows):
            self._budget.evicted(row.namespace, row.nbytes)
