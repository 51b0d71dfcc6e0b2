"""The S3 tier: one object per row below `<prefix>/<namespace>/`, each transferred by NIXL with a handle of its own
(transfers.py). Engines share the prefix: rows are found by existence checks (rows.py), and the mover that writes the
usage record lists and deletes for all of them (budget.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nixl_tiers.base.chunk import Geometry, Key
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import EndedMoves, Entry, ExistenceAnswer, FinishedBatch, Move, StorageTier
from nixl_tiers.tiers.manifests import ManifestKeeper, ManifestMedium
from nixl_tiers.tiers.s3.conditional import get_object
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.rows import Rows
from nixl_tiers.tiers.s3.transfers import RowTransfers


class S3Tier(StorageTier):
    """Rows as objects of one bucket. Slots are only a count: an object is found by its key."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion, times: Times = PRODUCTION) -> None:
        """Uses neither NIXL nor the network; `open` does."""
        self._config = config
        self._control = S3Control(config, times)
        self._rows = Rows(config, geometry.row_bytes, self._control, times)
        self._transfers = RowTransfers(config, geometry, region, self._control, self._rows, times=times)
        self._manifests = ManifestKeeper(geometry.row_bytes, secrets.token_hex(8))

    def identify(self, engine: str) -> None:
        self._manifests.engine = engine

    def describe(self, description: Description) -> None:
        self._manifests.description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        self._manifests.stop()
        self._control.connect()
        self._transfers.open(namespace, epoch)
        self._rows.serve(namespace.hex())
        # Not for weights that were replaced under a running engine: each time leaves a namespace that is never used
        # again, and no listing counts what is not a row.
        if not epoch and self._config.write != "off":
            name = self._rows.names.manifest(namespace.hex())
            medium = _Manifests(self._control, self._rows, self._config.bucket, name)
            self._manifests.serve(namespace.hex(), epoch, medium, self._control.connection.server_time_s)
        return self._rows.slots

    def list_rows(self) -> Iterator[list[Entry]]:
        return iter(())

    def store(self, moves: Sequence[Move]) -> int:
        return self._transfers.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        return self._transfers.load(moves)

    def poll(self) -> list[FinishedBatch]:
        return self._transfers.poll()

    def ended_moves(self) -> Sequence[EndedMoves]:
        return self._transfers.moves.take_ended()

    def give_up_waiting(self) -> None:
        """The usage record is released when nothing runs."""
        self._transfers.moves.give_up()

    def check_existence(self, check_id: int, keys: Sequence[Key], chain: bool) -> bool:
        return self._rows.check_existence(check_id, keys, chain)

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
        return self._transfers.busy or self._rows.busy

    @property
    def poll_s(self) -> float:
        return 0.0 if self._rows.busy else self._transfers.poll_s

    @property
    def denials(self) -> Mapping[str, str]:
        return self._control.denials.current()

    @property
    def used_bytes(self) -> int:
        return self._rows.used_bytes

    def close(self) -> None:
        self._rows.close()
        self._control.close()
        self._transfers.data.close()
        self._manifests.stop(last=True)


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
