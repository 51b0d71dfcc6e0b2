"""The rows of a prefix, which engines share. Nothing is listed here, and no row is counted.

Whether a row is there is asked (existence.py): when a request wants it, and, if other movers store too, before it is
uploaded. The budget (budget.py) grants uploads, deletes, and says how far was deleted. A row that is written again
though it was there counts twice until the next sweep.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import MAX_SLOTS, Entry, ExistenceAnswer, Move
from nixl_tiers.tiers.existence import ExistenceChecker, Presence, UploadChecks
from nixl_tiers.tiers.s3.budget import Budget, budget_clock
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.record import WINDOW_SHARE, UploadQuota

MAX_ABSENT: Final = 1 << 14


class Rows:
    """Of one tier, for the mover's loop. Uploads ask for room, and report how they ended. What was found, and what was
    stored, is handed to the core with the time of its last write (`found`)."""

    def __init__(self, config: S3Config, row_bytes: int, control: S3Control, times: Times = PRODUCTION) -> None:
        self._config = config
        self._row_bytes = row_bytes
        self._control = control
        self._times = times
        self._namespace = ""
        self.names = RowNames(config.prefix)
        self.upload_quota = UploadQuota(uuid.uuid4().hex, config.capacity, row_bytes)
        self.has_rows = False
        """Whether any row of the namespace is known."""
        self._reads_only = config.write == "off"
        self._checker = ExistenceChecker(self._written_s, timeout_s=times.s3_check_s)
        self._uploads = UploadChecks(self._written_s, times=times)
        self._budget: Budget | None = None
        self._ready_by_s = float("inf")  # so long uploads wait for a usage record that counts them, or those before
        self._found: list[Entry] = []
        self._absent: dict[Key, float] = {}  # until when, the oldest first

    def name(self, key: Key) -> str:
        return self.names.name(self._namespace, key)

    def serve(self, namespace: str) -> None:
        """The rows are those of this namespace from now on."""
        self._namespace = namespace
        self._checker.clear()
        self._uploads.clear()
        self._found.clear()
        self._absent.clear()
        self.has_rows = False
        if self._budget is None:
            self._budget = Budget(
                self._control.connection,
                self._config.bucket,
                self._config.prefix,
                quota=self.upload_quota,
                max_age_s=self._config.max_age,
                reads_only=self._reads_only,
            )
            self._budget.start()
            self._ready_by_s = time.monotonic() + self._times.s3_ready_s

    @property
    def slots(self) -> int:
        """How many rows the engine may know. Of a reader: whatever others have stored. Others forget the oldest rows if
        they know of more."""
        return MAX_SLOTS if self._reads_only else min(2 * (self._config.capacity // self._row_bytes), MAX_SLOTS)

    @property
    def gone_before(self) -> int:
        """With what may be deleted before this engine hears of it: room is made for two windows at once, of a prefix
        that was written evenly from its oldest row on."""
        oldest = self.upload_quota.record.oldest
        if not self.upload_quota.deletes_soon:
            return oldest
        written_for_s = self._server_s - oldest
        return oldest + max(0, int(written_for_s * 2 / WINDOW_SHARE)) if oldest else 0

    # --- what is there ----------------------------------------------------------------------------------------------

    def check_existence(self, check_id: int, keys: Sequence[Key], *, chain: bool) -> None:
        self._checker.start(check_id, keys, chain=chain)

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        answers = self._checker.answers()
        for answer in answers:
            self._note_absent(answer.absent)
            for key, written_s in answer.found:
                self._note(key, written_s)
        return [ExistenceAnswer(answer.check_id, answer.absent) for answer in answers]

    def found(self) -> Sequence[Entry]:
        found, self._found = self._found, []
        return found

    @property
    def busy(self) -> bool:
        """Whether there will soon be answers."""
        return self._checker.busy

    # --- uploads ----------------------------------------------------------------------------------------------------

    def stores_begin(self, moves: Sequence[Move]) -> None:
        """These rows are going to ask for room. Others may have stored them meanwhile."""
        if not self.upload_quota.has_others:  # a question costs more than an upload of 64 KiB
            return
        now = time.monotonic()
        self._uploads.ask(move.key for move in moves if self._absent.get(move.key, 0.0) <= now)

    def room_for(self, key: Key) -> Outcome | None:
        """OK if this row may be uploaded now, else how its store ends. None: it is being asked whether it is there, a
        delete of it is under way, the tier was opened just now, or the last window's uploads are soon counted."""
        written_s = self._uploads.answer(key)
        if written_s is None:
            return None
        if written_s:
            self._note(key, written_s)
            return Outcome.FOUND
        # A delete of this name that arrives after the upload would delete the new object.
        if not self._control.cancel_delete(self.name(key)):
            return None
        now, quota = time.monotonic(), self.upload_quota
        if quota.try_acquire(self._row_bytes):
            self._ready_by_s = max(self._ready_by_s, now + self._times.s3_ready_s)
            return Outcome.OK
        return None if now < self._ready_by_s and (quota.counts_itself or not quota.ready) else Outcome.NO_SPACE

    def upload_ended(self, key: Key, *, done: bool) -> Outcome:
        """How its store ends. `done`: whether the server has the row for certain."""
        self.upload_quota.upload_ended(self._row_bytes, budget_clock(), done=done)
        if not done:  # it may have arrived nevertheless: then it will be found
            self._control.transfer_failed()
            self._control.denials.failed("put")
            return Outcome.FAILED
        self._control.connection.denials.succeeded("put")
        # Not when it began: the Last-Modified of a prefix's first rows is `oldest`, and they would be taken to be gone.
        self._note(key, int(self._server_s) + 1)
        return Outcome.OK

    def store_ended(self, key: Key) -> None:
        """However it did, and whether it was begun or not."""
        self._uploads.forget(key)

    # --- what goes --------------------------------------------------------------------------------------------------

    def is_missing(self, key: Key) -> None:
        """The row was not there when it was loaded."""
        self._note_absent([key])

    def is_unusable(self, key: Key) -> None:
        """It is corrupt, or has expired: delete it, so that nobody else loads it, and have it written again."""
        self._note_absent([key])
        if not self._reads_only:
            self._control.delete([self.name(key)])

    def close(self) -> None:
        """Ask nothing any more."""
        if self._budget is not None:
            self._budget.close(self._times.s3_close_s)
            self._budget = None
        self._checker.close()
        self._uploads.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    @property
    def _server_s(self) -> float:
        """Unix seconds by the clock of Last-Modified."""
        return self._control.connection.server_time_s() - self.upload_quota.ahead_s

    def _written_s(self, key: Key) -> Presence:
        return self._control.connection.written_s(self.name(key), self._row_bytes)

    def _note(self, key: Key, written_s: int) -> None:
        self.has_rows = True
        self._absent.pop(key, None)
        self._found.append(Entry(0, key, written_s))

    def _note_absent(self, keys: Iterable[Key]) -> None:
        until_s = time.monotonic() + self._times.s3_absent_s
        for key in keys:
            self._absent.pop(key, None)
            self._absent[key] = until_s
        while len(self._absent) > MAX_ABSENT:
            del self._absent[next(iter(self._absent))]
