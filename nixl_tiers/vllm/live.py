"""Gauges that are true at every scrape, also while the engine is idle: vLLM reports numbers only when it steps.

The engine's process writes its gauges once a second, as one more process of prometheus_client:

    several API servers   in their common directory (PROMETHEUS_MULTIPROC_DIR), all of which each of them shows. vLLM
                          gets no gauges then, since each API server would keep an old value of its own
    one API server        in a memfd. Its parent, the API server, finds that among its children's files when /metrics is
                          scraped, and sets the gauges that vLLM has declared to what is written there

Of an engine that is no child of its API server (on another node), gauges come with its steps only.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from nixl_tiers.memory.memfd import memfd

MEMFD: Final = "nixl-tiers-gauges"
PERIOD_S: Final = 1.0

log = logging.getLogger(__name__)

Labels = tuple[tuple[str, str], ...]
Level = tuple[str, str, Labels, float]
"""Name, what it means, own labels, value."""
Written = Iterable[tuple[Any, ...]]
"""(prometheus_client's key, value, ...)."""


class Shown:
    """In the API server's process: a collector of prometheus_client without metrics of its own. It is registered before
    vLLM's gauges are, so it is asked first, and then sets them to what the engines have written."""

    def __init__(self) -> None:
        self._files: dict[int, Path] = {}  # by the child that writes it: a search is long beside a scrape

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client import REGISTRY

        declared = getattr(REGISTRY, "_names_to_collectors", {})
        reads: list[Callable[[], Written]] = [gauges.values for gauges in list(_here)]
        reads += [partial(self._values_of, child.pid) for child in multiprocessing.active_children() if child.pid]
        for read in reads:
            with suppress(Exception):  # vLLM's own metrics are shown whatever it changes, and whoever ends just now
                for key, value, *_ in read():
                    name, _, labels, _ = json.loads(key)
                    if name in declared:
                        declared[name].labels(**labels).set(value)
        return iter(())

    def _values_of(self, pid: int) -> Written:
        from prometheus_client.mmap_dict import MmapedDict

        if pid not in self._files:
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):  # closed since
                    if str(file.readlink()).startswith(f"/memfd:{MEMFD} "):
                        self._files[pid] = file
        values: Any = MmapedDict
        return values.read_all_values_from_file(self._files[pid]) if pid in self._files else ()


_shown: list[Shown] = []


def show() -> None:
    """Call it in the API server's process before vLLM's metrics are made."""
    from prometheus_client import REGISTRY

    if not _shown and _directory() is None:
        _shown.append(Shown())
        REGISTRY.register(_shown[0])


class LiveGauges:
    """In the engine's process. `model`, `engine`: the values of vLLM's own labels. One thread at a time calls it."""

    def __init__(self, model: str, engine: int) -> None:
        self.replaces_reports = _directory() is not None
        """Whether vLLM must not get the gauges besides."""
        self._labels = {"model_name": model, "engine": str(engine)}
        self._key = cache(self._make_key)
        self._file: Any = None
        self._failed = False
        self._next_s = 0.0
        _here.add(self)

    def values(self) -> Written:
        return self._file.read_all_values() if self._file is not None else ()

    def tick(self, levels: Callable[[], Iterable[Level]]) -> None:
        """Publish if the last time was a second ago or more. Call it at any rate."""
        if (now := time.monotonic()) >= self._next_s:
            self._next_s = now + PERIOD_S
            self.publish(levels)

    def publish(self, levels: Callable[[], Iterable[Level]]) -> None:
        """Raises nothing: no number is worth the thread that calls this, the engine's or that of the movers."""
        try:
            self._file = self._file or _new_file()
            now = time.time()
            for name, text, own, value in levels():
                self._file.write_value(self._key(name, text, own), value, now)
        except Exception:
            if not self._failed:
                log.exception("nixl_tiers: gauges could not be published; they are tried again, without this message")
            self._failed = True

    def _make_key(self, name: str, text: str, own: Labels) -> str:
        from prometheus_client.mmap_dict import mmap_key

        labels = {**self._labels, **dict(own)}
        return str(mmap_key(name, name, list(labels), list(labels.values()), text))


_here: Final = weakref.WeakSet[LiveGauges]()
"""An engine may run in its caller's process."""


def _directory() -> Path | None:
    path = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Path(path) if path and Path(path).is_dir() else None


def _new_file() -> Any:
    """A dict of prometheus_client that others can read."""
    from prometheus_client.mmap_dict import MmapedDict

    values: Any = MmapedDict
    if (directory := _directory()) is not None:
        return values(str(directory / f"gauge_mostrecent_{os.getpid()}.db"))
    fd = memfd(MEMFD)
    try:
        return values(f"/proc/self/fd/{fd}")  # has a descriptor of its own from then on
    finally:
        os.close(fd)
