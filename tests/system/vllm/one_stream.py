"""A request on a real engine whose load begins before its rows have come, and what happens to it then."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from nixl_tiers.core.rows import RowState
from nixl_tiers.swap.streams import LoadCall
from tests.support.waiting import until_up

CORRUPT: Final = 5  # the place of the row that is
TORN: Final = 2  # and of the first that is another key's before it is copied
WAIT_S: Final = 0.5  # for a tier whose supervisor hangs
HELD_UP_S: Final = 10.0  # beyond the deadline
_COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def recorded(owner: Any, name: str) -> list[Any]:
    """What this method returns from now on, until `delattr(owner, name)`."""
    method, returned = getattr(owner, name), list[Any]()

    def recording(*arguments: Any) -> Any:
        returned.append(method(*arguments))
        return returned[-1]

    setattr(owner, name, recording)
    return returned


def store_all(engine: Any, core: Any) -> None:
    """Step until what was computed is stored."""
    while any(row.state is RowState.FILLING for row in core.host.index.values()):
        engine.step()


def ask_stream(
    llm: Any,
    store: Any,
    connector: Any,
    *,
    kill: Callable[[], None],
    prompt: list[int],
    max_tokens: int,
    what: str,
) -> dict[str, Any]:
    """The first mover is stopped until the load has begun. Then, by `what`: it goes on ("whole"), and one of the rows
    is found to be damaged ("corrupt"); it goes on when the request has ended ("late"), and the supervisor hangs until
    then, too ("hang"); `kill` is called ("kill"); the request is aborted ("abort"); the connector is reset ("reset");
    the first rows are copied, but most of them are another key's by then ("torn"); the engine is killed ("die").

    Returns the answer's tokens, whether the load was a stream, what vLLM took from each load in chunks, how many chunks
    were stored, whether the load was long past its deadline, and in the end: references of workers to rows, and blocks
    that requests hold.
    """
    from vllm import SamplingParams

    coordinator, streams = store.coordinator, connector.connector_scheduler.manager.streams
    engine, core, mover = llm.llm_engine, coordinator._core, coordinator.mover_pids[0]
    loaded = recorded(streams, "load_ended")
    store_all(engine, core)
    stored = store.stats()["cpu"]["stored"]
    os.kill(mover, signal.SIGSTOP)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs: list[Any] = []
    begins = recorded(core.streams, "begin")  # one, which may end in the step in which it begins
    held_up = False
    with torn_copies(coordinator, what == "torn"), waits_of(core, WAIT_S if what == "hang" else None):
        engine.add_request("streamed", {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests() and not begins:
            outputs += engine.step()
        begun = begins[0][1] if begins else None
        if begun is not None and what == "corrupt":
            damage(coordinator, begun.rows[CORRUPT].key)
        goes_on = supervisor_of(coordinator)
        if what in ("whole", "corrupt", "torn"):
            os.kill(mover, signal.SIGCONT)
        elif what == "hang":
            goes_on.clear()
        elif what == "kill":
            kill()
        elif what == "die":
            assert begun is not None
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "abort":
            engine.abort_request(["streamed"])
        elif what == "reset":
            assert not llm.reset_prefix_cache(reset_connector=True), "the request holds blocks"
        while engine.has_unfinished_requests() or core.streams._open:
            outputs += engine.step()
            if begun is not None and coordinator.now() > begun.plan.deadline_s + HELD_UP_S:
                held_up = True
                goes_on.set()
        for _ in range(2):  # what vLLM frees when it is told of the end
            engine.step()
        goes_on.set()
    if what != "kill":
        os.kill(mover, signal.SIGCONT)
    until_up(store)
    del streams.load_ended, core.streams.begin
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return {
        "streamed": begun is not None,
        "tokens": list(outputs[-1].outputs[0].token_ids) if outputs else [],
        "loaded": loaded,
        "stored": store.stats()["cpu"]["stored"] - stored,
        "held_up": held_up,
        "pinned": sum(row.worker_refs for row in core.host.index.values()),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }


def supervisor_of(coordinator: Any) -> threading.Event:
    """While it is not set, the thread waits at whatever it does next."""
    goes_on, link = threading.Event(), coordinator._link
    goes_on.set()

    def held(call: Callable[..., Any], *arguments: Any) -> Any:
        goes_on.wait()
        return call(*arguments)

    for name in ("on_tick", "on_message"):
        setattr(link, name, partial(held, getattr(link, name)))
    return goes_on


@contextmanager
def waits_of(core: Any, wait_s: float | None) -> Iterator[None]:
    """Requests of this time wait so long at most."""
    state, limits = core._state, core._state.limits
    if wait_s is not None:
        state.limits = replace(limits, wait_s=wait_s)
    yield
    state.limits = limits


@contextmanager
def torn_copies(coordinator: Any, torn: bool) -> Iterator[None]:
    """Before rows of a stream are copied it is cut, and those behind are another key's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    swap = get_kv_transfer_group().connector_worker.worker._swap

    def load_call(group: int) -> LoadCall:
        good = type(swap).load_call(swap, group)
        inner = _COPY(good.function)

        def copy(_: object, pairs: int, n: int) -> int:
            with coordinator.core() as core:
                (stream,) = core.streams._open.values()
                core.streams.cut(stream.request, TORN)
                rows = coordinator.region.rows_view
                for row in stream.rows[TORN:]:
                    rows[row.index] = rows[stream.rows[0].index]
            failed: int = inner(good.context, pairs, n)
            return failed

        outer = _COPY(copy)
        return LoadCall(ctypes.cast(outer, ctypes.c_void_p).value or 0, 0, (good, outer), good.release)

    if torn:
        swap.load_call = load_call
    yield
    if torn:
        del swap.load_call


def damage(coordinator: Any, key: bytes) -> None:
    """Of the row's file."""
    (file,) = Path(coordinator.config.storage[0].path).rglob(f"{key.hex()}.row")
    with file.open("r+b") as row:
        half = row.read(coordinator.region.geometry.row_bytes // 2)
        row.seek(0)
        row.write(half[::-1])
