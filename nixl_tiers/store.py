"""TieredStore: blocking put and get over a coordinator, without vLLM."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from nixl_tiers.base.chunk import Geometry, Key, Namespace, check_key
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config import schema as configuration
from nixl_tiers.config.fields import shown
from nixl_tiers.config.schema import ConfigError, TiersConfig
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.blocking import Interrupts, StallTimeout
from nixl_tiers.runtime.coordinator import LOCATE_BATCH, Coordinator
from nixl_tiers.runtime.here import ask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nixl_tiers.core.manager import TierManager

log = logging.getLogger(__name__)

PUT_KEYS: Final = 1024  # whose rows are allocated in one hold of the lock
GET_KEYS: Final = 256  # that are looked up, and whose load is prepared, in one hold
AHEAD_KEYS: Final = 4096  # that a get has come up at once
MEMORY_POLL_S: Final = 0.01


def open(  # noqa: A001 - nixl_tiers.open is what it is called
    config: Mapping[str, Any] | str | Path | TiersConfig,
    chunk_bytes: int,
    namespace: str,
    *,
    description: str = "",
) -> TieredStore:
    """Open a store of chunks of `chunk_bytes` bytes each. Chunks put under another `namespace` are never found in it.

    config: a dict, JSON text, or the path of a .json, .yaml or .yml file.
    description: one line for people, kept beside the rows with the namespace's name (`nixl-tiers inspect` shows both).

    Returns when each tier has listed what it holds, or is down, at the latest after 10 s; see `TieredStore.wait_ready`.
    A tier that is down is retried while the store is open.

    Raises ConfigError (one sentence) if the configuration can never work, RegionError (a RuntimeError) if
    the memory for the cpu tier cannot be allocated.
    """
    return open_with(PRODUCTION, config, chunk_bytes, namespace, description)


def open_with(times: Times, config: Any, chunk_bytes: int, namespace: str, description: str = "") -> TieredStore:
    """`open` with other times than production's, for tests."""
    checked = config if isinstance(config, TiersConfig) else configuration.load(_source(config))
    chunk_bytes = _chunk_bytes(chunk_bytes)
    _check_namespace(namespace)
    if not isinstance(description, str):
        raise ConfigError(f"description: must be a text, not {shown(description)}")
    geometry = Geometry(cells=1, cell_payload=chunk_bytes)
    configuration.check_rows(checked, geometry.row_bytes)
    began_s = time.monotonic()
    here = ask(checked, starting=True, deadline_s=times.open_s, in_all_s=times.open_look_s)
    facts = {"api": "nixl_tiers.open", "name": namespace, "chunk_bytes": chunk_bytes, "salt": checked.salt}
    region = HostRegion.create(geometry, checked.cpu.capacity // geometry.row_bytes, huge_pages=checked.cpu.huge_pages)
    try:
        region.prefault()
        about = Description(model=namespace, note=description)
        ready_s = max(0.0, began_s + times.ready_s - time.monotonic())
        known: dict[str, Any]
        name, known = Namespace.of(facts), {"description": about, "here": here, "times": times}
        return TieredStore(Coordinator.open(checked, name, region, ready_s=ready_s, **known))
    except BaseException:
        region.close()
        raise


def _source(config: object) -> Any:
    if not isinstance(config, (Mapping, str, Path)):
        raise ConfigError(f"config: must be a table of fields or the name of a file, not {shown(config)}")
    return config


def _check_namespace(namespace: object) -> None:
    if not isinstance(namespace, str) or not namespace:
        raise ConfigError(f"namespace: must be a text that is not empty, not {shown(namespace)}")


def _chunk_bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"chunk_bytes: must be a whole number of bytes, at least 1, not {shown(value)}")
    return int(value)


