"""TieredStore: a caller's mistake is one clear error, and what a put of more than fits, and a get of many keys, ask."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import nixl_tiers
from nixl_tiers.base.chunk import Key
from nixl_tiers.mover.protocol import Store, ToMover, packet_of
from nixl_tiers.runtime import mover_link
from tests.support.file_tier import file_tier
from tests.support.leaks import host_rows_in_use
from tests.support.waiting import until, until_up
from tests.test_store import SIZE as SMALL
from tests.test_store import config, keys_of

SIZE = 64 << 10
CPU: dict[str, Any] = {"tiers": [{"type": "cpu", "capacity": 4 << 20}]}


@pytest.fixture
def store() -> Any:
    with nixl_tiers.open(CPU, SIZE, "arguments") as store:
        yield store


CALLS: dict[str, Callable[[nixl_tiers.TieredStore, Any], Any]] = {
    "put": lambda store, key: store.put([key], [bytes(SIZE)]),
    "get": lambda store, key: store.get([key], np.zeros((1, SIZE), np.uint8)),
    "locate": lambda store, key: store.locate([key]),
    "prepare_store": lambda store, key: store.coordinator.prepare_store("request", [key]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_refuses_invalid_keys(
    store: nixl_tiers.TieredStore, call: Callable[[nixl_tiers.TieredStore, Any], Any]
) -> None:
    for key in ("a", None, 5, bytearray(b"a")):
        with pytest.raises(TypeError, match="a key must be bytes, not "):
            call(store, key)
    for key in (b"", bytes(113), bytes(200)):
        with pytest.raises(ValueError, match=f"a key must have 1 to 112 bytes, this one has {len(key)}"):
            call(store, key)
    for keys in ("ab", b"ab"):
        with pytest.raises(TypeError, match="keys must be a list of keys, not "):
            store.put(keys, [bytes(SIZE)] * 2)  # type: ignore[arg-type]
    assert host_rows_in_use(store) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((None, SIZE, "n"), "config: must be a table of fields or the name of a file, not None"),
        ((CPU, 0, "n"), "chunk_bytes: must be a whole number of bytes, at least 1, not 0"),
        ((CPU, True, "n"), "chunk_bytes: must be a whole number"),
        ((CPU, "2MiB", "n"), 'chunk_bytes: must be a whole number of bytes, at least 1, not "2MiB"'),
        ((CPU, SIZE, None), "namespace: must be a text that is not empty, not None"),
        ((CPU, SIZE, ""), 'namespace: must be a text that is not empty, not ""'),
        ((CPU, SIZE, 5), "namespace: must be a text that is not empty, not 5"),
    ],
)
def test_open_names_the_argument_that_is_wrong(arguments: tuple[Any, Any, Any], sentence: str) -> None:
    with pytest.raises(nixl_tiers.ConfigError, match=f"^{sentence}"):
        nixl_tiers.open(*arguments)


TYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_of_any_type_are_rows_and_out(store: nixl_tiers.TieredStore, dtype: torch.dtype) -> None:
    keys = [b"a", b"b", b"c"]
    raw = torch.arange(3 * SIZE, dtype=torch.int64).to(torch.uint8).reshape(3, SIZE)
    if dtype is torch.bool:
        raw %= 2
    rows = raw.view(dtype).reshape(3, 2, -1)
    assert store.put(keys, rows) == 3
    out = torch.zeros_like(rows)
    assert store.get(keys, out) == [True] * 3
    assert torch.equal(out.view(torch.uint8).reshape(3, SIZE), raw)
    array = np.zeros((3, SIZE // 4), np.float32)
    assert store.get(keys, array) == [True] * 3
    assert array.tobytes() == raw.numpy().tobytes()
    assert store.put([b"d"], [rows[0].transpose(0, -1).contiguous().transpose(0, -1)]) == 1  # other strides
    assert store.get([b"d"], out[:1]) == [True]
    assert torch.equal(out[:1].view(torch.uint8).reshape(1, SIZE), raw[:1])


def test_arrays_of_the_wrong_size_are_refused(store: nixl_tiers.TieredStore) -> None:
    assert store.put([b"a"], [bytes(SIZE)]) == 1
    wide = np.zeros((1, 2 * SIZE), np.uint8)
    frozen = np.zeros((1, SIZE), np.uint8)
    frozen.flags.writeable = False
    for out in (wide, wide[:, ::2], torch.zeros((1, 5)), torch.zeros((1, 2 * SIZE), dtype=torch.uint8)[:, ::2]):
        with pytest.raises(ValueError, match=f"out must be uint8 of shape \\(1, {SIZE}\\)"):
            store.get([b"a"], out)
    with pytest.raises(ValueError, match="can be written to"):
        store.get([b"a"], frozen)
    with pytest.raises(TypeError, match="out must be a numpy array or a torch tensor, not list"):
        store.get([b"a"], [0])
    with pytest.raises(ValueError, match=r"rows\[0\] is on meta: it must be in the memory of the CPU"):
        store.put([b"b"], torch.zeros((1, SIZE), dtype=torch.uint8, device="meta"))
    with pytest.raises(TypeError, match=r"rows\[0\] cannot be read as bytes"):
        store.put([b"b"], ["text"])
    with pytest.raises(TypeError, match="rows must be an array"):
        store.put([b"b"], 5)
    assert host_rows_in_use(store) == 1


def test_every_call_raises_after_close() -> None:
    with nixl_tiers.open(CPU, SIZE, "n") as store:
        assert store.put([b"a"], [bytes(SIZE)]) == 1
        assert "closed" not in repr(store)
    for call in (
        *(lambda call=call: call(store, b"a") for name, call in CALLS.items() if name in ("put", "get", "locate")),
        store.flush,
        store.stats,
        store.reset,
        store.__enter__,
    ):
        with pytest.raises(RuntimeError, match=r"^this store is closed$"):
            call()
    assert repr(store) == f"<TieredStore cpu: chunks of {SIZE} bytes, closed>"
    store.close()


def test_a_concurrent_close_ends_put_and_get_with_an_error() -> None:
    store = nixl_tiers.open(CPU, SIZE, "n")
    errors: list[Exception] = []

    def traffic() -> None:
        out = np.zeros((8, SIZE), np.uint8)
        try:
            for number in range(1_000_000):
                keys = [b"%d" % (8 * number + n) for n in range(8)]
                store.put(keys, out)
                store.get(keys, out)
        except Exception as error:  # noqa: BLE001 (another thread looks at it)
            errors.append(error)

    threads = [threading.Thread(target=traffic) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: store.stats()["cpu"]["evictions"] + store.stats()["cpu"]["hits"] > 100, "traffic")
    store.close()
    for thread in threads:
        thread.join(120)
    assert [(type(error), str(error)) for error in errors] == [(RuntimeError, "this store is closed")] * 3


def test_a_job_that_no_mover_would_accept_fails_alone(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fitting(message: ToMover) -> bytes | None:
        return None if isinstance(message, Store) and message.moves[0].key == b"bad" else packet_of(message)

    monkeypatch.setattr(mover_link, "packet_of", fitting)
    config = {"tiers": [*CPU["tiers"], file_tier(tmp_path, "16MiB")]}
    with nixl_tiers.open(config, SIZE, "n") as store:
        until_up(store)
        movers = store.coordinator.mover_pids
        assert store.put([b"good"], [bytes(SIZE)]) == 1
        assert store.flush(300)
        assert store.put([b"bad"], [bytes(SIZE)]) == 1
        assert store.flush(300)
        assert store.locate([b"good", b"bad"]) == ["cpu", "cpu"]
        assert store.stats()["file"]["failed"] == 1
        assert store.stats()["file"]["rows"] == 1
        assert store.coordinator.mover_pids == movers
        assert store.stats()["file"]["kills"] == 0


def rows_of(keys: list[Key]) -> np.ndarray:
    return np.frombuffer(b"".join(key.ljust(SMALL, b".") for key in keys), np.uint8).reshape(len(keys), SMALL)


@pytest.mark.parametrize("rows", [7, 601])
def test_put_of_more_than_host_memory_holds_writes_each_key_once_and_ends(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last part is larger than what is left, and more rows are pinned than one search passes over."""
    keys = keys_of(rows + rows // 2)
    written: Counter[Key] = Counter()
    with nixl_tiers.open(config(rows=rows), SMALL, "n") as store:
        prepare_store = store.coordinator.prepare_store

        def counted(*arguments: Any, **others: Any) -> Any:
            plan = prepare_store(*arguments, **others)
            written.update(plan.keys)
            assert written.total() <= len(keys), "it writes for ever"
            return plan

        monkeypatch.setattr(store.coordinator, "prepare_store", counted)
        assert store.put(keys, rows_of(keys)) == rows
        assert written == Counter(keys[:rows])
        out = np.zeros((rows, SMALL), np.uint8)
        assert store.get(keys[:rows], out) == [True] * rows
        assert np.array_equal(out, rows_of(keys[:rows]))
