"""A caller's mistake is one clear error, without effect on other callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch

import nixl_tiers
from nixl_tiers.mover.protocol import Store, ToMover, packet_of
from nixl_tiers.runtime import mover_link
from tests.support.file_tier import file_tier
from tests.support.leaks import host_rows_in_use
from tests.support.servers import MotoServer, S3Server
from tests.support.waiting import until, until_up

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
    assert host_rows_in_use(store) == 0


@pytest.mark.parametrize("keys", ["ab", b"ab"])
def test_a_single_key_is_refused(store: nixl_tiers.TieredStore, keys: Any) -> None:
    for call in (
        lambda: store.put(keys, [bytes(SIZE)] * 2),
        lambda: store.get(keys, np.zeros((2, SIZE), np.uint8)),
        lambda: store.locate(keys),
    ):
        with pytest.raises(TypeError, match="keys must be a list of keys, not "):
            call()


def test_no_key_kills_the_mover_of_a_shared_tier(
    moto: MotoServer,
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
    s3_credentials: Callable[[S3Server], None],
) -> None:
    s3_credentials(moto)
    place = {"bucket": s3_bucket(moto), "prefix": s3_prefix, "endpoint": moto.endpoint}
    shared = {"type": "s3", **place, "capacity": "64MiB"}
    out = np.zeros((1, SIZE), np.uint8)
    with nixl_tiers.open({"tiers": [*CPU["tiers"], shared], "wait_s": 60.0}, SIZE, "n") as store:
        until_up(store)
        movers = store.coordinator.mover_pids
        for _ in range(3):
            with pytest.raises(ValueError, match="this one has 200"):
                store.get([bytes(200)], out)
            assert store.get([bytes(112)], out) == [False]
        longest = (number.to_bytes(112) for number in range(1_000_000))

        def written() -> bool:  # not before the engine knows how full the prefix is
            store.put([next(longest)], [bytes(SIZE)])
            return store.flush(300) and store.stats()["s3"]["bytes_written"] > 0

        until(written, "an upload")
        assert store.coordinator.mover_pids == movers


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


def test_empty_calls_do_nothing(store: nixl_tiers.TieredStore) -> None:
    assert store.put([], []) == 0
    assert store.get([], np.zeros((0, SIZE), np.uint8)) == []
    assert store.locate([]) == []


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


def test_put_returns_the_length_of_the_stored_prefix() -> None:
    with nixl_tiers.open({"tiers": [{"type": "cpu", "capacity": 15 * (SIZE + 4096)}]}, SIZE, "n") as store:
        keys = [b"%d" % n for n in range(40)]
        rows = np.arange(40, dtype=np.uint8)[:, None].repeat(SIZE, 1)
        assert store.put(keys, rows) == 15
        assert store.locate(keys) == ["cpu"] * 15 + [None] * 25
        assert store.put(keys[20:30], rows[20:30]) == 10  # rows of a put that has ended are not pinned


def test_rows_that_get_lacks_are_counted_as_misses(store: nixl_tiers.TieredStore) -> None:
    store.put([b"a"], [bytes(SIZE)])
    store.get([b"a", b"b", b"c"], np.empty((3, SIZE), np.uint8))
    assert store.stats()["cpu"]["missed_never_stored"] == 2


def test_used_bytes_are_known_when_a_tier_is_up(tmp_path: Any) -> None:
    config = {"tiers": [*CPU["tiers"], file_tier(tmp_path, "16MiB")]}
    with nixl_tiers.open(config, SIZE, "n") as store:
        until_up(store)
        store.put([b"a", b"b"], [bytes(SIZE)] * 2)
        assert store.flush(300)
    with nixl_tiers.open(config, SIZE, "n") as store:
        until_up(store)
        assert store.stats()["file"]["used_bytes"] >= 2 * SIZE


def test_the_package_lists_its_names() -> None:
    assert nixl_tiers.__version__ == metadata.version("nixl-tiers")
    assert {"open", "TieredStore", "ConfigError", "__version__"} <= set(dir(nixl_tiers))


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
