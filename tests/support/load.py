"""Load for a store: threads that get and put chunks of prompts as engines do, and know every byte that may come back.

A key stands for one content for ever, as a block hash does. So whatever a store calls a hit can be checked, whoever
put it, and whatever has happened to it since.
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

from nixl_tiers.chunk import Key
from nixl_tiers.store import TieredStore

_POISON: Final = 0xEE  # what a buffer holds before a get: a hit that moved nothing shows


def content(key: Key, nbytes: int, salt: bytes = b"") -> NDArray[np.uint8]:
    """The bytes of `key`: uint8 (nbytes,). Others for every `salt`, as with other weights."""
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=16, key=salt).digest(), "little")
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(nbytes), np.uint8)


def put(store: TieredStore, keys: Sequence[Key], salt: bytes = b"") -> int:
    """Put the content of `keys`; how many were accepted."""
    return store.put(keys, [content(key, store.chunk_bytes, salt) for key in keys])


def get(store: TieredStore, keys: Sequence[Key], salt: bytes = b"") -> tuple[list[bool], list[Key]]:
    """Get `keys` and look at every byte: (hits as the store tells them, those of them that are wrong)."""
    out = np.full((len(keys), store.chunk_bytes), _POISON, np.uint8)
    hits = store.get(keys, out)
    found = [(key, row) for key, hit, row in zip(keys, hits, out, strict=True) if hit]
    return hits, [key for key, row in found if not np.array_equal(row, content(key, store.chunk_bytes, salt))]


@dataclass
class Seen:
    """What a load has met so far. Times in seconds."""

    gets: int = 0
    puts: int = 0
    chunks: int = 0
    hits: int = 0
    wrong: list[Key] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    longest_get_s: float = 0.0
    longest_put_s: float = 0.0

    @property
    def longest_s(self) -> float:
        return max(self.longest_get_s, self.longest_put_s)


class Load:
    """`threads` threads that ask for beginnings of `prompts` prompts of `depth` chunks, and put what they miss.

    A `fresh` share of them are prompts that nobody has asked for before. The same seed asks for the same prompts in the
    same order, thread by thread. A context manager: it runs inside of it.
    """

    def __init__(
        self,
        store: TieredStore,
        *,
        seed: int = 0,
        threads: int = 2,
        prompts: int = 24,
        depth: int = 8,
        fresh: float = 0.2,
        pause_s: float = 0,
        salt: bytes = b"",
    ) -> None:
        self.seen = Seen()
        self._store = store
        self._seed = seed
        self._prompts = prompts
        self._depth = depth
        self._fresh = fresh
        self.pause_s = pause_s
        """Between two turns of a thread, in seconds; may be changed at any time."""
        self._salt = salt
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(threads)
        ]

    @property
    def turns(self) -> int:
        """Gets that have been answered."""
        return self.seen.gets

    @property
    def keys(self) -> list[Key]:
        """Every key that this load asks for again and again, prompt by prompt."""
        return [self._key(prompt, place) for prompt in range(self._prompts) for place in range(self._depth)]

    def stop(self, timeout_s: float = 120.0) -> None:
        """End the threads. Raises AssertionError if one of them is still waiting for an answer after `timeout_s`."""
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

    def _key(self, prompt: int | str, place: int) -> Key:
        return f"load-{self._seed}-{prompt}-{place}".encode()

    def _run(self, number: int) -> None:
        random, turns = Random(f"{self._seed} {number}"), itertools.count()
        while not self._stop.wait(self.pause_s):
            fresh = random.random() < self._fresh
            prompt = f"{number}-{next(turns)}" if fresh else random.randrange(self._prompts)
            try:
                self._turn([self._key(prompt, place) for place in range(random.randint(1, self._depth))])
            except Exception as error:  # noqa: BLE001 (a store that raises is a finding, whatever it raises)
                with self._lock:
                    self.seen.errors.append(f"{type(error).__name__}: {error}")
                return

    def _turn(self, keys: list[Key]) -> None:
        began = time.monotonic()
        hits, wrong = get(self._store, keys, self._salt)
        got = time.monotonic()
        missing = [key for key, hit in zip(keys, hits, strict=True) if not hit]
        chunks = [content(key, self._store.chunk_bytes, self._salt) for key in missing]
        computed = time.monotonic()
        if missing:
            self._store.put(missing, chunks)
        stored = time.monotonic()
        with self._lock:
            seen = self.seen
            seen.gets += 1
            seen.puts += bool(missing)
            seen.chunks += len(keys)
            seen.hits += sum(hits)
            seen.wrong += wrong
            seen.longest_get_s = max(seen.longest_get_s, got - began)
            seen.longest_put_s = max(seen.longest_put_s, stored - computed)
