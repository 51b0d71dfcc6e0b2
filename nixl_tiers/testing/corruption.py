"""Ways to corrupt a row at rest, by name. A corrupted row must never be a hit."""

from __future__ import annotations

from collections.abc import Callable

from nixl_tiers.base.chunk import Geometry, Key
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.testing.medium import NAMESPACE, Medium, content

SMALL = Geometry(cells=2, cell_payload=30_000, sub_blocks=3)  # both cells and the seal have padding
OTHER_NAMESPACE = bytes(reversed(NAMESPACE))

Damage = Callable[[Medium, int, Key], None]
"""Corrupts the row of a key in a slot of NAMESPACE."""


def flip_one_bit(place: int) -> Damage:
    """Flip the lowest bit of the byte at `place`."""

    def damage(medium: Medium, slot: int, key: Key) -> None:
        raw = bytearray(medium.read(NAMESPACE, slot, key))
        raw[place] ^= 1
        medium.write(NAMESPACE, slot, key, bytes(raw))

    return damage


def cut_to(keep_bytes: int) -> Damage:
    return lambda medium, slot, key: medium.cut(NAMESPACE, slot, key, keep_bytes)


def replace_by(foreign: Callable[[Key], bytes]) -> Damage:
    return lambda medium, slot, key: medium.write(NAMESPACE, slot, key, foreign(key))


def delete_it(medium: Medium, slot: int, key: Key) -> None:
    medium.delete(NAMESPACE, slot, key)


def sealed(key: Key, geometry: Geometry = SMALL, namespace: bytes = NAMESPACE, epoch: int = 0) -> bytes:
    """A whole row with a valid seal, for this key, geometry, namespace and epoch."""
    row = content(key, 0, geometry)
    Sealer(geometry, namespace, epoch).seal(row, key)
    return row.tobytes()


DAMAGES: dict[str, dict[str, Damage]] = {
    "bit-flips": {
        "first": flip_one_bit(0),
        "middle": flip_one_bit(SMALL.row_bytes // 2),
        "padding": flip_one_bit(SMALL.cell_payload),
        "seal": flip_one_bit(SMALL.row_bytes - SMALL.seal_bytes + 100),
        "last": flip_one_bit(SMALL.row_bytes - 1),
    },
    "cuts": {
        "in the middle": cut_to(SMALL.row_bytes // 2),
        # One byte would not do: in one row of 256 the last byte of a digest is zero, as may be what is read back.
        "in the seal": cut_to(SMALL.row_bytes - 16),
    },
    "foreign-rows": {
        "zeroes": replace_by(lambda _: bytes(SMALL.row_bytes)),
        "another key": replace_by(lambda key: sealed(b"not " + key)),
        "another namespace": replace_by(lambda key: sealed(key, namespace=OTHER_NAMESPACE)),
        "another epoch": replace_by(lambda key: sealed(key, epoch=1)),
        "another geometry": replace_by(lambda key: sealed(key, Geometry(1, SMALL.row_bytes - 1000))),
    },
    "emptied": {"emptied": cut_to(0)},
    "deleted": {"deleted": delete_it},
}
