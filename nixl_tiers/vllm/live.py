"""Gauges that are true at every scrape, also while the engine is idle: vLLM reports numbers only when it steps.

The engine's process publishes its gauges once a second, and the API server's process shows them at /metrics:

    one API server      it has a memfd, which its child, the engine, finds among its parent's files; when /metrics is
                        scraped, the gauges that vLLM has declared are set to what the engine has written there
    several of them     vLLM has a directory of prometheus_client (PROMETHEUS_MULTIPROC_DIR), all of which every API
                        server shows: the engine writes there as one more process. vLLM gets no gauges then, since
                        each API server would keep an old value of its own

Where neither is found (an engine on another node), gauges come with the engine's steps only.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nixl_tiers.base.metrics import INFO, INFO_TEXT, METRICS, PREFIX

MEMFD: Final = "nixl-tiers-gauges"
SLOT_BYTES: Final = 1 << 16  # of one engine
MAX_ENGINES: Final = 256
PERIOD_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
_HEAD: Final = struct.Struct("<II")  # bytes of the text, and its CRC-32
KNOWN: Final = "vllm:num_requests_running"
"""A gauge of vLLM whose series exist from the start: it has the label values of each engine."""

Level = tuple[str, Mapping[str, str], float]
"""Name, own labels, value."""


# --- the API server's process ------------------------------------------------------------------------------------


class Shown:
    """A collector of prometheus_client without metrics of its own. It is registered before vLLM's gauges are, so it is
    asked first, and then sets them to what the engines have written."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(MEMFD, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, MAX_ENGINES * SLOT_BYTES)

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client import REGISTRY

        made: Mapping[str, Any] = getattr(REGISTRY, "_names_to_collectors", {})
        known = (
            (sample.labels for metric in made[KNOWN].collect() for sample in metric.samples) if KNOWN in made else ()
        )
        with suppress(Exception):  # vLLM's own metrics are shown whatever it changes about its gauges
            for labels in _engine_labels(known):
                for name, own, value in _read(self._fd, labels["engine"]):
                    if name in made:
                        made[name].labels(**labels, **own).set(value)
        return iter(())


_shown: list[Shown] = []


def show() -> None:
    """Call it in the API server's process before vLLM's metrics are made."""
    from prometheus_client import REGISTRY

    if not _shown and not _directory():
        _shown.append(Shown())
        REGISTRY.register(_shown[0])


# --- the engine's process ----------------------------------------------------------------------------------------


class LiveGauges:
    """Publishes the gauges of engine number `engine`; `publish` may be called at any rate, by one thread at a time."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._sink: _Memfd | _Directory | None = None
        self._next_s = 0.0
        self._backoff_s = PERIOD_S
        self.replaces_reports = bool(_directory())
        """Whether vLLM must not get the gauges besides."""

    def due(self) -> bool:
        """Whether it is time to publish again."""
        return time.monotonic() >= self._next_s

    def publish(self, levels: Sequence[Level]) -> None:
        self._next_s = time.monotonic() + (PERIOD_S if self._sink is not None else self._backoff_s)
        with suppress(OSError, ValueError):
            if self._sink is None:
                self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
                self._sink = self._find()
            if self._sink is not None:
                self._sink.write(levels)

    def _find(self) -> _Memfd | _Directory | None:
        if directory := _directory():
            known = {labels["engine"]: labels for labels in _engine_labels(_samples_of(directory))}
            labels = known.get(str(self._engine))
            return None if labels is None else _Directory(directory, labels)
        for pid in (os.getppid(), os.getpid()):
            if (path := _memfd_of(pid)) is not None:
                return _Memfd(path, self._engine)
        return None


class _Memfd:
    def __init__(self, path: Path, engine: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._offset = engine * SLOT_BYTES
        self._last = b""

    def write(self, levels: Sequence[Level]) -> None:
        text = json.dumps(levels).encode()
        if text != self._last and len(text) <= SLOT_BYTES - _HEAD.size:
            self._last = text
            os.pwrite(self._fd, _HEAD.pack(len(text), zlib.crc32(text)) + text, self._offset)


class _Directory:
    def __init__(self, directory: Path, labels: Mapping[str, str]) -> None:
        from prometheus_client import mmap_dict

        values: Any = mmap_dict.MmapedDict
        self._values = values(str(directory / f"gauge_mostrecent_{os.getpid()}.db"))
        self._labels = labels
        self._texts = {PREFIX + name: metric.text for name, metric in METRICS.items()} | {PREFIX + INFO: INFO_TEXT}

    def write(self, levels: Sequence[Level]) -> None:
        from prometheus_client.mmap_dict import mmap_key

        for name, own, value in levels:
            labels = {**self._labels, **own}
            key = mmap_key(name, name, list(labels), list(labels.values()), self._texts.get(name, ""))
            self._values.write_value(key, value, time.time())


# --- inside ------------------------------------------------------------------------------------------------------


def _directory() -> Path | None:
    path = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Path(path) if path and Path(path).is_dir() else None


def _memfd_of(pid: int) -> Path | None:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if str(file.readlink()).startswith(f"/memfd:{MEMFD} "):
                return file
    return None


def _read(fd: int, engine: str) -> list[Level]:
    """What this engine has written last; nothing if it is being written just now."""
    if not (engine.isdecimal() and int(engine) < MAX_ENGINES):
        return []
    data = os.pread(fd, SLOT_BYTES, int(engine) * SLOT_BYTES)
    size, checksum = _HEAD.unpack_from(data)
    text = data[_HEAD.size : _HEAD.size + size]
    return (
        [(name, own, value) for name, own, value in json.loads(text)] if size and zlib.crc32(text) == checksum else []
    )


def _engine_labels(samples: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """vLLM's own labels of each engine."""
    return [{name: labels[name] for name in ("model_name", "engine")} for labels in samples if "engine" in labels]


def _samples_of(directory: Path) -> Iterator[Mapping[str, str]]:
    from prometheus_client import mmap_dict

    values: Any = mmap_dict.MmapedDict
    for path in directory.glob("gauge_*.db"):
        for key, *_ in values.read_all_values_from_file(str(path)):
            name, _, labels, _ = json.loads(key)
            if name == KNOWN:
                yield labels
