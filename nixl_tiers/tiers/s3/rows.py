"""Which rows are below a tier's prefix, and which of them go: `PrefixRows` of a private one; a shared one: shared.py.

A row of a private prefix has a place in the quota from when it is listed or about to be uploaded, until the server has
confirmed its delete. What this engine may delete, and when it has to list again, is its tenure's to say (`Ownership`,
lease.py).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import MAX_ENTRIES, MAX_SLOTS, Entry, ExistenceAnswer, Move
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.lease import Ownership
from nixl_tiers.tiers.s3.listing import ExpirySweep, FullListing, Listing
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.quota import PrefixQuota

LEASE_CHECK_S: Final = 1.0  # how often a private prefix's tier looks whether it has got the lease
SWEEP_S: Final = (30.0, 3600.0)  # the shortest and the longest time between two listings for max_age
SWEEPS_PER_AGE: Final = 8
LIST_REQUESTS_AN_HOUR: Final = 2000  # of such a listing: 1 million rows take half an hour


class Rows(ABC):
    """The rows of one tier's prefix, for the mover's loop. Uploads ask for room, and report how they ended. Methods of
    `StorageTier` that are found here mean the same."""

    relist_s: float | None = None
    maintain_s: float | None = None

    def __init__(self, config: S3Config, row_bytes: int, control: S3Control) -> None:
        self._config = config
        self._row_bytes = row_bytes
        self._control = control
        self._namespace = ""
        self.names = RowNames(config.prefix)

    def name(self, key: Key) -> str:
        return self.names.name(self._namespace, key)

    @abstractmethod
    def serve(self, namespace: str, epoch: int) -> None:
        """The rows are those of this namespace from now on."""

    @abstractmethod
    def slots(self, capacity: int) -> int:
        """How many rows the engine may know, where `capacity` may be stored."""

    @property
    @abstractmethod
    def used_bytes(self) -> int: ...

    def list_rows(self) -> Iterator[list[Entry]]:
        return iter(())

    def maintain(self) -> Iterator[list[Entry]]:
        return iter(())

    def check_existence(self, check_id: int, keys: Sequence[Key], chain: bool) -> bool:
        return False

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        return ()

    def found(self) -> Sequence[Entry]:
        return ()

    @property
    def gone_before(self) -> int:
        return 0

    @property
    def busy(self) -> bool:
        """Whether there will soon be answers."""
        return False

    # --- uploads ----------------------------------------------------------------------------------------------------

    def stores_begin(self, moves: Sequence[Move]) -> None:  # noqa: B027 (optional)
        """These rows are going to ask for room."""

    @abstractmethod
    def room_for(self, key: Key, uploads: int) -> Outcome | None:
        """OK if this row may be uploaded now, None if it must wait, else how its store ends. `uploads`: how many rows
        want room, this one among them."""

    @abstractmethod
    def upload_begins(self, key: Key) -> None:
        """After room_for has said OK."""

    @abstractmethod
    def upload_ended(self, key: Key, *, done: bool) -> Outcome:
        """How its store ends. `done`: whether the server has the row for certain."""

    def store_ended(self, key: Key) -> None:  # noqa: B027 (optional)
        """However it did, and whether it was begun or not."""

    # --- what goes --------------------------------------------------------------------------------------------------

    @abstractmethod
    def delete(self, keys: Sequence[Key], uploading: Collection[Key]) -> None:
        """Delete these rows; those that are `uploading` when their upload has ended."""

    @abstractmethod
    def is_missing(self, key: Key) -> None:
        """The row was not there when it was loaded."""

    @abstractmethod
    def is_unusable(self, key: Key) -> None:
        """The row is corrupt, or has expired."""

    @abstractmethod
    def poll(self) -> None:
        """Take what the control thread has done meanwhile."""

    # --- for the manifest, on any thread ----------------------------------------------------------------------------

    @property
    @abstractmethod
    def has_rows(self) -> bool:
        """Whether any row of the namespace is known."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Ask nothing any more."""


