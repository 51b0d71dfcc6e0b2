"""A mover that only loads, from a prefix where another mover of its engine stores.

An object is found by its key, so it needs no lease and no listing, and goes on while the other mover is down. A load
trusts nothing but the seal, which names the namespace and the epoch. What it finds bad it reports: the core tells the
other mover, which deletes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nixl_tiers.base.chunk import Geometry, Key, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.s3.rows import Rows
from nixl_tiers.tiers.s3.tier import S3Tier


class S3Loader(S3Tier):
    """Beside an `S3Tier` with the same configuration."""

    def __init__(self, config: S3Config, geometry: Geometry, region: HostRegion, times: Times = PRODUCTION) -> None:
        """As of `S3Tier`."""
        super().__init__(config.model_copy(update={"write": "off"}), geometry, region, times)

    def _make_rows(self) -> Rows:
        return RowsToLoad(self._config, self._row_bytes, self._control)


class RowsToLoad(Rows):
    """Nothing is known of them but their names, and nothing is written."""

    def serve(self, namespace: str, epoch: int) -> None:
        self._namespace = namespace

    def slots(self, capacity: int) -> int:
        return capacity

    @property
    def used_bytes(self) -> int:
        return 0  # the other mover counts

    def room_for(self, key: Key, uploads: int) -> Outcome | None:
        return Outcome.FAILED

    def upload_begins(self, key: Key) -> None:
        """None does."""

    def upload_ended(self, key: Key, *, done: bool) -> Outcome:
        return Outcome.FAILED

    def delete(self, keys: Sequence[Key], uploading: Collection[Key]) -> None:
        """The other mover is told."""

    def is_missing(self, key: Key) -> None:
        """The core forgets it."""

    def is_unusable(self, key: Key) -> None:
        """The core has the other mover delete it."""

    def poll(self) -> None:
        """Nothing is asked."""

    @property
    def has_rows(self) -> bool:
        return False
