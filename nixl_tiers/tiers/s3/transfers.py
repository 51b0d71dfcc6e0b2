"""RowTransfers: downloads and uploads of rows, within the limits of the tier and of its server.

Two weaknesses of NIXL's object backend are handled here (both were reproduced):
- a failed download leaves the server's error page in the buffer, and a short object counts as done: downloads go to
  private staging rows. They are verified and copied into the region in one pass, so that the bytes of a row that counts
  as loaded are those that were verified;
- a retry inside its AWS library appends to the bytes of the failed attempt, so one "slow down" corrupts a download
  whose second attempt succeeded: a download that was answered with anything but a row is retried once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import FinishedBatch, Move, has_expired, seal_row
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import MovePipeline
from nixl_tiers.tiers.nixl_agent import TransferState
from nixl_tiers.tiers.s3.concurrency import MOST, PollPace, TransferLimit
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.data import ERROR_PAGE_BYTES, ObjectTransfer, S3Data
from nixl_tiers.tiers.s3.rows import Rows

TRIES: Final = 2


class RowTransfers:
    """The moves of one tier: each row is an object, with a transfer of its own."""

    def __init__(
        self, config: S3Config, geometry: Geometry, region: HostRegion, control: S3Control, rows: Rows, *, times: Times
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._region = region
        self._control = control
        self._connection = control.connection
        self._rows = rows
        self.data = S3Data(config, geometry, region, times)
        self._sealer: Sealer | None = None
        self.pace = PollPace()
        self._downloads, self._uploads = TransferLimit(MOST), TransferLimit(MOST)
        self.moves = MovePipeline(
            MoveQueue(limit=MOST, admit=self._admit_load, run=self._run_load),
            MoveQueue(
                limit=MOST,
                admit=self._admit_store,
                run=self._run_store,
                on_end=lambda move, _: rows.store_ended(move.key),
            ),
            may_start=self._may_start,
            held_until_s=lambda: region.stores_held_until_s,
            hold_s=times.stores_held_s,
        )

    def open(self, namespace: bytes, epoch: int) -> None:
        """Move rows of this namespace from now on. Not on the mover's loop: this takes some milliseconds."""
        self.data.connect(self._connection)
        self.data.populate_staging()
        self._sealer = Sealer(self._geometry, namespace, epoch)

    def store(self, moves: Sequence[Move]) -> int:
        self.pace.hurry()
        self._rows.stores_begin(moves)
        return self.moves.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        self.pace.hurry()
        return self.moves.load(moves)

    def poll(self) -> list[FinishedBatch]:
        now = time.monotonic()
        if self.pace.wait_s(now) <= 0:
            if self.data.poll(now):
                self.moves.poll()
            load_s = self._downloads.typical_s if self.moves.loads.running else None
            store_s = self._uploads.typical_s if self.moves.stores.running else None
            self.pace.polled(now, self.data.running, load_s=load_s, store_s=store_s)
        self.moves.start()
        return self.moves.take()

    @property
    def busy(self) -> bool:
        return self.moves.busy or self.data.busy

    @property
    def poll_s(self) -> float:
        return max(self.pace.wait_s(time.monotonic()), self.moves.poll_s)

    # --- moving rows ------------------------------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """New credentials need a new agent; the old one starts nothing more."""
        if self.data.credentials is None:
            self.moves.give_up()
            return False
        self.data.connect(self._connection)
        return True

    def _admit_load(self, unit: Unit) -> bool:
        return bool(self.data.free_staging) and len(self.moves.loads.running) < self._downloads.limit

    def _run_load(self, unit: Unit) -> Steps[None]:
        """Download the object into a staging row, verify it and copy it into the region in one pass."""
        (move,) = unit.moves
        download = self.data.download(self._rows.name(move.key), self._downloads.typical_s)
        yield download.over
        if download.state is TransferState.DONE:
            self._downloads.ended(download.started_s, time.monotonic(), waiting=bool(self.moves.loads.waiting))
        self.moves.make_way(unit)  # the server need not wait until this row is verified
        outcome = self._downloaded(move, download, last_try=unit.tries >= TRIES)
        self.data.release(download)
        if outcome is not None:
            unit.end_all(outcome)

    def _downloaded(self, move: Move, download: ObjectTransfer, *, last_try: bool) -> Outcome | None:
        """The outcome, or None to try again."""
        assert self._sealer is not None
        state, row = download.state, self.data.staged(download)
        if state is TransferState.PENDING:
            self._downloads.timed_out(download.started_s, time.monotonic())
            return Outcome.FAILED
        if state is TransferState.FAILED:
            self._control.transfer_failed()
            page = row[:ERROR_PAGE_BYTES].tobytes()
            self._control.denials.error_page("get", page)
            if b"<Code>NoSuchKey</Code>" in page:
                self._rows.is_missing(move.key)
                return Outcome.MISSING
            if b"<Code>InvalidRange</Code>" in page:
                self._rows.is_unusable(move.key)
                return Outcome.CORRUPT  # an empty object has no range that could be read
            self._downloads.failed(download.started_s, time.monotonic())
            answered = any(page)  # no retry while the server is down
            return None if answered and not last_try else Outcome.FAILED
        self._control.denials.succeeded("get")
        now_s, age_s = self._connection.server_time_s(), self._config.max_age
        return self.moves.verify(
            self._sealer,
            move.key,
            row,
            self._region.rows_view[move.row],
            name=lambda: f's3 bucket "{self._config.bucket}": {self._rows.name(move.key)}',
            has_expired=lambda sealed_at: has_expired(sealed_at, now_s, age_s),
            forget=lambda _: self._rows.is_unusable(move.key),
            last_try=last_try,
        )

    def _admit_store(self, unit: Unit) -> bool:
        """In order: the first that must wait delays all others, since a chain with a hole is of little use."""
        if len(self.moves.stores.running) >= self._uploads.limit:
            return False
        (move,) = unit.moves
        outcome = self._rows.room_for(move.key)
        if outcome is not None and outcome is not Outcome.OK:
            unit.end_all(outcome)
        return outcome is not None

    def _run_store(self, unit: Unit) -> Steps[None]:
        """Seal the row and upload it, for as long as that takes: NIXL reads the region."""
        assert self._sealer is not None
        (move,) = unit.moves
        if move.seal:
            # The later of two clocks, so that the row seems no older than it is by either of them.
            seal_row(self._sealer, self._region, move, max(time.time(), self._connection.server_time_s()))
        upload = self.data.upload(move.row, self._rows.name(move.key))
        yield upload.over
        now, done = time.monotonic(), upload.state is TransferState.DONE
        if done:
            self._uploads.ended(upload.started_s, now, waiting=bool(self.moves.stores.waiting))
        else:
            self._uploads.failed(upload.started_s, now)
        unit.end_all(self._rows.upload_ended(move.key, done=done))
        self.data.release(upload)
