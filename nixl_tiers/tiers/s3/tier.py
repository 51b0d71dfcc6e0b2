"""The S3 tier: one object per row below `<prefix>/<namespace>/`, each transferred by NIXL with a handle of its own.

Two weaknesses of NIXL's object backend are handled here (both were reproduced):
- a failed download leaves the server's error page in the buffer, and a short object counts as done: downloads go to
  private staging rows, and only a row whose seal verifies is copied into the region;
- a retry inside its AWS library appends to the bytes of the failed attempt, so one "slow down" corrupts a download
  whose second attempt succeeded: a download that was answered with anything but a row is retried once.

A private prefix: the quota counts every row below it, of any namespace. Space counts as free when the server has
confirmed the deletes, so the bucket never holds more than the capacity.

A shared prefix: rows that others store are found by periodic listings and existence checks. Rows that the core
deletes only leave its index, since others may use them: the janitor (janitor.py) deletes, and grants uploads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nixl_tiers.chunk import Geometry, Key, Outcome, object_name
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import GONE, MAX_ENTRIES, Entry, ExistenceAnswer, FinishedBatch, Move, StorageTier, seal_row
from nixl_tiers.tiers.expiry import has_expired
from nixl_tiers.tiers.moves import MovePipeline, MoveQueue, Steps, Unit
from nixl_tiers.tiers.nixl_agent import TransferState
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.data import ERROR_PAGE_BYTES, MAX_DOWNLOADS, MAX_UPLOADS, ObjectTransfer, S3Data
from nixl_tiers.tiers.s3.existence import Answer, ExistenceChecker
from nixl_tiers.tiers.s3.janitor import Janitor, JanitorIntervals, UploadQuota
from nixl_tiers.tiers.s3.listing import Listing, is_row
from nixl_tiers.tiers.s3.quota import PrefixQuota

TRIES: Final = 2
POLL_S: Final = (0.0002, 0.003)  # between two polls of the transfers while none of them ends: first, longest
RELIST_S: Final = 30.0  # between two listings of a shared prefix
SWEEP_S: Final = 3600.0  # the longest time between two listings of a private prefix for max_age
SWEEPS_PER_AGE: Final = 8
INTERVALS: Final = JanitorIntervals()


class S3Tier(StorageTier):
    """Rows as objects of one bucket. Slots are only a count: an object is found by its key."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion) -> None:
        """Uses neither NIXL nor the network; `open` does."""
        self._config = config
        self._geometry = geometry
        self._region = region
        self._row_bytes = geometry.row_bytes
        self._data = S3Data(config, geometry, region)
        self._control = S3Control(config)
        self._existence = ExistenceChecker(lambda key: self._control.exists(self._name(key), self._row_bytes))
        self._upload_quota = UploadQuota(config.capacity, self._row_bytes) if config.shared else None
        self._reads_only = config.write == "off"
        self._janitor: Janitor | None = None
        self._quota = self._new_quota()
        self._unusable: set[Key] = set()  # corrupt or expired: deleted on request, also on a shared prefix
        self._sealer: Sealer | None = None
        self._prefix = ""
        self._listing: Listing | None = None
        self._listed = False  # whether a listing of this namespace has ended
        self._stored_since: set[Key] = set()  # rows stored since the present listing began, which it may have missed
        self._tick = 0  # the first tick of the next listing's rows, above all known ones
        self._poll_at_s = 0.0
        self._pause_s = 0.0
        self._moves = MovePipeline(
            MoveQueue(limit=MAX_DOWNLOADS, admit=lambda _: bool(self._data.free_staging), run=self._run_load),
            MoveQueue(limit=MAX_UPLOADS, admit=self._admit_store, run=self._run_store),
            may_start=self._may_start,
        )
        self._deferred_deletes: set[Key] = set()  # of rows whose upload runs, or while a listing runs

    def open(self, namespace: bytes, epoch: int) -> int:
        credentials = self._control.connect()
        self._data.connect(credentials, self._control.region.name)
        self._sealer = Sealer(self._geometry, namespace, epoch)
        self._prefix = f"{self._config.prefix}/{namespace.hex()}/"
        self._existence.clear()
        self._quota = self._new_quota()
        self._deferred_deletes = set()
        self._unusable = set()
        self._listed = False
        self._tick = 0
        self._start_listing()
        slots = self._config.capacity // self._row_bytes
        if self._upload_quota is None:
            return slots
        if self._janitor is None and not self._reads_only:
            bucket, prefix = self._control, self._config.prefix
            self._janitor = Janitor(
                lambda: bucket.client,
                self._config.bucket,
                prefix,
                quota=self._upload_quota,
                is_row=is_row,
                intervals=INTERVALS,
                denials=self._control.denials,
                max_age_s=self._config.max_age,
            )
            self._janitor.start()
        # The index must hold all rows below the prefix, upload windows included, or each listing would repeat the rest.
        return 2 * slots

    @property
    def relist_s(self) -> float | None:
        return RELIST_S if self._upload_quota is not None else None

    def list_rows(self) -> Iterator[list[Entry]]:
        if self._listing is None and self._upload_quota is not None:
            self._start_listing()
        yield from self._listed_rows()

    def maintain(self) -> Iterator[list[Entry]]:
        """On a private prefix: delete expired rows. On a shared one, the janitor does."""
        if self.maintain_s is not None and self._listing is None:
            self._start_listing()
        yield from self._listed_rows()

    @property
    def maintain_s(self) -> float | None:
        age_s = self._config.max_age
        if age_s is None or self._upload_quota is not None:
            return None
        return min(max(age_s / SWEEPS_PER_AGE, RELIST_S), SWEEP_S)

    def _listed_rows(self) -> Iterator[list[Entry]]:
        """The entries of the present listing."""
        listing = self._listing
        if listing is None:
            return
        while not listing.done.is_set():
            yield []
            if listing is not self._listing:
                return
        entries: list[Entry] = []
        for entry in self._reconcile(listing):
            entries.append(entry)
            if len(entries) == MAX_ENTRIES:
                yield entries
                if listing is not self._listing:
                    return
                entries = []
        self._deferred_deletes &= self._uploading
        self._listing = None
        self._listed = True
        if entries:
            yield entries

    def _reconcile(self, listing: Listing) -> Iterator[Entry]:
        """Bring the quota in agreement with a listing that is done; yields what the core must know of it."""
        private = self._upload_quota is None
        if not listing.expired_only:
            # Expired rows of a shared prefix are left to the janitor.
            expired = listing.expired if private else []
            self._quota.begin_listing(
                [(name, nbytes) for _, name, nbytes in listing.other_rows], len(listing.rows) + len(expired)
            )
            yield from self._new_rows(listing.rows)
            for key in expired:
                self._quota.add_listed(key, self._name(key))
        if not private:
            gone = self._forget_vanished({key for _, key in listing.rows})
        else:
            gone = [key for key in listing.expired if key in self._quota.held and key not in self._stored_since]
            self._delete_rows(*gone)
            if not self._reads_only:
                self._control.delete(self._quota.delete_other_rows(listing.expired_other_rows))
        for key in gone:
            yield Entry(GONE, key, 0)

    def _new_rows(self, rows: Sequence[tuple[float, Key]]) -> Iterator[Entry]:
        """The rows that the core does not know yet, with ticks by Last-Modified, above those of earlier listings."""
        tick, modified = self._tick - 1, -1.0
        for slot, (when, key) in enumerate(rows):
            if when > modified:
                tick, modified = tick + 1, when
            if self._quota.add_listed(key, self._name(key)):
                if key in self._deferred_deletes:
                    self._delete_rows(key)
                else:
                    yield Entry(slot, key, tick)
        self._tick = tick + 1

    def store(self, moves: Sequence[Move]) -> int:
        self._tick = max([self._tick, *(move.tick + 1 for move in moves)])
        self._poll_at_s = self._pause_s = 0.0
        return self._moves.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        self._poll_at_s = self._pause_s = 0.0
        return self._moves.load(moves)

    def poll(self) -> list[FinishedBatch]:
        self._count_confirmed_deletes()
        now = time.monotonic()
        if now >= self._poll_at_s:
            ended = self._moves.poll()
            self._data.reap()
            # Transfers proceed without polling, and with a slow server polling many of them is most of their cost.
            self._pause_s = 0.0 if ended else min(2 * self._pause_s + POLL_S[0], POLL_S[1])
            self._poll_at_s = now + self._pause_s
        self._moves.start()
        return self._moves.take()

    def check_existence(self, check_id: int, keys: Sequence[Key], chain: bool) -> bool:
        if self._upload_quota is None:
            return False
        self._existence.start(check_id, keys, chain=chain)
        return True

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        return [self._found(answer) for answer in self._existence.answers()]

    def _found(self, answer: Answer) -> ExistenceAnswer:
        for key in answer.found:
            self._quota.reserve(key, self._name(key))
            self._deferred_deletes.discard(key)
            if self._listing is not None:
                self._stored_since.add(key)
        return ExistenceAnswer(answer.check_id, [Entry(0, key, self._tick) for key in answer.found], answer.absent)

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        uploading = self._uploading
        self._delete_rows(*(key for _, key in entries if key not in uploading))
        # Rows whose upload runs, or that the listing may still find, are deleted when that has ended.
        self._deferred_deletes.update(key for _, key in entries if key in uploading or self._listing is not None)

    @property
    def busy(self) -> bool:
        return self._moves.busy or self._data.busy or self._existence.busy

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

    # --- moving rows ------------------------------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """New credentials need a new agent; the old one is released when nothing of it runs, and starts nothing."""
        if self._data.credentials is None:
            self._moves.loads.give_up()
            self._moves.stores.give_up()
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

    def _run_load(self, unit: Unit) -> Steps[None]:
        """Download the object into a staging row, verify it there, copy it into the region."""
        (move,) = unit.moves
        download = self._data.download(self._name(move.key))
        yield download.over
        outcome = self._downloaded(move, download, last_try=unit.tries >= TRIES)
        self._data.release(download)
        if outcome is not None:
            unit.end_all(outcome)

    def _downloaded(self, move: Move, download: ObjectTransfer, *, last_try: bool) -> Outcome | None:
        """The outcome, or None to try again."""
        assert self._sealer is not None
        state, row = download.state, self._data.staged(download)
        if state is TransferState.PENDING:
            return Outcome.FAILED  # it timed out
        if state is TransferState.FAILED:
            self._control.transfer_failed()
            page = row[:ERROR_PAGE_BYTES].tobytes()
            self._control.denials.error_page("get", page)
            if b"<Code>NoSuchKey</Code>" in page:
                self._quota.forget(move.key, self._name(move.key))
                return Outcome.MISSING
            if b"<Code>InvalidRange</Code>" in page:
                self._unusable.add(move.key)
                return Outcome.CORRUPT  # an empty object has no range that could be read
            answered = any(page)  # no retry while the server is down
            return None if answered and not last_try else Outcome.FAILED
        self._control.denials.succeeded("get")
        if self._sealer.verify(row, move.key) is Verdict.OK:
            if has_expired(self._sealer.sealed_at(row), self._control.server_time_s(), self._config.max_age):
                self._unusable.add(move.key)
                return Outcome.MISSING
            self._region.rows_view[move.row] = row
            return Outcome.OK
        if not last_try:
            return None
        self._unusable.add(move.key)
        return Outcome.CORRUPT

    def _admit_store(self, unit: Unit) -> bool:
        """In order: the first that must wait delays all others, since a chain with a hole is of little use."""
        (move,) = unit.moves
        outcome = self._room_for(move.key)
        if outcome is not None and outcome is not Outcome.OK:
            unit.end_all(outcome)
        return outcome is not None

    def _room_for(self, key: Key) -> Outcome | None:
        """OK if this row may be uploaded now, None if it must wait for a delete, else how its store ends."""
        name = self._name(key)
        deleting = self._control.has_pending_deletes
        self._count_confirmed_deletes()
        # A delete of this name that arrives after the upload would delete the new object.
        if self._control.cancel_delete(name):
            if self._upload_quota is not None and not self._upload_quota.try_acquire(self._row_bytes):
                return Outcome.NO_SPACE
            if self._quota.reserve(key, name):
                return Outcome.OK
            if self._quota.is_pending_delete(name):
                self._control.delete([name])
            victims = self._quota.make_room(min(len(self._moves.stores.waiting), MAX_UPLOADS))
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
        if self._listing is not None:
            self._stored_since.add(move.key)
        upload = self._data.upload(move.row, self._name(move.key))
        yield upload.over
        unit.end_all(self._uploaded(move.key, done=upload.state is TransferState.DONE))
        self._data.release(upload)

    def _uploaded(self, key: Key, *, done: bool) -> Outcome:
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

    # --- the bucket -------------------------------------------------------------------------------------------------

    def _delete_rows(self, *keys: Key) -> None:
        """Delete these rows. In a read-only tier, and on a shared prefix unless they are unusable, only forget them."""
        if self._upload_quota is not None or self._reads_only:
            kept = set(keys) if self._reads_only else set(keys) - self._unusable
            for key in kept:
                self._quota.forget(key, self._name(key))
            keys = tuple(key for key in keys if key not in kept)
        self._unusable.difference_update(keys)
        self._control.delete([name for key in keys if self._quota.delete(key, name := self._name(key))])

    def _count_confirmed_deletes(self) -> None:
        for name in self._control.confirmed_deletes():
            self._quota.confirm_delete(name)

    def _new_quota(self) -> PrefixQuota:
        # The budget of a shared prefix is enforced by the janitor.
        return PrefixQuota(self._row_bytes, self._config.capacity if self._upload_quota is None else sys.maxsize)

    def _forget_vanished(self, listed: set[Key]) -> list[Key]:
        """Forget the rows that a listing of the shared prefix has not found, and return them."""
        gone = [key for key in self._quota.held if key not in listed and key not in self._stored_since]
        for key in gone:
            self._quota.forget(key, self._name(key))
        return gone

    def _start_listing(self) -> None:
        self._stored_since = self._uploading
        namespace = self._prefix[len(self._config.prefix) + 1 : -1]
        whole, age_s = self._upload_quota is None, self._config.max_age
        self._listing = Listing(
            self._config.prefix,
            namespace,
            self._row_bytes,
            whole=whole,
            max_age_s=age_s,
            expired_only=whole and self._listed,
        )
        self._control.start_listing(self._listing)

    def _name(self, key: Key) -> str:
        return self._prefix + object_name(key)
