"""The S3 tier: one object per row below `<prefix>/<namespace>/`, each transferred by NIXL with a handle of its own
(transfers.py). Which rows are there, and which of them go: rows.py.

A private prefix: one engine owns it by a lease (lease.py); the tier of another one only reads, and lists again when it
gets the lease. The quota counts every row below it, of any namespace. Space counts as free when the server has
confirmed the deletes, so the bucket never holds more than the capacity, and the uploads of an owner that is replaced.

A shared prefix: rows that others store are found by periodic listings and existence checks. Rows that the core
deletes only leave its index, since others may use them: the janitor (janitor.py) deletes, and grants uploads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nixl_tiers.base.chunk import Geometry, Key
from nixl_tiers.base.manifest import Description
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import (
    MAX_SLOTS,
    Entry,
    ExistenceAnswer,
    FinishedBatch,
    Move,
    StorageTier,
)
from nixl_tiers.tiers.manifests import ManifestKeeper, ManifestMedium
from nixl_tiers.tiers.s3.conditional import small_object
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.existence import ExistenceChecker
from nixl_tiers.tiers.s3.janitor import Janitor, JanitorIntervals
from nixl_tiers.tiers.s3.lease import Ownership
from nixl_tiers.tiers.s3.rows import PrefixRows
from nixl_tiers.tiers.s3.transfers import RowTransfers

RELIST_S: Final = 30.0  # between two listings of a shared prefix
SWEEP_S: Final = 3600.0  # the longest time between two listings of a private prefix for max_age
SWEEPS_PER_AGE: Final = 8
INTERVALS: Final = JanitorIntervals()
LEASE_CHECK_S: Final = 1.0  # how often a private prefix's tier looks whether it has got the lease


class S3Tier(StorageTier):
    """Rows as objects of one bucket. Slots are only a count: an object is found by its key."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion) -> None:
        """Uses neither NIXL nor the network; `open` does."""
        self._config = config
        self._row_bytes = geometry.row_bytes
        self._owner = Ownership(config)
        self._control = S3Control(config, lambda: self._owner.may_delete)
        self._rows = PrefixRows(config, self._row_bytes, self._control, self._owner)
        self._transfers = RowTransfers(config, geometry, region, self._control, self._rows)
        exists = self._control.connection.exists
        self._existence = ExistenceChecker(lambda key: exists(self._rows.name(key), self._row_bytes))
        self._janitor: Janitor | None = None
        self._manifests = ManifestKeeper(self._row_bytes, self._owner.engine)

    def identify(self, engine: str) -> None:
        self._owner.engine = self._manifests.engine = engine

    def describe(self, description: Description) -> None:
        self._manifests.description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        self._manifests.stop()
        credentials = self._control.connect()
        self._transfers.open(namespace, epoch, credentials)
        self._existence.clear()
        self._owner.start(self._control)
        self._rows.serve(namespace.hex(), epoch)
        # Not for weights that were replaced under a running engine: each time leaves a namespace that is never used
        # again, and no listing counts what is not a row.
        if not epoch and not self._owner.reads_only:
            medium = _Manifests(namespace.hex(), self._config.bucket, self._control, self._rows, self._owner)
            self._manifests.serve(namespace.hex(), epoch, medium, self._control.connection.server_time_s)
        if self._owner.reads_only:  # whatever others have stored
            return MAX_SLOTS
        slots = min(self._config.capacity // self._row_bytes, MAX_SLOTS)
        if self._rows.upload_quota is None:
            return slots
        if self._janitor is None:
            bucket, prefix = self._control, self._config.prefix
            self._janitor = Janitor(
                lambda: bucket.connection.client,
                self._config.bucket,
                prefix,
                quota=self._rows.upload_quota,
                intervals=INTERVALS,
                denials=self._control.denials,
                max_age_s=self._config.max_age,
            )
            self._janitor.start()
        # The index must hold all rows below the prefix, upload windows included, or each listing would repeat the rest.
        return min(2 * slots, MAX_SLOTS)

    @property
    def relist_s(self) -> float | None:
        if self._rows.upload_quota is not None:
            return max(RELIST_S, self._rows.page_pause_s)
        return None if self._owner.reads_only else LEASE_CHECK_S

    def list_rows(self) -> Iterator[list[Entry]]:
        return self._rows.list_again()

    def maintain(self) -> Iterator[list[Entry]]:
        """On a private prefix: delete expired rows. On a shared one, the janitor does."""
        return self._rows.sweep()

    @property
    def maintain_s(self) -> float | None:
        age_s = self._config.max_age
        if age_s is None or self._rows.upload_quota is not None:
            return None
        return min(max(age_s / SWEEPS_PER_AGE, RELIST_S), SWEEP_S)

    def store(self, moves: Sequence[Move]) -> int:
        self._rows.tick = max([self._rows.tick, *(move.tick + 1 for move in moves)])
        return self._transfers.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        return self._transfers.load(moves)

    def poll(self) -> list[FinishedBatch]:
        self._rows.count_confirmed_deletes()
        return self._transfers.poll()

    def give_up_waiting(self) -> None:
        """The lease is handed over when nothing runs."""
        self._transfers.moves.give_up()

    def check_existence(self, check_id: int, keys: Sequence[Key], chain: bool) -> bool:
        if self._rows.upload_quota is None:
            return False
        self._existence.start(check_id, keys, chain=chain)
        return True

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        return [self._rows.found(answer) for answer in self._existence.answers()]

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        self._rows.delete([key for _, key in entries], self._transfers.uploading)

    @property
    def busy(self) -> bool:
        return self._transfers.busy or self._existence.busy

    @property
    def poll_s(self) -> float:
        return 0.0 if self._existence.busy else self._transfers.poll_s

    @property
    def denials(self) -> Mapping[str, str]:
        return self._control.denials.current()

    @property
    def used_bytes(self) -> int:
        return self._rows.used_bytes

    def close(self) -> None:
        if self._janitor is not None:
            self._janitor.close()
            self._janitor = None
        self._existence.close()
        self._control.close()
        self._transfers.data.close()
        self._manifests.stop(last=True)
        self._owner.close(release=self._control.idle and not self._transfers.data.busy)


class _Manifests(ManifestMedium):
    """For the namespace that is served, once there are rows."""

    def __init__(self, namespace: str, bucket: str, control: S3Control, rows: PrefixRows, owner: Ownership) -> None:
        self._namespace = namespace
        self._bucket = bucket
        self._control = control
        self._rows = rows
        self._owner = owner

    def is_wanted(self) -> bool:
        return self._owner.may_write and len(self._rows.quota) > 0

    def read(self, namespace: str) -> bytes | None:
        return small_object(self._control.connection.client, self._bucket, self._rows.names.manifest(namespace))

    def write(self, raw: bytes) -> bool:
        name = self._rows.names.manifest(self._namespace)
        self._control.connection.client.put_object(Bucket=self._bucket, Key=name, Body=raw)
        return True

    def other_bytes(self) -> Mapping[str, int] | None:
        return self._rows.quota.other_bytes()
