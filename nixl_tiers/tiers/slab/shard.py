"""One open shard: the locked directory, its journal and its slabs; listing, recovery and expiry of its rows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import MAX_ENTRIES, MAX_SLOTS, Entry, TierDown
from nixl_tiers.tiers.disk import HealthMonitor, describe, probe_name
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.manifests import ManifestMedium, read_manifest
from nixl_tiers.tiers.nixl_agent import Registrar
from nixl_tiers.tiers.slab.expiry import Expiry, until
from nixl_tiers.tiers.slab.journal import Journal, journal_bytes
from nixl_tiers.tiers.slab.layout import SlabLayout, describe_layout, described
from nixl_tiers.tiers.slab.parts import ShardDir
from nixl_tiers.tiers.slab.shards import JOURNAL, ROWS, Shards
from nixl_tiers.tiers.slab.slabs import SealedRow, SealScan, Slabs, detect_layout, read_seals

logger = logging.getLogger(__name__)

_MARGIN_BYTES: Final = 256 << 10  # directories, locks, extent trees: what is on the disk beside rows and journal


class Shard:
    """Methods are for the mover's own thread unless they say otherwise."""

    def __init__(
        self,
        directory: ShardDir,
        slots: int,
        sealer: Sealer,
        agent: Registrar,
        quota: Shards,
        *,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.time,
        times: Times = PRODUCTION,
    ) -> None:
        """`clock`: Unix seconds. Raises OSError, and TierDown if there is no room for one more journal."""
        self.sealer = sealer
        self._directory = directory
        self.path = directory.path
        self._quota = quota
        self.clock = clock
        layout = self._layout(slots)
        self.slabs = Slabs(directory.folder, layout, agent, quota)  # tries the disk out before anything is renamed
        description = describe_layout(sealer.geometry, layout)
        if directory.description != description:  # not written needlessly: a full disk must still serve its rows
            directory.describe(description)
        self.journal = Journal(directory.folder, layout.slots, self.slabs.allocated())
        try:
            self.journal.file.grow(self.slabs.end)
        except OSError as error:
            reason = f"{self.path}: no room for records ({describe(error)})"
            logger.warning("%s: at a restart, seals are read of what is stored now", reason)
        self.listed = False
        """Whether `list_rows` has ended: the journal knows all rows, as far as that is possible."""
        self.expiry = Expiry(self, quota, max_age_s, clock)
        self._scan: SealScan | None = None
        self._log_once = LogOnce(logger)
        self._store_failed = False
        self.store_problem = ""
        """Why rows cannot be stored now, unless the disk is full."""
        self.health = HealthMonitor(self._check, times.disk_check_s)

    def _layout(self, slots: int) -> SlabLayout:
        """The layout of what is there, with `slots` slots if that fits; a new one if nothing of it can be used. Raises
        TierDown, OSError."""
        directory, sealer, quota = self._directory, self.sealer, self._quota
        geometry, found = described(directory.description) or (None, None)
        found = found if geometry == sealer.geometry else None
        layout = replace(found, slots=slots) if found is not None else None
        if not directory.description:
            layout = detect_layout(directory.folder, sealer, slots)
            if layout is not None:
                logger.warning("%s has lost its description, which is recovered from the seals", self.path)
                # Its slot numbers may be those of another layout.
                directory.folder.unlink_matching(JOURNAL)
            elif problem := quota.make_room(journal_bytes(slots)):
                raise TierDown(problem)
        elif found and slots > found.slots and quota.make_room(journal_bytes(slots) - journal_bytes(found.slots)):
            layout = found  # the larger journal does not fit
        if layout is None:
            # It holds no row of ours: rows of another shape, or files without a description or a valid seal.
            directory.folder.unlink_matching(ROWS)
            layout = SlabLayout.of(sealer.geometry.row_bytes, slots)
        return layout

    def grow(self, slot: int) -> None:
        """Allocate the extent of the slot, in the journal too. On a thread that may wait. Raises OSError."""
        self.journal.file.grow(slot + self.slabs.layout.extent_slots)
        self.slabs.grow(slot)

    # --- listing ----------------------------------------------------------------------------------------------------

    def list_rows(self) -> Iterator[Sequence[Entry]]:
        """Once: the rows in it, from the journal and, where that is incomplete, from the seals. See StorageTier."""
        last_tick = 0
        for batch in self.journal.list_rows():
            if batch:
                last_tick = batch[-1].tick  # they are in order of use
            yield batch
        unknown = self.slabs.allocated() & ~self.journal.known
        if unknown.any():
            yield from self._recover(unknown, last_tick)
        else:
            self.journal.complete = True
        self.listed = True

    def _recover(self, unknown: NDArray[np.bool_], last_tick: int) -> Iterator[list[Entry]]:
        """The rows in unknown slots, by their seals, as more recent than `last_tick`: those stored last are the ones
        that a crash leaves without a record."""
        scan = self._scan = SealScan(self.slabs.select(np.flatnonzero(unknown)), self.sealer)
        while not scan.done:
            yield []
        rows = scan.rows
        duplicates = yield from until(
            self.journal.threads.submit(lambda: self.journal.duplicates([row.key for row in rows]))
        )
        for start in range(0, len(rows), MAX_ENTRIES):
            batch = []
            for number, row in enumerate(rows[start : start + MAX_ENTRIES], start):
                if duplicates[number]:
                    self.journal.mark_garbage(row.slot, row.sealed_at)
                else:
                    batch.append((row.slot, row.key, last_tick + 1 + number, row.sealed_at))
            if batch:
                error = abs((yield from until(self.journal.threads.submit(self.journal.record, batch))))
                self.journal.stored([(slot, key, sealed_at, error) for slot, key, _, sealed_at in batch])
                yield [Entry(slot, key, tick) for slot, key, tick, _ in batch]
        if rows:
            logger.info("%s: recovered %d rows by their seals", self.path, len(rows))
        if not scan.failed:
            # Bytes without a seal may be part of a row all the same: they age from now on.
            self.journal.mark_empty(unknown, int(self.clock()))
            self.journal.complete = True

    def read_seals(self, slots: list[int]) -> list[SealedRow]:
        """The seals in these slots, which are in order. On a thread that may wait. Raises OSError."""
        return [row for selected in self.slabs.select(slots) for row in read_seals(selected, self.sealer)]

    # --- loads ------------------------------------------------------------------------------------------------------

    def may_hold_row(self, slot: int) -> bool:
        if not self.slabs.is_allocated(slot) or slot in self.expiry.erasing:
            return False
        return not self.listed or bool(self.journal.sealed_at[slot])

    # --- failures ---------------------------------------------------------------------------------------------------

    def store_failed(self) -> None:
        """Not for lack of space. The next health check, which is due now, finds out why."""
        self._store_failed = True
        self.health.check_soon()

    def load_failed(self) -> None:
        self._log_once.report("load", f"{self.path}: rows cannot be read; the kernel's log may tell why")
        self.health.check_soon()

    def _check(self) -> str:
        """On the health monitor's thread: a problem of any of the files, or ""."""
        problem = self._directory.problem() or self.journal.file.problem() or self.slabs.problem()
        if self._store_failed and not problem:
            self._store_failed = False
            self.store_problem = f"{self.path}: rows cannot be written ({_write_error(self._directory.folder)})"
            self._log_once.report("store", self.store_problem)
        return problem

    def close(self) -> None:
        """Write what is pending, as far as that is possible; then `release` it."""
        self.expiry.close()
        self.health.close()
        if self._scan is not None:
            self._scan.stop()
        if self.journal.complete:
            self.journal.mark_empty(self.slabs.allocated())  # so that the next open need not look for seals in them
        self.journal.close()
        self.slabs.close()

    def release(self) -> None:
        """It is not served any more, and nothing uses it: else the exit of the process does this."""
        self._directory.release()


class ShardManifests(ManifestMedium):
    """For one open shard, whose margin has room for it."""

    def __init__(self, shard: Shard, directory: ShardDir) -> None:
        self._shard = shard
        self._directory = directory

    def is_wanted(self) -> bool:
        return not self._shard.health.problem

    def read(self) -> bytes | None:
        return read_manifest(self._directory.folder)

    def write(self, raw: bytes) -> bool:
        self._directory.write(MANIFEST_NAME, raw)
        return True


def slots_within(capacity_bytes: int, row_bytes: int) -> int:
    """How many rows fit, with their journal and everything else that a namespace takes."""
    fit = (capacity_bytes - journal_bytes(0) - _MARGIN_BYTES) // (row_bytes + journal_bytes(1) - journal_bytes(0))
    return min(fit, MAX_SLOTS)


def _write_error(folder: Folder) -> str:
    """Why rows cannot be written, which NIXL does not report: the error of writing a page here."""
    name = probe_name()
    try:
        with os.fdopen(folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb", 0) as file:
            file.write(bytes(PAGE))
            os.fsync(file.fileno())
    except OSError as error:
        return describe(error)
    finally:
        with suppress(OSError):
            folder.unlink(name)
    return "though other files can; the kernel's log may tell why"