class PrefixRows(Rows):
    """Of a private prefix: they are listed, and counted exactly."""

    def __init__(self, config: S3Config, row_bytes: int, control: S3Control, owner: Ownership) -> None:
        super().__init__(config, row_bytes, control)
        self._owner = owner
        capacity = sys.maxsize if owner.reads_only else config.capacity  # whatever others have stored
        self.quota = PrefixQuota(self.names, row_bytes, capacity)
        self.relist_s = None if owner.reads_only else LEASE_CHECK_S
        if config.max_age is not None:
            shortest_s, longest_s = SWEEP_S
            self.maintain_s = min(max(config.max_age / SWEEPS_PER_AGE, shortest_s), longest_s)
        self.tick = 0  # above those of all known rows
        self.listing: Listing | None = None
        self.listed = False  # whether the rows of this namespace are known
        self._epoch = 0
        self._deferred_deletes: set[Key] = set()  # of rows whose upload runs
        self._evicted: set[Key] = set()  # while a listing of a new tenure ran: the core gets them again

    @property
    def used_bytes(self) -> int:
        self.poll()
        return self.quota.used_bytes

    # --- listings ---------------------------------------------------------------------------------------------------

    def serve(self, namespace: str, epoch: int) -> None:
        """Know nothing of this namespace's rows, unless they are still counted; they are listed next."""
        self._deferred_deletes = set()
        self._evicted = set()
        self.tick = 0
        # Rows of an epoch above 0 are never used again, so they go first.
        newest_s = float("-inf") if self._epoch else self._control.connection.server_time_s()
        self._namespace, self._epoch = namespace, epoch
        self.listed = self.quota.serve(namespace, newest_s)
        self._start(None if self.listed else self._full_listing())

    def slots(self, capacity: int) -> int:
        return MAX_SLOTS if self._owner.reads_only else capacity

    def list_rows(self) -> Iterator[list[Entry]]:
        """The entries of the listing that runs, or, in a new tenure, of a new one."""
        if self.listing is None and self._owner.has_new_tenure:
            self._start(self._full_listing())
        yield from self._entries()

    def maintain(self) -> Iterator[list[Entry]]:
        """List the prefix for expired rows, and delete them if this engine may."""
        age_s = self._config.max_age
        if self.listing is None and age_s is not None:
            deleter = self._control if self._owner.may_write else None
            if deleter is None:
                self._owner.forgot_rows()
            served, pause_s = (self._namespace, self._row_bytes), 3600.0 / LIST_REQUESTS_AN_HOUR
            self._start(ExpirySweep(self.quota, self.names, served, max_age_s=age_s, pause_s=pause_s, deleter=deleter))
        yield from self._entries()

    def _entries(self) -> Iterator[list[Entry]]:
        """The entries of the present listing."""
        listing = self.listing
        if listing is None:
            return
        for entries in listing.entries(lambda: self.tick):
            if listing is not self.listing:  # the tier was opened again
                return
            if listing.done.is_set() and isinstance(listing, FullListing):
                self._owner.listing_ended()
            if isinstance(listing, ExpirySweep) and self._owner.has_new_tenure:  # which may take hours
                self._control.start_listing(None)
                listing.done.set()
            self.tick = max([self.tick, *(entry.tick + 1 for entry in entries)])
            yield entries
            if listing is not self.listing:
                return
        self.quota.unwatch()
        if isinstance(listing, FullListing):
            self._owner.listing_ended()
            evicted, self._evicted = [*self._evicted], set()
            for start in range(0, len(evicted), MAX_ENTRIES):
                some = evicted[start : start + MAX_ENTRIES]
                yield [Entry(0, key, self.tick) for key in some if key in self.quota]
                if listing is not self.listing:
                    return
        self.listing = None
        self.listed = True

    def _full_listing(self) -> FullListing:
        tenure = self._owner.coming_tenure

        def begin() -> None:
            """On the control thread: an expiry sweep of an earlier tenure queues nothing after that."""
            if self._owner.is_other(tenure):
                self._control.drop_deletes()
                self.quota.drop_pending_deletes()
            self._owner.listing_begins(tenure)

        return FullListing(
            self.quota,
            self.names,
            (self._namespace, self._row_bytes),
            max_age_s=self._config.max_age,
            deleter=self._control if tenure else None,
            differences_only=self.listed,
            begin=begin,
        )

    def _start(self, listing: Listing | None) -> None:
        self.listing = listing
        self._control.start_listing(listing)

    # --- space -----------------------------------------------------------------------------------------------------

    def stores_begin(self, moves: Sequence[Move]) -> None:
        self.tick = max([self.tick, *(move.tick + 1 for move in moves)])

    def room_for(self, key: Key, uploads: int) -> Outcome | None:
        """None: it must wait for a delete or the lease."""
        soon = self._owner.may_write_soon  # asked first: it ends when the lease is there
        if not self._owner.may_write:
            return None if soon else Outcome.NO_SPACE  # not FAILED: nothing is wrong with the server
        name = self.name(key)
        deleting = self._control.has_pending_deletes
        self.poll()
        # A delete of this name that arrives after the upload would delete the new object.
        if self._control.cancel_delete(name):
            if self.quota.reserve(key, upload=True):
                return Outcome.OK
            if self.quota.is_pending_delete(key):
                self._control.delete([name])
            victims = self.quota.make_room(uploads)
            self._control.delete(victims)
            if not victims and not deleting:
                return Outcome.NO_SPACE
        # The retry may be half a minute away: the job would miss its hard deadline, and the mover be killed.
        return Outcome.FAILED if self._control.deletes_backing_off else None

    def upload_begins(self, key: Key) -> None:
        """What deleted the row before no longer counts."""
        self._deferred_deletes.discard(key)

    def upload_ended(self, key: Key, *, done: bool) -> Outcome:
        self.quota.upload_ended(key)
        # A failed upload may have arrived nevertheless, and would be an orphan that no quota counts.
        if not done or key in self._deferred_deletes:
            self._deferred_deletes.discard(key)
            self._delete_rows(key)
        if not done:
            self._control.transfer_failed()
            self._control.upload_failed()
            return Outcome.FAILED
        self._control.denials.succeeded("put")
        return Outcome.OK

    def delete(self, keys: Sequence[Key], uploading: Collection[Key]) -> None:
        self._delete_rows(*(key for key in keys if key not in uploading))
        self._deferred_deletes.update(key for key in keys if key in uploading)

    def is_missing(self, key: Key) -> None:
        self.quota.forget(key)

    def is_unusable(self, key: Key) -> None:
        """The core has it deleted."""

    def poll(self) -> None:
        if confirmed := self._control.confirmed_deletes():
            self.quota.confirm_deletes(confirmed)

    @property
    def has_rows(self) -> bool:
        return len(self.quota) > 0

    # --- inside -----------------------------------------------------------------------------------------------------

    def _delete_rows(self, *keys: Key) -> None:
        """Delete these rows; only forget them without the right to write."""
        if self._owner.may_queue_deletes:
            self._control.delete([name for key in keys if (name := self.quota.delete(key)) is not None])
        else:
            for key in keys:
                self._hide(key)

    def _hide(self, key: Key) -> None:
        """Forget a row that is there until a new tenure's listing counts it. One that runs may have counted it."""
        if isinstance(self.listing, FullListing) and self._owner.has_counted:
            self._evicted.add(key)
        else:
            self.quota.hide(key)
            self._owner.forgot_rows()
