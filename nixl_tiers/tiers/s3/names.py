"""Names of rows below a prefix, `<prefix>/<namespace in hex>/<2 hex>/<key in hex>`, and sets of keys in the order of
their names, in about five bytes a key more than the keys themselves have.

A Python set takes 114 bytes for a key of 36. Here keys lie in leaves of at most LEAF_KEYS, each one immutable `bytes`
object: an operation decodes one leaf, so none takes long, and nothing is ever sorted as a whole.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from nixl_tiers.base.chunk import NAMESPACE_BYTES, Key, key_of_object, object_name
from nixl_tiers.base.manifest import MANIFEST_NAME

WRITE_TEST_NAME: Final = ".probe"
"""Below the prefix: a small object that is written to find out whether uploads are allowed and conditional writes
supported. It is overwritten and never deleted, because other movers that share the prefix may be in the middle of such
a test."""

RECENT_NAMES: Final = 2048  # more than transfers run at once: each of them asks several times

_HEX_DIGITS: Final = frozenset("0123456789abcdef")
LEAF_KEYS: Final = 64  # at most 255, since a leaf begins with their number in one byte

Place = bytes
"""A key behind the one byte of its fan-out folder (chunk.object_name): places sort as the names of their objects do."""


def below(prefix: str, name: str) -> str:
    """An object's name below a prefix, which may be empty, as may be the name."""
    return f"{prefix}/{name}" if prefix and name else prefix or name


class RowNames:
    """Of one prefix. Objects with any other name are never counted or deleted."""

    def __init__(self, prefix: str) -> None:
        self.root = f"{prefix}/"
        self.name = lru_cache(RECENT_NAMES)(self._name)
        """The name of a row, by namespace in hexadecimal and key."""

    def _name(self, namespace: str, key: Key) -> str:
        return f"{self.root}{namespace}/{object_name(key)}"

    def manifest(self, namespace: str) -> str:
        return f"{self.root}{namespace}/{MANIFEST_NAME}"

    def parse(self, name: str) -> tuple[str, Key] | None:
        """(namespace, key), or None if this is not the name of a row."""
        if not name.startswith(self.root):
            return None
        namespace, _, rest = name[len(self.root) :].partition("/")
        if len(namespace) != 2 * NAMESPACE_BYTES or not _HEX_DIGITS.issuperset(namespace):
            return None
        key = key_of_object(rest)
        return None if key is None else (namespace, key)


def place_of(key: Key) -> Place:
    return hashlib.blake2b(key, digest_size=1).digest() + key


class KeySet:
    """For one thread at a time. All methods but `update`, `difference_update` and `len` decode one or two leaves."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        """`leaves`: as `pack` returns them, disjoint and in ascending order."""
        self._leaves = list(leaves) or [pack(())]
        # Of each leaf, the least place that belongs there.
        self._firsts = [b"", *(place_in(leaf, 0) for leaf in self._leaves[1:])]
        self._count = sum(leaf[0] for leaf in self._leaves)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        place = place_of(key)
        return place in unpack(self._leaves[self._leaf_of(place)])

    def add(self, key: Key) -> bool:
        """False if it was there."""
        before = self._count
        self.update([place_of(key)])
        return self._count > before

    def discard(self, key: Key) -> bool:
        """False if it was not there."""
        before = self._count
        self.difference_update([place_of(key)])
        return self._count < before

    def update(self, places: Sequence[Place]) -> None:
        """Add these places, in ascending order."""
        for leaf, part in self._parts(places):
            self._replace(leaf, sorted({*unpack(self._leaves[leaf]), *part}))

    def difference_update(self, places: Sequence[Place]) -> None:
        """Remove those of these places, in ascending order, that are there."""
        for leaf, part in self._parts(places):
            removed = set(part)
            self._replace(leaf, [place for place in unpack(self._leaves[leaf]) if place not in removed])

    def after(self, place: Place, count: int) -> list[Place]:
        """The next places after `place` (b"": from the first), in order: `count` of them or a few more; fewer only at
        the end."""
        leaf = self._leaf_of(place)
        here = unpack(self._leaves[leaf])
        found = here[bisect_right(here, place) :]
        while len(found) < count and leaf + 1 < len(self._leaves):
            leaf += 1
            found += unpack(self._leaves[leaf])
        return found

    def _leaf_of(self, place: Place) -> int:
        return max(0, bisect_right(self._firsts, place) - 1)

    def _parts(self, places: Sequence[Place]) -> Iterable[tuple[int, Sequence[Place]]]:
        """(leaf, those of the places that belong there); the leaf may be replaced before the next one is asked for."""
        at = 0
        while at < len(places):
            leaf = self._leaf_of(places[at])
            end = bisect_left(places, self._firsts[leaf + 1], at) if leaf + 1 < len(self._firsts) else len(places)
            yield leaf, places[at:end]
            at = end

    def _replace(self, leaf: int, places: list[Place]) -> None:
        self._count += len(places) - self._leaves[leaf][0]
        end = leaf + 1
        if len(places) < LEAF_KEYS // 4 and end < len(self._leaves):
            places = places + unpack(self._leaves[end])  # or deletes would leave many small leaves
            end += 1
        pieces = -(-len(places) // LEAF_KEYS) or 1
        size = -(-len(places) // pieces) or 1
        parts = [places[at : at + size] for at in range(0, len(places), size)] or [[]]
        self._firsts[leaf:end] = [self._firsts[leaf], *(part[0] for part in parts[1:])]
        self._leaves[leaf:end] = map(pack, parts)


def pack(places: Sequence[Place]) -> bytes:
    """A leaf: their number, their lengths, the places themselves."""
    return bytes((len(places), *map(len, places))) + b"".join(places)


def unpack(leaf: bytes) -> list[Place]:
    at = 1 + leaf[0]
    lengths = leaf[1:at]
    if lengths and lengths.count(lengths[0]) == len(lengths):  # as with one engine's keys
        return list(_layout(len(lengths), lengths[0]).unpack_from(leaf, at))
    places = []
    for length in lengths:
        places.append(leaf[at : at + length])
        at += length
    return places


@lru_cache(4096)
def _layout(count: int, length: int) -> Struct:
    return Struct(f"{length}s" * count)


def place_in(leaf: bytes, number: int) -> Place:
    """One of the places of a leaf."""
    at = 1 + leaf[0] + sum(leaf[1 : 1 + number])
    return leaf[at : at + leaf[1 + number]]
