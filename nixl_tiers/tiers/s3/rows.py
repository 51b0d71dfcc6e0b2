"""PrefixRows: which rows are below a tier's prefix, found by listings, and which of them go.

A row has a place in the quota from when it is listed, found or about to be uploaded, until the server has confirmed its
delete. What this engine may delete, and when it has to list again, is its tenure's to say (`Ownership`, lease.py).
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Collection, Iterator, Sequence

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, ExistenceAnswer
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.existence import Answer
from nixl_tiers.tiers.s3.lease import Ownership
from nixl_tiers.tiers.s3.listing import ExpirySweep, FullListing, Listing, Relisting
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.quota import PrefixQuota
from nixl_tiers.tiers.s3.usage import UploadQuota


class PrefixRows:
    """The rows of one tier's prefix. Uploads ask it for room, and report how they ended."""

    def __init__(self, config: S3Config, row_bytes: int, control: S3Control, owner: Ownership) -> None:
        self._config = config
        self._row_bytes = row_bytes
        self._control = control
        self._owner = owner
        self.names = RowNames(config.prefix)
        self.upload_quota = UploadQuota(uuid.uuid4().hex, config.capacity, row_bytes) if config.shared else None
        self.quota = self._new_quota()
        self.tick = 0  # above those of all known rows
        self.unusable: set[Key] = set()  # corrupt or expired: deleted on request, also on a shared prefix
        self.listing: Listing | None = None
        self.listed = False  # whether the rows of this namespace are known
        self._namespace, self._epoch = "", 0
        self._deferred_deletes: set[Key] = set()  # of rows whose upload runs
        self._evicted: set[Key] = set()  # while a listing of a new tenure ran: the core gets them again

    def name(self, key: Key) -> str:
        return self.names.name(self._namespace, key)

    @property
    def used_bytes(self) -> int:
        self.count_confirmed_deletes()
        shared = None if self.upload_quota is None else self.upload_quota.used_bytes
        return self.quota.used_bytes if shared is None else shared

    # --- listings ---------------------------------------------------------------------------------------------------

    def serve(self, namespace: str, epoch: int) -> None:
        """Know nothing of this namespace's rows, unless they are still counted; they are listed next."""
        self._deferred_deletes = set()
        self.unusable = set()
        self._evicted = set()
        self.tick = 0
        if self.upload_quota is not None:
            self.quota = self._new_quota()
        # Rows of an epoch above 0 are never used again, so they go first.
        newest_s = float("-inf") if self._epoch else self._control.connection.server_time_s()
        self._namespace, self._epoch = namespace, epoch
        self.listed = self.quota.serve(namespace, newest_s)
        self._start(None if self.listed else self._full_listing())

    def list_again(self) -> Iterator[list[Entry]]:
        """The entries of the listing that runs, or of a new one if it is time for it: of a shared prefix always, of a
        private one in a new tenure."""
        if self.listing is None and self.upload_quota is not None:
            served, age_s = (self._namespace, self._row_bytes), self._config.max_age
            self._start(Relisting(self.quota, self.names, served, max_age_s=age_s, pause_s=self.page_pause_s))
        elif self.listing is None and self._owner.has_new_tenure:
            self._start(self._full_listing())
        yield from self._entries()

    def sweep(self) -> Iterator[list[Entry]]:
        """List a private prefix for expired rows, and delete them if this engine may."""
        age_s = self._config.max_age
        if self.listing is None and self.upload_quota is None and age_s is not None:
            deleter = self._control if self._owner.may_write else None
            if deleter is None:
                self._owner.forgot_rows()
            served, pause_s = (self._namespace, self._row_bytes), self.page_pause_s
            self._start(ExpirySweep(self.quota, self.names, served, max_age_s=age_s, pause_s=pause_s, deleter=deleter))
        yield from self._entries()

    @property
    def page_pause_s(self) -> float:
        return 3600.0 / self._config.list_requests_per_hour

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
        private, tenure = self.upload_quota is None, self._owner.coming_tenure

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
            whole=private,
            max_age_s=self._config.max_age,
            deleter=self._control if private and tenure else None,
            differences_only=self.listed,
            begin=begin,
        )

    def _start(self, listing: Listing | None) -> None:
        self.listing = listing
        self._control.start_listing(listing)

    # --- space -----------------------------------------------------------------------------------------------------

    def room_for(self, key: Key, uploads: int) -> Outcome | None:
        """OK if this row may be uploaded now, None if it must wait for a delete or the lease, else how its store ends.
        `uploads`: how many rows want room, this one among them."""
        soon = self._owner.may_write_soon  # asked first: it ends when the lease is there
        if not self._owner.may_write:
            return None if soon else Outcome.NO_SPACE  # not FAILED: nothing is wrong with the server
        name = self.name(key)
        deleting = self._control.has_pending_deletes
        self.count_confirmed_deletes()
        # A delete of this name that arrives after the upload would delete the new object.
        if self._control.cancel_delete(name):
            if self.upload_quota is not None and not self.upload_quota.try_acquire(self._row_bytes):
                return Outcome.NO_SPACE
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
        """After room_for has said OK: what deleted the row before no longer counts."""
        self._deferred_deletes.discard(key)

    def upload_ended(self, key: Key, *, done: bool) -> Outcome:
        """How its store ends. `done`: whether the server has the row for certain."""
        self.quota.upload_ended(key)
        if self.upload_quota is not None:
            self.upload_quota.upload_ended(self._row_bytes)
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

    def found(self, answer: Answer) -> ExistenceAnswer:
        """Count the rows that an existence check has found."""
        for key in answer.found:
            self.quota.reserve(key)
            self._deferred_deletes.discard(key)
        return ExistenceAnswer(answer.check_id, [Entry(0, key, self.tick) for key in answer.found], answer.absent)

    def delete(self, keys: Sequence[Key], uploading: Collection[Key]) -> None:
        """Delete these rows; those that are `uploading` when their upload has ended."""
        self._delete_rows(*(key for key in keys if key not in uploading))
        self._deferred_deletes.update(key for key in keys if key in uploading)

    def count_confirmed_deletes(self) -> None:
        if confirmed := self._control.confirmed_deletes():
            self.quota.confirm_deletes(confirmed)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _delete_rows(self, *keys: Key) -> None:
        """Delete these rows. Only forget them without the right to write, and on a shared prefix unless they are
        unusable."""
        may_delete = self._owner.may_queue_deletes
        if self.upload_quota is not None or not may_delete:
            kept = set(keys) - self.unusable if may_delete else set(keys)
            for key in kept:
                if self.upload_quota is None:
                    self._hide(key)
                else:
                    self.quota.forget(key)
            keys = tuple(key for key in keys if key not in kept)
        self.unusable.difference_update(keys)
        self._control.delete([name for key in keys if (name := self.quota.delete(key)) is not None])

    def _hide(self, key: Key) -> None:
        """Forget a row that is there until a new tenure's listing counts it. One that runs may have counted it."""
        if isinstance(self.listing, FullListing) and self._owner.has_counted:
            self._evicted.add(key)
        else:
            self.quota.hide(key)
            self._owner.forgot_rows()

    def _new_quota(self) -> PrefixQuota:
        # The budget of a shared prefix is enforced by the janitor, and that of others' rows by others.
        limited = self.upload_quota is None and not self._owner.reads_only
        capacity = self._config.capacity if limited else sys.maxsize
        return PrefixQuota(self.names, self._row_bytes, capacity)
