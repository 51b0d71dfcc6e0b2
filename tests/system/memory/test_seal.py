"""The seal: what is refused, what is zeroed, and that the bytes are those of docs/reference/formats.md."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from nixl_tiers.memory.seal import Sealer, Verdict
from tests.memory.test_seal import EPOCH, NAMESPACE, PIECES, noise


def test_a_sealer_is_thread_safe() -> None:
    sealer = Sealer(PIECES, NAMESPACE, EPOCH)
    rows = [noise(PIECES, seed) for seed in range(16)]
    expected = []
    for n, row in enumerate(rows):
        alone = row.copy()
        sealer.seal(alone, b"%d" % n, present=n)
        expected.append(alone)

    def work(n: int) -> list[Verdict]:
        found = []
        for _ in range(20):
            sealer.seal(rows[n], b"%d" % n, present=n)
            found.append(sealer.verify(rows[n], b"%d" % n))
            found.append(sealer.verify(expected[n - 1], b"%d" % ((n - 1) % len(rows))))
        return found

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(len(rows))):
            assert set(found) == {Verdict.OK}
    for row, alone in zip(rows, expected, strict=True):
        assert np.array_equal(row, alone)
