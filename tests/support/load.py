"""A load generator for a store: threads that get and put the chunks of prompts as engines do, and verify every byte.

The content of a chunk follows from its key, as it does from a block hash. So every hit can be verified, whichever
process stored it and however long ago.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Key
from nixl_tiers.store import TieredStore

_POISON: Final = 0xEE  # fills a buffer before each get, so that a hit without a copy is detected


def content(key: Key, nbytes: int, salt: bytes = b"") -> NDArray[np.uint8]:
    """The bytes of `key`: uint8 (nbytes,). They differ by `salt`, as they would with other weights."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=16, key=salt).digest(), "little")
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(nbytes), np.uint8)


def put(store: TieredStore, keys: Sequence[Key], salt: bytes = b"") -> int:
    """Put the content of `keys`; returns how many were accepted."""
    return store.put(keys, [content(key, store.chunk_bytes, salt) for key in keys])


def get(store: TieredStore, keys: Sequence[Key], salt: bytes = b"") -> tuple[list[bool], list[Key]]:
    """Get `keys` and verify every byte: (the hits as the store reports them, the keys of hits with wrong bytes)."""
    out = np.full((len(keys), store.chunk_bytes), _POISON, np.uint8)
    hits = store.get(keys, out)
    found = [(key, row) for key, hit, row in zip(keys, hits, out, strict=True) if hit]
    return hits, [key for key, row in found if not np.array_equal(row, content(key, store.chunk_bytes, salt))]


@dataclass
class LoadStats:
    """What a load generator has measured so far. Times in seconds."""

    gets: int = 0
    chunks: int = 0
    hits: int = 0
    wrong: list[Key] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    longest_get_s: float = 0.0
    longest_put_s: float = 0.0

    @property
    def longest_s(self) -> float:
        return max(self.longest_get_s, self.longest_put_s)


class LoadGenerator:
    """`threads` threads that get prefixes of `prompts` prompts of `depth` chunks each, and put the chunks they miss.

    A share `new_share` of the requests are for prompts never requested before. The same seed gives the same requests in
    the same order, thread by thread. A context manager: the threads run inside of it.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        seed: int = 0,
        threads: int = 2,
        prompts: int = 24,
        depth: int = 8,
        new_share: float = 0.2,
        pause_s: float = 0,
        salt: bytes = b"",
    ) -> None:
        self.stats = LoadStats()
        self._store = store
        self._seed = seed
        self._prompts = prompts
        self._depth = depth
        self._new_share = new_share
        self.pause_s = pause_s
        """Between two requests of a thread, in seconds; may be changed at any time."""
        self._salt = salt
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(threads)
        ]

    @property
    def keys(self) -> list[Key]:
        """Every key that is requested repeatedly, prompt by prompt."""
        return [self._key(prompt, index) for prompt in range(self._prompts) for index in range(self._depth)]

    def stop(self, timeout_s: float = 120.0) -> None:
        """Stop the threads. Raises AssertionError if one of them is still inside a get or put after `timeout_s`."""
        self._stop.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"a get or put has not been answered within {timeout_s:g} s"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _key(self, prompt: int | str, index: int) -> Key:
        return f"load-{self._seed}-{prompt}-{index}".encode()

    def _run(self, number: int) -> None:
        random, serials = Random(f"{self._seed} {number}"), itertools.count()
        while not self._stop.wait(self.pause_s):
            new = random.random() < self._new_share
            prompt = f"{number}-{next(serials)}" if new else random.randrange(self._prompts)
            try:
                self._request([self._key(prompt, index) for index in range(random.randint(1, self._depth))])
            except Exception as error:  # noqa: BLE001 (whatever a store raises is a finding)
                with self._lock:
                    self.stats.errors.append(f"{type(error).__name__}: {error}")
                return

    def _request(self, keys: list[Key]) -> None:
        started = time.monotonic()
        hits, wrong = get(self._store, keys, self._salt)
        got = time.monotonic()
        missing = [key for key, hit in zip(keys, hits, strict=True) if not hit]
        chunks = [content(key, self._store.chunk_bytes, self._salt) for key in missing]
        computed = time.monotonic()
        if missing:
            self._store.put(missing, chunks)
        stored = time.monotonic()
        with self._lock:
            stats = self.stats
            stats.gets += 1
            stats.chunks += len(keys)
            stats.hits += sum(hits)
            stats.wrong += wrong
            stats.longest_get_s = max(stats.longest_get_s, got - started)
            stats.longest_put_s = max(stats.longest_put_s, stored - computed)
