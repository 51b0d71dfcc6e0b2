"""The S3 tier: one object per row below `<prefix>/<namespace>/`, each transferred by NIXL with a handle of its own.

Two weaknesses of NIXL's object backend are handled here (both were reproduced):
- a failed download leaves the server's error page in the buffer, and a short object counts as done: downloads go to
  private staging rows. They are verified and copied into the region in one pass, so that the bytes of a row that counts
  as loaded are those that were verified;
- a retry inside its AWS library appends to the bytes of the failed attempt, so one "slow down" corrupts a download
  whose second attempt succeeded: a download that was answered with anything but a row is retried once.

A private prefix: one engine owns it by a lease (lease.py); the tier of another one only reads, and lists again when it
gets the lease. The quota counts every row below it, of any namespace. Space counts as free when the server has
confirmed the deletes, so the bucket never holds more than the capacity, and the uploads of an owner that is replaced.

A shared prefix: rows that others store are found by periodic listings and existence checks. Rows that the core
deletes only leave its index, since others may use them: the janitor (janitor.py) deletes, and grants uploads.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nixl_tiers.chunk import Geometry, Key, Outcome
from nixl_tiers.config.schema import S3Config
from nixl_tiers.manifest import Description
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import (
    MAX_ENTRIES,
    MAX_SLOTS,
    Entry,
    ExistenceAnswer,
    FinishedBatch,
    Move,
    StorageTier,
    seal_row,
)
from nixl_tiers.tiers.expiry import has_expired
from nixl_tiers.tiers.manifest_keeper import ManifestKeeper
from nixl_tiers.tiers.moves import MovePipeline, MoveQueue, Steps, Unit
from nixl_tiers.tiers.nixl_agent import TransferState
from nixl_tiers.tiers.s3.concurrency import PollPace, TransferLimit
from nixl_tiers.tiers.s3.conditional import small_object
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.data import ERROR_PAGE_BYTES, ObjectTransfer, S3Data
from nixl_tiers.tiers.s3.existence import Answer, ExistenceChecker
from nixl_tiers.tiers.s3.janitor import Janitor, JanitorIntervals
from nixl_tiers.tiers.s3.listing import ExpirySweep, FullListing, Listing, Relisting
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.ownership import Ownership
from nixl_tiers.tiers.s3.quota import PrefixQuota
from nixl_tiers.tiers.s3.usage import UploadQuota

TRIES: Final = 2
RELIST_S: Final = 30.0  # between two listings of a shared prefix
SWEEP_S: Final = 3600.0  # the longest time between two listings of a private prefix for max_age
SWEEPS_PER_AGE: Final = 8
INTERVALS: Final = JanitorIntervals()
MANIFEST_CHECK_S: Final = 2.0  # how often it is looked whether there are rows to describe
LEASE_CHECK_S: Final = 1.0  # how often a private prefix's tier looks whether it has got the lease


class S3Tier(StorageTier):
    """Rows as objects of one bucket. Slots are only a count: an object is found by its key."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion) -> None:
        """Uses neither NIXL nor the network; `open` does."""
        self._config = config
        self._geometry = geometry
        self._region = region
        self._row_bytes = geometry.row_bytes
        self._data = S3Data(config, geometry, region)
        self._owner = Ownership(config)
        self._control = S3Control(config, lambda: self._owner.may_delete)
        self._existence = ExistenceChecker(lambda key: self._control.exists(self._name(key), self._row_bytes))
        self._upload_quota = UploadQuota(uuid.uuid4().hex, config.capacity, self._row_bytes) if config.shared else None
        self._janitor: Janitor | None = None
        self._names = RowNames(config.prefix)
        self._quota = self._new_quota()
        self._unusable: set[Key] = set()  # corrupt or expired: deleted on request, also on a shared prefix
        self._sealer: Sealer | None = None
        self._namespace, self._epoch = "", 0
        self._listing: Listing | None = None
        self._listed = False  # whether the rows of this namespace are known
        self._tick = 0  # above those of all known rows
        self._pace = PollPace()
        most = config.max_transfers
        self._downloads, self._uploads = TransferLimit(most), TransferLimit(most)
        self._moves = MovePipeline(
            MoveQueue(limit=most, admit=self._admit_load, run=self._run_load),
            MoveQueue(limit=most, admit=self._admit_store, run=self._run_store),
            may_start=self._may_start,
            held_until_s=lambda: region.stores_held_until_s,
        )
        self._deferred_deletes: set[Key] = set()  # of rows whose upload runs
        self._description: Description | None = None
        self._evicted: set[Key] = set()  # while a listing of a new tenure ran: the core gets them again

    def identify(self, engine: str) -> None:
        self._owner.engine = engine

    def describe(self, description: Description) -> None:
        self._description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        self._control.set_chore(None)
        credentials = self._control.connect()
        self._data.connect(credentials, self._control.region.name)
        self._sealer = Sealer(self._geometry, namespace, epoch)
        self._existence.clear()
        self._deferred_deletes = set()
        self._unusable = set()
        self._evicted = set()
        self._tick = 0
        if self._upload_quota is not None:
            self._quota = self._new_quota()
        self._owner.start(self._control)
        # Rows of an epoch above 0 are never used again, so they go first.
        newest_s = float("-inf") if self._epoch else self._control.server_time_s()
        self._namespace, self._epoch = namespace.hex(), epoch
        self._listed = self._quota.serve(self._namespace, newest_s)
        self._start_listing(None if self._listed else self._full_listing())
        self._keep_manifest(namespace, epoch)
        slots = min(self._config.capacity // self._row_bytes, MAX_SLOTS)
        if self._upload_quota is None:
            return slots
        if self._janitor is None and not self._owner.reads_only:
            bucket, prefix = self._control, self._config.prefix
            self._janitor = Janitor(
                lambda: bucket.client,
                self._config.bucket,
                prefix,
                quota=self._upload_quota,
                intervals=INTERVALS,
                denials=self._control.denials,
                max_age_s=self._config.max_age,
            )
            self._janitor.start()
        # The index must hold all rows below the prefix, upload windows included, or each listing would repeat the rest.
        return min(2 * slots, MAX_SLOTS)

    @property
    def relist_s(self) -> float | None:
        if self._upload_quota is not None:
            return max(RELIST_S, self._page_pause_s)
        return None if self._owner.reads_only else LEASE_CHECK_S

    def list_rows(self) -> Iterator[list[Entry]]:
        if self._listing is None and self._upload_quota is not None:
            served, age_s = (self._namespace, self._row_bytes), self._config.max_age
            self._start_listing(
                Relisting(self._quota, self._names, served, max_age_s=age_s, pause_s=self._page_pause_s)
            )
        elif self._listing is None and self._owner.has_new_tenure:
            self._start_listing(self._full_listing())
        yield from self._listed_rows()

    def maintain(self) -> Iterator[list[Entry]]:
        """On a private prefix: delete expired rows. On a shared one, the janitor does."""
        age_s = self._config.max_age
        if self._listing is None and self._upload_quota is None and age_s is not None:
            deleter = self._control if self._owner.may_write else None
            served, pause_s = (self._namespace, self._row_bytes), self._page_pause_s
            self._start_listing(
                ExpirySweep(self._quota, self._names, served, max_age_s=age_s, pause_s=pause_s, deleter=deleter)
            )
        yield from self._listed_rows()

    @property
    def maintain_s(self) -> float | None:
        age_s = self._config.max_age
        if age_s is None or self._upload_quota is not None:
            return None
        return min(max(age_s / SWEEPS_PER_AGE, RELIST_S), SWEEP_S)

    @property
    def _page_pause_s(self) -> float:
        return 3600.0 / self._config.list_requests_per_hour

    def _listed_rows(self) -> Iterator[list[Entry]]:
        """The entries of the present listing."""
        listing = self._listing
        if listing is None:
            return
        for entries in listing.entries(lambda: self._tick):
            if listing is not self._listing:  # the tier was opened again
                return
            if listing.done.is_set() and isinstance(listing, FullListing):
                self._owner.listing_ended()
            if isinstance(listing, ExpirySweep) and self._owner.has_new_tenure:  # which may take hours
                self._control.start_listing(None)
                listing.done.set()
            self._tick = max([self._tick, *(entry.tick + 1 for entry in entries)])
            yield entries
            if listing is not self._listing:
                return
        self._quota.unwatch()
        if isinstance(listing, FullListing):
            self._owner.listing_ended()
            evicted, self._evicted = [*self._evicted], set()
            for start in range(0, len(evicted), MAX_ENTRIES):
                some = evicted[start : start + MAX_ENTRIES]
                yield [Entry(0, key, self._tick) for key in some if key in self._quota]
                if listing is not self._listing:
                    return
        self._listing = None
        self._listed = True

    def store(self, moves: Sequence[Move]) -> int:
        self._tick = max([self._tick, *(move.tick + 1 for move in moves)])
        self._pace.hurry()
        return self._moves.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        self._pace.hurry()
        return self._moves.load(moves)

    def poll(self) -> list[FinishedBatch]:
        self._count_confirmed_deletes()
        now = time.monotonic()
        if self._pace.wait_s(now) <= 0:
            self._moves.poll()
            self._data.reap()
            directions = ((self._downloads, self._moves.loads), (self._uploads, self._moves.stores))
            times = (limit.typical_s for limit, queue in directions if queue.running)
            self._pace.polled(now, self._data.running, times)
        self._moves.start()
        return self._moves.take()

    def give_up_waiting(self) -> None:
        """The lease is handed over when nothing runs."""
        self._moves.give_up()

    def check_existence(self, check_id: int, keys: Sequence[Key], chain: bool) -> bool:
        if self._upload_quota is None:
            return False
        self._existence.start(check_id, keys, chain=chain)
        return True

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        return [self._found(answer) for answer in self._existence.answers()]

    def _found(self, answer: Answer) -> ExistenceAnswer:
        for key in answer.found:
            self._quota.reserve(key)
            self._deferred_deletes.discard(key)
        return ExistenceAnswer(answer.check_id, [Entry(0, key, self._tick) for key in answer.found], answer.absent)

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        uploading = self._uploading
        self._delete_rows(*(key for _, key in entries if key not in uploading))
        self._deferred_deletes.update(key for _, key in entries if key in uploading)

    @property
    def busy(self) -> bool:
        return self._moves.busy or self._data.busy or self._existence.busy

    @property
    def poll_s(self) -> float:
        return 0.0 if self._existence.busy else max(self._pace.wait_s(time.monotonic()), self._moves.poll_s)

    @property
    def denials(self) -> Mapping[str, str]:
        return self._control.denials.current()

    @property
    def used_bytes(self) -> int:
        self._count_confirmed_deletes()
        shared = None if self._upload_quota is None else self._upload_quota.used_bytes
        return self._quota.used_bytes if shared is None else shared

    def close(self) -> None:
        if self._janitor is not None:
            self._janitor.close()
            self._janitor = None
        self._existence.close()
        self._control.close()
        self._data.close()
        self._owner.close(release=self._control.idle and not self._data.busy)

    # --- moving rows ------------------------------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """New credentials need a new agent; the old one is released when nothing of it runs, and starts nothing."""
        if self._data.credentials is None:
            self._moves.give_up()
            return False
        credentials = self._control.credentials
        if credentials is not None and credentials != self._data.credentials:
            if self._data.busy:
                return False
            self._data.connect(credentials, self._control.region.name)
        return True

    @property
    def _uploading(self) -> set[Key]:
        return {move.key for unit in self._moves.stores.running for move in unit.moves}

    def _admit_load(self, unit: Unit) -> bool:
        return bool(self._data.free_staging) and len(self._moves.loads.running) < self._downloads.limit

    def _run_load(self, unit: Unit) -> Steps[None]:
        """Download the object into a staging row, verify it and copy it into the region in one pass."""
        (move,) = unit.moves
        download = self._data.download(self._name(move.key))
        yield download.over
        if download.state is TransferState.DONE:
            self._downloads.ended(download.started_s, time.monotonic(), waiting=bool(self._moves.loads.waiting))
        self._moves.make_way(unit)  # the server need not wait until this row is verified
        outcome = self._downloaded(move, download, last_try=unit.tries >= TRIES)
        self._data.release(download)
        if outcome is not None:
            unit.end_all(outcome)

    def _downloaded(self, move: Move, download: ObjectTransfer, *, last_try: bool) -> Outcome | None:
        """The outcome, or None to try again."""
        assert self._sealer is not None
        state, row = download.state, self._data.staged(download)
        if state is TransferState.PENDING:
            self._downloads.failed(download.started_s, time.monotonic())
            return Outcome.FAILED  # it timed out
        if state is TransferState.FAILED:
            self._control.transfer_failed()
            page = row[:ERROR_PAGE_BYTES].tobytes()
            self._control.denials.error_page("get", page)
            if b"<Code>NoSuchKey</Code>" in page:
                self._quota.forget(move.key)
                return Outcome.MISSING
            if b"<Code>InvalidRange</Code>" in page:
                self._unusable.add(move.key)
                return Outcome.CORRUPT  # an empty object has no range that could be read
            self._downloads.failed(download.started_s, time.monotonic())
            answered = any(page)  # no retry while the server is down
            return None if answered and not last_try else Outcome.FAILED
        self._control.denials.succeeded("get")
        expired = has_expired(self._sealer.sealed_at(row), self._control.server_time_s(), self._config.max_age)
        if self._sealer.verify(row, move.key, copy=None if expired else self._region.rows_view[move.row]) is Verdict.OK:
            if expired:
                self._unusable.add(move.key)
            return Outcome.MISSING if expired else Outcome.OK
        if not last_try:
            return None
        self._unusable.add(move.key)
        return Outcome.CORRUPT

    def _admit_store(self, unit: Unit) -> bool:
        """In order: the first that must wait delays all others, since a chain with a hole is of little use."""
        if len(self._moves.stores.running) >= self._uploads.limit:
            return False
        (move,) = unit.moves
        outcome = self._room_for(move.key)
        if outcome is not None and outcome is not Outcome.OK:
            unit.end_all(outcome)
        return outcome is not None

    def _room_for(self, key: Key) -> Outcome | None:
        """OK if this row may be uploaded now, None if it must wait for a delete, else how its store ends."""
        if not self._owner.may_write:
            return Outcome.NO_SPACE  # not FAILED: nothing is wrong with the server
        name = self._name(key)
        deleting = self._control.has_pending_deletes
        self._count_confirmed_deletes()
        # A delete of this name that arrives after the upload would delete the new object.
        if self._control.cancel_delete(name):
            if self._upload_quota is not None and not self._upload_quota.try_acquire(self._row_bytes):
                return Outcome.NO_SPACE
            if self._quota.reserve(key, upload=True):
                return Outcome.OK
            if self._quota.is_pending_delete(key):
                self._control.delete([name])
            victims = self._quota.make_room(min(len(self._moves.stores.waiting), self._uploads.limit))
            self._control.delete(victims)
            if not victims and not deleting:
                return Outcome.NO_SPACE
        # The retry may be half a minute away: the job would miss its hard deadline, and the mover be killed.
        return Outcome.FAILED if self._control.deletes_backing_off else None

    def _run_store(self, unit: Unit) -> Steps[None]:
        """Seal the row and upload it, for as long as that takes: NIXL reads the region."""
        assert self._sealer is not None
        (move,) = unit.moves
        if move.seal:
            # The later of two clocks, so that the row seems no older than it is by either of them.
            seal_row(self._sealer, self._region, move, max(time.time(), self._control.server_time_s()))
        self._deferred_deletes.discard(move.key)
        upload = self._data.upload(move.row, self._name(move.key))
        yield upload.over
        now, done = time.monotonic(), upload.state is TransferState.DONE
        if done:
            self._uploads.ended(upload.started_s, now, waiting=bool(self._moves.stores.waiting))
        else:
            self._uploads.failed(upload.started_s, now)
        unit.end_all(self._uploaded(move.key, done=done))
        self._data.release(upload)

    def _uploaded(self, key: Key, *, done: bool) -> Outcome:
        self._quota.upload_ended(key)
        if self._upload_quota is not None:
            self._upload_quota.upload_ended(self._row_bytes)
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

    # --- the manifest -----------------------------------------------------------------------------------------------

    def _keep_manifest(self, namespace: bytes, epoch: int) -> None:
        """Write it on the control thread, once there are rows. Not for weights that were replaced under a running
        engine: each time leaves a namespace that is never used again, and no listing counts what is not a row."""
        if self._description is None or epoch or self._owner.reads_only:
            return
        manifest = ManifestKeeper(
            self._description,
            self._owner.engine,
            namespace=namespace,
            epoch=epoch,
            row_bytes=self._row_bytes,
            clock=self._control.server_time_s,
        )
        name = self._names.manifest(namespace.hex())

        def refresh(client: Any) -> float:
            if not self._owner.may_write or not len(self._quota):
                return MANIFEST_CHECK_S
            manifest.update(
                lambda: small_object(client, self._config.bucket, name),
                lambda raw: bool(client.put_object(Bucket=self._config.bucket, Key=name, Body=raw)),
            )
            return manifest.wait_s

        self._control.set_chore(refresh)

    # --- the bucket -------------------------------------------------------------------------------------------------

    def _delete_rows(self, *keys: Key) -> None:
        """Delete these rows. Only forget them without the right to write, and on a shared prefix unless they are
        unusable."""
        if self._upload_quota is not None or not self._owner.may_write:
            kept = set(keys) - self._unusable if self._owner.may_write else set(keys)
            for key in kept:
                if self._upload_quota is None:
                    self._hide(key)
                else:
                    self._quota.forget(key)
            keys = tuple(key for key in keys if key not in kept)
        self._unusable.difference_update(keys)
        self._control.delete([name for key in keys if (name := self._quota.delete(key)) is not None])

    def _hide(self, key: Key) -> None:
        """Forget a row that is there until a new tenure's listing counts it. One that runs may have counted it."""
        if isinstance(self._listing, FullListing) and self._owner.has_counted:
            self._evicted.add(key)
        else:
            self._quota.hide(key)

    def _count_confirmed_deletes(self) -> None:
        self._quota.confirm_deletes(self._control.confirmed_deletes())

    def _new_quota(self) -> PrefixQuota:
        # The budget of a shared prefix is enforced by the janitor.
        capacity = self._config.capacity if self._upload_quota is None else sys.maxsize
        return PrefixQuota(self._names, self._row_bytes, capacity)

    def _full_listing(self) -> FullListing:
        private, tenure = self._upload_quota is None, self._owner.tenure

        def begin() -> None:
            """On the control thread: an expiry sweep of an earlier tenure queues nothing after that."""
            if self._owner.is_other(tenure):
                self._control.drop_deletes()
                self._quota.drop_pending_deletes()
            self._owner.listing_begins(tenure)

        return FullListing(
            self._quota,
            self._names,
            (self._namespace, self._row_bytes),
            whole=private,
            max_age_s=self._config.max_age,
            deleter=self._control if private and tenure else None,
            differences_only=self._listed,
            begin=begin,
        )

    def _start_listing(self, listing: Listing | None) -> None:
        self._listing = listing
        self._control.start_listing(listing)

    def _name(self, key: Key) -> str:
        return self._names.name(self._namespace, key)
