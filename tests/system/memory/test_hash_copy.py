"""Hash and copy in one pass: xxhash's digests, the same bytes, and nothing beyond them."""

from __future__ import annotations

import threading

from xxhash import xxh3_64_digest

from nixl_tiers.memory.seal import hash_copy
from tests.memory.test_hash_copy import aligned


def test_digests_are_those_of_the_copy_while_the_source_changes(way: str) -> None:
    """A worker that writes to a row that is being stored must not give its new bytes the old ones' digest."""
    nbytes, stop = 65536 * 9 + 300, threading.Event()
    source, target = aligned(nbytes), aligned(nbytes)

    def scribble() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 256
            source[:] = value

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(100):
            digests = hash_copy(target, source, 65536)
            pieces = (target[at : at + 65536] for at in range(0, nbytes, 65536))
            assert digests == b"".join(xxh3_64_digest(piece.tobytes()) for piece in pieces)
    finally:
        stop.set()
        thread.join()
