"""The salted hash that places keys in the buckets of a row table."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class KeyHash:
    """XXH3 with a secret seed of 64 bits.

    Keys may come from users, who must not be able to fill one bucket (hash flooding): without the seed nobody knows
    which keys share one. A collision costs time only, since tables compare whole keys.
    """

    seed: int

    @classmethod
    def random(cls) -> Self:
        return cls(secrets.randbits(64))

    def of_key(self, key: Key) -> int:
        """The key's hash of 64 bits."""
        return xxh3_64_intdigest(key, self.seed)

    def of_records(self, records: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """uint64 (n,): the hashes of records, uint8 (n, width): a byte of length, the key, padding. 0.25 us each; holds
        the interpreter lock meanwhile."""
        lengths = np.clip(records[:, 0], 1, records.shape[1] - 1)  # as they are, unless another process damaged them
        result = np.empty(len(records), np.uint64)
        for length in np.unique(lengths).tolist():
            (rows,) = np.nonzero(lengths == length)
            keys = np.ascontiguousarray(records[rows, 1 : 1 + length]).view(f"V{length}").ravel().tolist()
            result[rows] = np.fromiter(map(xxh3_64_intdigest, keys, repeat(self.seed)), np.uint64, len(keys))
        return result
