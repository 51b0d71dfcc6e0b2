"""The S3 tier: one object per row below `<prefix>/<namespace>/`, each transferred by NIXL with a handle of its own.
Engines share the prefix: rows are found by existence checks (rows.py), and the mover that writes the usage record lists
and deletes for all of them (budget.py).

Two weaknesses of NIXL's object backend are handled here (both were reproduced):
- a failed download leaves the server's error page in the buffer, and a short object counts as done: downloads go to
  private staging rows. They are verified and copied into the region in one pass, so that the bytes of a row that counts
  as loaded are those that were verified;
- a retry inside its AWS library appends to the bytes of the failed attempt, so one "slow down" corrupts a download
  whose second attempt succeeded: a download that was answered with anything but a row is retried once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nixl_tiers.base.chunk import Geometry, Key, Outcome
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import (
    EndedMoves,
    Entry,
    ExistenceAnswer,
    FinishedBatch,
    Move,
    StorageTier,
    expire_if_due,
    seal_row,
)
from nixl_tiers.tiers.manifests import ManifestKeeper, ManifestMedium
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import MovePipeline
from nixl_tiers.tiers.nixl_agent import TransferState
from nixl_tiers.tiers.s3.concurrency import MOST, PollPace, TransferLimit
from nixl_tiers.tiers.s3.conditional import get_object
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.data import ERROR_PAGE_BYTES, ObjectTransfer, S3Data
from nixl_tiers.tiers.s3.rows import Rows

TRIES: Final = 2


class S3Tier(StorageTier):
    """Rows as objects of one bucket. Slots are only a count: an object is found by its key."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion, times: Times = PRODUCTION) -> None:
        """Uses neither NIXL nor the network; `open` does."""
        self._config = config
        self._geometry = geometry
        self._region = region
        self._control = S3Control(config, times)
        self._connection = self._control.connection
        self._rows = Rows(config, geometry.row_bytes, self._control, times)
        self._data = S3Data(config, geometry, region, times)
        self._sealer: Sealer | None = None
        self._pace = PollPace()
        self._downloads, self._uploads = TransferLimit(MOST), TransferLimit(MOST)
        self._moves = MovePipeline(
            MoveQueue(limit=MOST, admit=self._admit_load, run=self._run_load),
            MoveQueue(
                limit=MOST,
                admit=self._admit_store,
                run=self._run_store,
                on_end=lambda move, _: self._rows.store_ended(move.key),
            ),
            may_start=self._may_start,
            held_until_s=lambda: region.stores_held_until_s,
            hold_s=times.stores_held_s,
        )
        self._manifests = ManifestKeeper(geometry.row_bytes, secrets.token_hex(8))

    def identify(self, engine: str) -> None:
        self._manifests.engine = engine

    def describe(self, description: Description) -> None:
        self._manifests.description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        self._manifests.stop()
        self._control.connect()
        self._data.connect(self._connection)
        self._data.populate_staging()
        self._sealer = Sealer(self._geometry, namespace, epoch)
        self._rows.serve(namespace.hex())
        # Not for weights that were replaced under a running engine: each time leaves a namespace that is never used
        # again, and no listing counts what is not a row.
        if not epoch and self._config.write != "off":
            name = self._rows.names.manifest(namespace.hex())
            medium = _Manifests(self._control, self._rows, self._config.bucket, name)
            self._manifests.serve(namespace.hex(), epoch, medium, self._connection.server_time_s)
        return self._rows.slots

    def list_rows(self) -> Iterator[list[Entry]]:
        return iter(())

    def store(self, moves: Sequence[Move]) -> int:
        self._pace.hurry()
        self._rows.stores_begin(moves)
        return self._moves.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        self._pace.hurry()
        return self._moves.load(moves)

    def poll(self) -> list[FinishedBatch]:
        now = time.monotonic()
        if self._pace.wait_s(now) <= 0:
            if self._data.poll(now):
                self._moves.poll()
            load_s = self._downloads.typical_s if self._moves.loads.running else None
            store_s = self._uploads.typical_s if self._moves.stores.running else None
            self._pace.polled(now, self._data.running, load_s=load_s, store_s=store_s)
        self._moves.start()
        return self._moves.take()

    def ended_moves(self) -> Sequence[EndedMoves]:
        return self._moves.take_ended()

    def give_up_waiting(self) -> None:
        """The usage record is released when nothing runs."""
        self._moves.give_up()

    def check_existence(self, check_id: int, keys: Sequence[Key], chain: bool) -> bool:
        self._rows.check_existence(check_id, keys, chain=chain)
        return True

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        return self._rows.existence_answers()

    def found(self) -> Sequence[Entry]:
        return self._rows.found()

    @property
    def gone_before(self) -> int:
        return self._rows.gone_before

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Others may use them."""

    @property
    def closes_beside_loads(self) -> bool:
        return True

    @property
    def busy(self) -> bool:
        return self._moves.busy or self._data.busy or self._rows.busy

    @property
    def poll_s(self) -> float:
        return 0.0 if self._rows.busy else max(self._pace.wait_s(time.monotonic()), self._moves.poll_s)

    @property
    def denials(self) -> Mapping[str, str]:
        return self._connection.denials.current()

    @property
    def used_bytes(self) -> int:
        return self._rows.upload_quota.record.nbytes

    def close(self) -> None:
        self._rows.close()
        self._control.close()
        self._data.close()
        self._manifests.stop(last=True)

    # --- moving rows ------------------------------------------------------------------------------------------------

    def _may_start(self) -> bool:
        """New credentials need a new agent; the old one starts nothing more."""
        if self._data.credentials is None:
            self._moves.give_up()
            return False
        self._data.connect(self._connection)
        return True

    def _admit_load(self, unit: Unit) -> bool:
        return bool(self._data.free_staging) and len(self._moves.loads.running) < self._downloads.limit

    def _run_load(self, unit: Unit) -> Steps[None]:
        """Download the object into a staging row, verify it and copy it into the region in one pass."""
        (move,) = unit.moves
        download = self._data.download(self._rows.name(move.key), self._downloads.typical_s)
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
            self._downloads.timed_out(download.started_s, time.monotonic())
            return Outcome.FAILED
        if state is TransferState.FAILED:
            self._control.transfer_failed()
            page = row[:ERROR_PAGE_BYTES].tobytes()
            self._connection.denials.error_page("get", page)
            if b"<Code>NoSuchKey</Code>" in page:
                self._rows.is_missing(move.key)
                return Outcome.MISSING
            if b"<Code>InvalidRange</Code>" in page:
                self._rows.is_unusable(move.key)
                return Outcome.CORRUPT  # an empty object has no range that could be read
            self._downloads.failed(download.started_s, time.monotonic())
            answered = any(page)  # no retry while the server is down
            return None if answered and not last_try else Outcome.FAILED
        self._connection.denials.succeeded("get")
        now_s, age_s = self._connection.server_time_s(), self._config.max_age
        return self._moves.verify(
            self._sealer,
            move.key,
            row,
            self._region.rows_view[move.row],
            name=lambda: f's3 bucket "{self._config.bucket}": {self._rows.name(move.key)}',
            expire_if_due=lambda sealed_at: expire_if_due(sealed_at, now_s, age_s),
            forget=lambda _: self._rows.is_unusable(move.key),
            last_try=last_try,
        )

    def _admit_store(self, unit: Unit) -> bool:
        """In order: the first that must wait delays all others, since a chain with a hole is of little use."""
        if len(self._moves.stores.running) >= self._uploads.limit:
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
        upload = self._data.upload(move.row, self._rows.name(move.key))
        yield upload.over
        now, done = time.monotonic(), upload.state is TransferState.DONE
        if done:
            self._uploads.ended(upload.started_s, now, waiting=bool(self._moves.stores.waiting))
        else:
            self._uploads.failed(upload.started_s, now)
        unit.end_all(self._rows.upload_ended(move.key, done=done))
        self._data.release(upload)


@dataclass
class _Manifests(ManifestMedium):
    """For the namespace that is served, once there are rows."""

    control: S3Control
    rows: Rows
    bucket: str
    name: str

    def is_wanted(self) -> bool:
        return self.rows.has_rows

    def read(self) -> bytes | None:
        found = get_object(self.control.connection.client, self.bucket, self.name)
        return None if found is None else bytes(found["Body"].read(1 << 16))

    def write(self, raw: bytes) -> bool:
        self.control.connection.client.put_object(Bucket=self.bucket, Key=self.name, Body=raw)
        return True
