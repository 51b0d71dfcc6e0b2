"""A mover that only loads, from a directory of row files where another mover of its engine stores.

A row is found by its key, so it knows nothing of what is there: it neither scans nor counts, deletes nothing, and goes
on while the other mover is down. A load trusts nothing but the seal, which names the namespace and the epoch. A row
that it loads it marks as used, as the other mover does, lest it is evicted first; what it finds bad it reports: the
core tells the other mover, which deletes it.
"""

from __future__ import annotations

import os

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.quota import DirQuota
from nixl_tiers.tiers.rowfile.tier import RowFileTier


class RowFileLoader(RowFileTier):
    """Beside a `RowFileTier` with the same configuration."""

    def __init__(self, config: FileConfig, geometry: Geometry, region: HostRegion) -> None:
        """As of `RowFileTier`."""
        super().__init__(config.model_copy(update={"write": "off"}), geometry, region)

    def _make_quota(self) -> DirQuota:
        return CountsNothing(self._config.capacity, self._row_bytes)

    def _watch(self, served: NamespaceRows, *, again: bool) -> None:
        """The other mover does."""

    def _problem(self, namespace: str) -> str:
        self._directory.refresh_time()  # which scans do, where there are any
        return super()._problem(namespace)


class CountsNothing(DirQuota):
    """What the loader has seen of files is not kept."""

    def record(
        self,
        path: RowPath,
        status: os.stat_result | None,
        age_from: int = 0,
        *,
        stored: bool = False,
        deleted: bool = False,
    ) -> None:
        """The other mover finds out by its scans."""
