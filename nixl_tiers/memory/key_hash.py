"""The salted hash that places keys in the buckets of a row table: cheap for one key, and for millions at once."""

from __future__ import annotations

import secrets
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.chunk import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PRIME_BITS: Final = 30  # one digit of Python's integers: `%` is at its fastest, and 32-bit words fit a uint64 step
_WORD: Final = 0xFFFFFFFF
_WITNESSES: Final = (2, 3, 5, 7)  # Miller-Rabin with these is exact below 3.2e9
_LENGTHS: Final = tuple(bytes((length,)) for length in range(256))


class KeyHash:
    """A key's record (a byte of length, then the key) as a number, modulo a secret prime, times a secret odd number.

    Keys may come from users, who must not be able to fill one bucket (hash flooding). Both secrets are random. Two
    records of at most 113 bytes are equal modulo a prime for at most 31 of the 26 million primes of 30 bits, and
    multiplying by a random odd number is a universal hash of what is left (Dietzfelbinger's multiply-shift), so keys
    that are chosen without knowing the secrets collide no more often than random ones. A keyed BLAKE2b does the same
    and takes three times as long for one key, and much longer for many, which numpy hashes here.
    """

    def __init__(self, prime: int, multiplier: int) -> None:
        """Not for callers: use `random` or `of`."""
        self.prime = prime
        self.multiplier = multiplier
        self.last: tuple[Key, tuple[bytes, int]] = (b"", (b"", 0))
        """The last key that `of_key` was asked for, and what it returned: a look-up asks each table of each tier."""

    @classmethod
    def random(cls) -> KeyHash:
        while not _is_prime(prime := 1 << (_PRIME_BITS - 1) | secrets.randbits(_PRIME_BITS - 1) | 1):
            pass
        return cls.of(prime, secrets.randbits(32) | 1)

    @classmethod
    @cache
    def of(cls, prime: int, multiplier: int) -> KeyHash:
        """The one object with these parameters in this process. ValueError unless `random` could have chosen them."""
        if prime >> (_PRIME_BITS - 1) != 1 or not _is_prime(prime) or not (0 < multiplier <= _WORD and multiplier & 1):
            raise ValueError(f"{prime} and {multiplier} are not the parameters of a key hash")
        return cls(prime, multiplier)

    def of_key(self, key: Key) -> tuple[bytes, int]:
        """The key's record, and its hash of 32 bits."""
        record = _LENGTHS[len(key)] + key
        result = record, int.from_bytes(record, "little") % self.prime * self.multiplier & _WORD
        self.last = key, result
        return result

    def of_records(self, records: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """uint32 (n,): the hashes of records, uint8 (n, width), padded with zeros."""
        count, width = records.shape
        words = np.zeros((count, -(-width // 4)), np.dtype("<u4"))
        words.view(np.uint8)[:, :width] = records
        prime = np.uint64(self.prime)
        result = np.zeros(count, np.uint64)
        for place in reversed(range(words.shape[1])):
            result <<= np.uint64(32)
            result |= words[:, place]
            result %= prime
        result *= np.uint64(self.multiplier)
        return result.astype(np.uint32)


def _is_prime(number: int) -> bool:
    if number < 11 or number % 2 == 0:
        return number in (2, 3, 5, 7)
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _WITNESSES:
        power = pow(base, odd, number)
        if power not in (1, number - 1) and all((power := power * power % number) != number - 1 for _ in range(twos)):
            return False
    return True