@dataclass(slots=True)
class _Part:
    """Some of the keys of a get, from place `start` on, and the request (`name`) on whose behalf they come up.

    `come`: how many rows have, of those that it has asked for; `to_come`: and have not. `unsure`: it waits for
    something else too, such as a tier's listing or answer, so that only look-ups can tell what of it is to be brought
    up. Of such parts one at a time is asked for: a medium answers few questions at once.
    """

    name: str
    start: int
    keys: list[Key]
    come: int = 0
    to_come: int = 0
    unsure: bool = False


class TieredStore:
    """Puts and gets chunks by key, over host memory and any number of storage tiers.

    Made by `nixl_tiers.open`. Thread-safe. Close it, or use it as a context manager. `coordinator` is what it
    stands on; schedulers hold its core (`with store.coordinator.core() as core`), which never waits.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        """Not for callers: use nixl_tiers.open."""
        self.coordinator = coordinator
        self._region = coordinator.region
        self._wait_s = coordinator.config.wait_s
        self._names = map("api-{}".format, itertools.count())  # of requests; a generator would not be thread-safe
        quarter = max(1, self._region.rows // 4)
        self._batch = min(PUT_KEYS, quarter)
        self._most_waiting = 2 * quarter  # rows that a put leaves to be written to storage
        self._most_asked = min(AHEAD_KEYS, quarter)
        self._get_keys = min(GET_KEYS, max(1, self._most_asked // 4))

    def put(self, keys: Sequence[Key], rows: Any) -> int:
        """Store chunk `rows[i]` under `keys[i]`. Returns how many of them, counted from the first, are in a tier now.

        keys: bytes of length 1 to 112.
        rows: n chunks of chunk_bytes bytes each: uint8 (n, chunk_bytes), an array or CPU tensor of any other type with
        as many bytes, or a list of arrays, tensors or buffers.

        Storage tiers are written in the background. A caller that is faster than they are is slowed down
        (back-pressure) before rows would be evicted unwritten: by at most `wait_s` a batch, and by at most that in all
        while nothing is written. Fewer than n are in a tier if no tier has room for them: host memory is full of
        pinned rows or of this put's own, and no tier below could take them.

        Raises TypeError or ValueError for keys and rows that cannot be stored, RuntimeError after `close`.
        """
        with self._call() as interrupts:
            keys = _checked_keys(keys)
            chunks = self._chunks(keys, rows)
            whole = next(self._names)
            stall = StallTimeout(self._wait_s)
            try:
                for start in range(0, len(keys), self._batch):
                    part = slice(start, start + self._batch)
                    self._wait_for_room(len(keys[part]), stall, interrupts)
                    if not self._put_part(keys[part], chunks[part], whole, interrupts):
                        break
                places = self._locate(keys)
            finally:
                with self.coordinator.core() as core:
                    core.finish(whole)
            return next((i for i, place in enumerate(places) if place is None), len(keys))

    def _put_part(
        self, keys: list[Key], chunks: Sequence[NDArray[np.uint8]], whole: str, interrupts: Interrupts
    ) -> bool:
        """Whether all of them were stored."""
        self._write(dict(zip(keys, chunks, strict=True)), interrupts)
        with self.coordinator.core() as core:
            core.pin(whole, keys)  # before the next part needs room
        return None not in self._locate(keys)

    def _write(self, chunk_of: Mapping[Key, NDArray[np.uint8]], interrupts: Interrupts) -> None:
        """Write those that no host row holds, as far as there is room."""
        name = next(self._names)  # a new request: rows of earlier parts are older, and evicted first
        try:
            plan = self.coordinator.prepare_store(name, list(chunk_of), call=True)
            for key, row in zip(plan.keys, plan.rows, strict=True):
                self._region.rows_view[row, : self.chunk_bytes] = chunk_of[key]
                interrupts.point()
            if plan.keys:
                self._region.mark(np.array(plan.rows), 0, plan.store_seq, True)
        finally:
            self.coordinator.end_call(name)  # in any case; rows that are not marked have failed

    def get(self, keys: Sequence[Key], out: Any) -> list[bool]:
        """Fetch chunks into `out`. True at i: verified bytes of keys[i] are in out[i]; else out[i] is unchanged.

        out: uint8 (n, chunk_bytes), or a contiguous array or CPU tensor of any other type with as many bytes.

        Waits for promotions from storage tiers as long as rows come, and at most `wait_s` seconds after the last one.
        A tier that is still being listed may hold any key.

        Raises TypeError or ValueError for invalid keys and an `out` that does not fit, RuntimeError after `close`.
        """
        with self._call() as interrupts:
            keys = _checked_keys(keys)
            return self._get(keys, _out_of(out, len(keys), self.chunk_bytes), interrupts)

    def _get(self, keys: list[Key], out: NDArray[np.uint8], interrupts: Interrupts) -> list[bool]:
        """Part by part: each is looked up when there is room for what it asks for, and again when all of that has come,
        which is read then; or when nothing has come of any of them for `wait_s`."""
        hits, stall = [False] * len(keys), StallTimeout(self._wait_s)
        parts: list[_Part] = []  # that are asked for
        begun = come = 0  # keys of the parts so far; rows that have come for those that are read
        try:
            while begun < len(keys) or parts:
                room = self._most_asked - sum(len(part.keys) for part in parts)
                may_ask = not parts or (room >= self._get_keys and not any(part.unsure for part in parts))
                if new := begun < len(keys) and may_ask:
                    parts.append(_Part(next(self._names), begun, keys[begun : begun + self._get_keys]))
                    begun += self._get_keys
                with self.coordinator.core() as core:
                    if new:
                        core.arrive(parts[-1].name, RequestWishes(patient=True))
                    part = parts[-1] if new else self._due(core, parts, stall, come, interrupts)
                    rows = self._look_up(core, part, stalled=stall.left_s <= 0)
                if rows is None:
                    continue
                for place, row in rows.items():
                    out[place] = self._region.rows_view[row, : self.chunk_bytes]
                    hits[place] = True
                    self._point(interrupts)
                come += part.come
                parts.remove(part)
                self.coordinator.end_call(part.name)
        finally:
            for part in parts:
                self.coordinator.end_call(part.name)
        return hits

    def _due(
        self, core: TierManager, parts: Sequence[_Part], stall: StallTimeout, come: int, interrupts: Interrupts
    ) -> _Part:
        """Wait for a part to be looked up again. One that is not known to come is, whenever something has happened."""
        names, unsure = [part.name for part in parts], next((part for part in parts if part.unsure), None)
        waited = False
        while True:
            for part, (come_of, to_come) in zip(parts, core.rows_to_come(names), strict=True):
                part.come, part.to_come = come_of, to_come
            stalled = stall.expired(come + sum(part.come for part in parts))
            core.wait_on(names, self.coordinator.now() + stall.left_s)
            for part in parts:
                if stalled or not (part.to_come or part.unsure):
                    return part
            if waited and unsure is not None:
                return unsure
            self._wait(stall, interrupts)
            waited = True

    def _look_up(self, core: TierManager, part: _Part, *, stalled: bool) -> dict[int, int] | None:
        """The host rows of what is there of a part, by the place of each key; None if the rest is worth a wait."""
        now = self.coordinator.now()
        answers = core.look_up_keys(part.name, part.keys, now)
        pending = {key for key, answer in zip(part.keys, answers, strict=True) if answer is Lookup.PENDING}
        ((part.come, part.to_come),) = core.rows_to_come([part.name])
        part.unsure = len(pending) > part.to_come
        rows = None
        if stalled or not pending:
            found = {at: part.keys[at] for at, answer in enumerate(answers) if answer is Lookup.HIT}
            core.count_misses(part.name, [key for at, key in enumerate(part.keys) if at not in found], now)
            plan = self.coordinator.prepare_load(part.name, list(found.values()), call=True)
            rows = {part.start + at: row for at, row in zip(found, plan.rows, strict=True)}
        core.end_step()
        return rows

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Promote chunks to host memory in the background, so that a later `get` need not wait for storage.

        Returns at once. In the order of `keys`, behind what any `get` waits for; of more than half of what the cpu tier
        holds, the first, and nothing while dozens of such calls are before it. Keys that no tier holds are ignored.
        Chunks that have come are evicted like any others.

        Raises TypeError or ValueError for invalid keys, RuntimeError after `close`.
        """
        with self._call():
            checked = _checked_keys(keys)
            with self.coordinator.core() as core:
                core.prefetch(checked)

    def locate(self, keys: Sequence[Key]) -> list[str | None]:
        """The name of the first tier that holds each key now ("cpu", "file", "s3"), or None. Loads nothing,
        and asks no medium: it is what this engine knows. What others have stored below a shared S3 prefix it knows from
        `get` and `prefetch`.

        Raises TypeError or ValueError for invalid keys, RuntimeError after `close`.
        """
        with self._call():
            return self._locate(_checked_keys(keys))

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until each tier has listed all that it held, or is down. False if that took longer than `timeout_s`
        seconds (None: no limit). Until then `get` waits for unknown keys (within `wait_s`), `locate` does not find
        them, and nothing is written to the tier."""
        self._check_open()
        ready = self.coordinator.wait_ready(timeout_s)
        self._check_open()
        return ready

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every write to a storage tier has finished or failed. False if that took longer than `timeout_s`
        seconds (None: no limit)."""
        self._check_open()
        flushed = self.coordinator.flush(timeout_s)
        self._check_open()
        return flushed

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters and gauges by tier, the same numbers as the metrics (bytes where a name says so, else rows), and as
        "problem" a sentence about what is wrong with the tier, as far as it is known, else ""."""
        with self._call():
            problems, counters = self.coordinator.problems(), self.coordinator.counters()
        return {name: {**numbers, "problem": problems[name]} for name, numbers in counters.items()}

    def reset(self) -> None:
        """Forget everything: what was put before is never a hit again (see `on_reset`)."""
        with self._call():
            self.coordinator.reset()

    def close(self, timeout_s: float | None = None) -> None:
        """Close the store. Moves that are running are finished, for at most `timeout_s` seconds (default 10).
        Chunks that are not written to a storage tier yet are lost: `flush` first, or configure `flush_on_exit_s` for
        tiers with `write: on_evict`. A second call, and one in a forked child, does nothing."""
        self.coordinator.close(timeout_s)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self._region.geometry.payload_bytes

    def __repr__(self) -> str:
        tiers = ", ".join(("cpu", *self.coordinator.config.names))
        closed = ", closed" if self.coordinator.closed else ""
        return f"<TieredStore {tiers}: chunks of {self.chunk_bytes} bytes{closed}>"

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _call(self) -> Iterator[Interrupts]:
        """One call that holds the core, or owns rows: Ctrl-C cannot interrupt it before it has let go of them."""
        self._check_open()
        try:
            with Interrupts() as interrupts:
                yield interrupts
        except Exception:
            self._check_open()  # the error may be the result of a concurrent close
            raise

    def _check_open(self) -> None:
        if self.coordinator.closed:
            raise RuntimeError("this store is closed")

    def _locate(self, keys: Sequence[Key]) -> list[str | None]:
        places: list[str | None] = []
        for start in range(0, len(keys), LOCATE_BATCH):
            with self.coordinator.core() as core:
                places += core.where(keys[start : start + LOCATE_BATCH])
        return places

    def _wait_for_room(self, count: int, stall: StallTimeout, interrupts: Interrupts) -> None:
        """Back-pressure: hold up a put that is faster than the tiers, or than the memory of the first minutes."""
        until_s = time.monotonic() + self._wait_s
        with self.coordinator.core() as core:
            while not self.coordinator.has_memory(count) and time.monotonic() < until_s:
                self.coordinator.changed.wait(MEMORY_POLL_S)
                self._point(interrupts)
            if core.pressure() <= self._most_waiting:
                return
        until_s = time.monotonic() + self._wait_s
        self.coordinator.look()
        with self.coordinator.core() as core:
            stall.restart()
            while (backlog := core.pressure()) > self._most_waiting and time.monotonic() < until_s:
                if stall.expired(-backlog):
                    return
                self._wait(stall, interrupts)

    def _wait(self, stall: StallTimeout, interrupts: Interrupts) -> None:
        stall.wait(self.coordinator.changed)
        self._point(interrupts)

    def _point(self, interrupts: Interrupts) -> None:
        """Here a call may end: by Ctrl-C, or since the store is being closed."""
        self._check_open()
        interrupts.point()

    def _chunks(self, keys: list[Key], rows: Any) -> Sequence[NDArray[np.uint8]]:
        if not hasattr(rows, "__len__"):
            raise TypeError(f"rows must be an array, a tensor or a list, not {type(rows).__name__}")
        if len(keys) != len(rows):
            raise ValueError(f"{len(keys)} keys but {len(rows)} rows")
        if len(set(keys)) != len(keys):
            raise ValueError("the keys of one put must differ from each other")
        return _rows_of(rows, self.chunk_bytes)


def _checked_keys(keys: Any) -> list[Key]:
    if isinstance(keys, (str, bytes, bytearray)):
        raise TypeError(f"keys must be a list of keys, not {type(keys).__name__}")
    checked = list[Key](keys)
    for key in checked:
        check_key(key)
    return checked


# --- callers' chunks as bytes: numpy arrays, torch tensors, anything with a buffer ------------------------------------


def _rows_of(rows: Sequence[Any], chunk_bytes: int) -> list[NDArray[np.uint8]]:
    """uint8 (chunk_bytes,) for each of `rows`: an array or tensor of any type, or any contiguous buffer.

    Without a copy where the memory is contiguous. Raises TypeError, ValueError: one sentence that names the row.
    """
    return [_row(row, f"rows[{place}]", chunk_bytes) for place, row in enumerate(rows)]


def _out_of(out: Any, count: int, chunk_bytes: int) -> NDArray[np.uint8]:
    """uint8 (count, chunk_bytes) over the memory of `out`: a contiguous array or CPU tensor of any type.

    Raises TypeError, ValueError: one sentence that names `out`.
    """
    tensor = _is_tensor(out)
    if not tensor and not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array or a torch tensor, not {type(out).__name__}")
    contiguous = out.is_contiguous() if tensor else out.flags.c_contiguous
    right = len(out.shape) > 0 and out.shape[0] == count and out.nbytes == count * chunk_bytes
    if not right or not contiguous:
        raise ValueError(
            f"out must be uint8 of shape ({count}, {chunk_bytes}), or another contiguous array or tensor of {count} "
            f"rows of {chunk_bytes} bytes"
        )
    flat = _flat_tensor(out, "out") if tensor else _flat_array(out, "out")
    if not flat.flags.writeable:
        raise ValueError("out must be an array that can be written to")
    return flat.reshape(count, chunk_bytes)


def _row(row: Any, name: str, chunk_bytes: int) -> NDArray[np.uint8]:
    if _is_tensor(row):
        flat = _flat_tensor(row, name)
    elif isinstance(row, np.ndarray):
        flat = _flat_array(row, name)
    else:
        try:
            flat = np.frombuffer(row, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise TypeError(f"{name} cannot be read as bytes: {error}") from None
    if flat.nbytes != chunk_bytes:
        raise ValueError(f"{name} has {flat.nbytes} bytes, but this store's chunks have {chunk_bytes}")
    return flat


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # a caller with a tensor has imported it
    return torch is not None and isinstance(value, torch.Tensor)


def _flat_tensor(tensor: Any, name: str) -> NDArray[np.uint8]:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: it must be in the memory of the CPU")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is a tensor without plain memory ({tensor.layout})")
    # numpy knows neither bfloat16 nor any of the 8-bit floats.
    flat: NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _flat_array(array: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if array.dtype.hasobject:
        raise TypeError(f"{name} holds Python objects, not bytes")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
