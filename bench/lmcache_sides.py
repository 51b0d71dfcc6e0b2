"""LMCache's adapters for files and S3, on rows of a host region.

LMCache pins versions that vLLM does not have. Its adapters need little of that: `pip install --no-deps --target DIR
lmcache awscrt` and PYTHONPATH=DIR are enough.
"""

from __future__ import annotations

import hashlib
import select
from pathlib import Path
from typing import Any, Final

from bench.pages import Unavailable
from bench.rounds import Direction, Side
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion

WAIT_S: Final = 300.0


class LMCache(Side):
    """One task of all rows. Rows have new keys in each round, since an adapter may leave out what it has."""

    def __init__(self, region: HostRegion, payload_bytes: int, model: str, config: dict[str, object]) -> None:
        """`config`: an adapter's. Raises Unavailable."""
        try:
            import torch
            from lmcache.v1.distributed.api import ObjectKey
            from lmcache.v1.distributed.l2_adapters import create_l2_adapter
            from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
            from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

            self._adapter = create_l2_adapter(get_l2_adapter_config_class(str(config["type"])).from_dict(config))
        except ImportError as error:
            raise Unavailable(f"LMCache cannot be imported: {error}") from error
        about = MemoryObjMetadata(torch.Size([payload_bytes]), torch.uint8, 0, payload_bytes, ref_count=1)
        self._rows = [TensorMemoryObj(torch.from_numpy(row[:payload_bytes]), about, None) for row in region.rows_view]
        self._key = lambda digest: ObjectKey(digest, model, 0)
        self._keys: list[Any] = []
        self._old: list[Any] = []
        self._round = 0

    def store(self) -> None:
        self._old += self._keys
        self._round += 1
        digests = (hashlib.sha256(b"%d %d" % (self._round, row)).digest() for row in range(len(self._rows)))
        self._keys = [self._key(digest) for digest in digests]
        task = self._adapter.submit_store_task(self._keys, self._rows)
        self._wait("store", self._adapter.get_store_event_fd())
        if not self._adapter.pop_completed_store_tasks()[task].is_successful():
            raise SystemExit("LMCache's adapter failed to store")

    def load(self) -> None:
        task = self._adapter.submit_load_task(self._keys, self._rows)
        self._wait("load", self._adapter.get_load_event_fd())
        found = self._adapter.query_load_result(task)
        if found is None or found.popcount() != len(self._keys):
            raise SystemExit(f"LMCache's adapter failed to load: {found}")

    def close(self) -> None:
        self._adapter.delete(self._old + self._keys)
        self._adapter.close()

    def _wait(self, what: Direction, fd: int) -> None:
        from lmcache.v1.platform import consume_fd

        if not select.select([fd], [], [], WAIT_S)[0]:
            raise SystemExit(f"LMCache's adapter did not {what} within {WAIT_S:g} s")
        consume_fd(fd)


def lmcache_files(folder: Path, region: HostRegion, payload_bytes: int) -> LMCache:
    """Its C++ adapter for files, with as many threads as it has by default. Raises Unavailable."""
    config: dict[str, object] = {"type": "fs_native", "base_path": str(folder), "use_odirect": True}
    return LMCache(region, payload_bytes, "bench", config)


def lmcache_s3(place: S3Config, region: HostRegion, payload_bytes: int) -> LMCache:
    """Its adapter for S3. The bucket's name comes first in the keys, as it knows no other way to say it in the path.
    Raises Unavailable."""
    assert place.endpoint is not None
    scheme, _, host = place.endpoint.rpartition("://")
    config: dict[str, object] = {
        "type": "s3",
        "s3_endpoint": host,
        "s3_region": place.region or "us-east-1",
        "disable_tls": scheme == "http",
        "s3_prefer_http2": scheme != "http",
    }
    return LMCache(region, payload_bytes, f"{place.bucket}/{place.prefix}", config)
