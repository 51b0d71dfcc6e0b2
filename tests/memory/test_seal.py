"""The seal: what is refused, what is zeroed, and that the bytes are those of docs/reference/formats.md. Python and C
(csrc/seal.h) must say the same of every row."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import MAX_KEY_BYTES, PAGE, Geometry
from nixl_tiers.memory import seal
from nixl_tiers.memory.seal import Sealer, Verdict
from tests.support.compiled import CSRC, library_of

NAMESPACE = bytes(range(16))
EPOCH = 7
KEY = b"key of this chunk"

IN_PADDING = Geometry(cells=2, cell_payload=PAGE + 1000, sub_blocks=4)
OWN_PAGE = Geometry(cells=2, cell_payload=2 * PAGE, sub_blocks=4)
TIGHT = Geometry(cells=1, cell_payload=PAGE - 232, sub_blocks=1)  # the seal fits the padding to the byte
ONE_OVER = Geometry(cells=1, cell_payload=PAGE - 231, sub_blocks=1)
PIECES = Geometry(cells=2, cell_payload=5 * (64 << 10) + 1000, sub_blocks=4)
MANY = Geometry(cells=3, cell_payload=130 * 8, sub_blocks=130)
EACH_KIND = [IN_PADDING, OWN_PAGE, TIGHT, ONE_OVER, PIECES, MANY]

geometries = st.builds(
    lambda cells, sub_blocks, size: Geometry(cells, sub_blocks * size, sub_blocks),
    st.integers(1, 4),
    st.integers(1, 9) | st.sampled_from([64, 65]),
    st.integers(1, 300) | st.sampled_from([1024, 2048, PAGE, PAGE - 1, PAGE + 1]),
)
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)


_EXPORTED = f"""
#include "{CSRC / "seal.h"}"
void seal(const struct shape *shape, const struct space *space, uint8_t *row, uint8_t *copy, const uint8_t *key,
          size_t size, uint32_t missing, uint64_t at, uint8_t *seal, uint64_t *digests) {{
    seal_row(shape, space, row, copy, key, size, missing, at, (struct scratch){{seal, digests}});
}}
int verify(const struct shape *shape, const struct space *space, const uint8_t *row, uint8_t *copy, const uint8_t *key,
           size_t size, uint8_t *seal, uint64_t *digests) {{
    return verify_row(shape, space, row, copy, key, size, (struct scratch){{seal, digests}});
}}
"""


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    source: Path = tmp_path_factory.mktemp("seal") / "seal.c"
    source.write_text(_EXPORTED)
    InC.library = ctypes.CDLL(library_of(source, "-O2"))


class InC:
    """As `Sealer`, by csrc/seal.h."""

    library: ClassVar[ctypes.CDLL]

    def __init__(self, geometry: Geometry, namespace: bytes, epoch: int) -> None:
        sizes = geometry.row_bytes, geometry.cell_payload, geometry.cell_bytes, geometry.seal_bytes
        self._shape = struct.pack("<4Q2I", *sizes, geometry.cells, geometry.sub_blocks)
        self._space = namespace + struct.pack("<Q", epoch)
        self._scratch = ctypes.create_string_buffer(1 << 16), (ctypes.c_uint64 * (geometry.cell_payload // 256 + 1))()

    def seal(self, row: np.ndarray, key: bytes, missing: int, sealed_at: int, copy: np.ndarray | None = None) -> None:
        where = ctypes.c_void_p(row.ctypes.data), None if copy is None else ctypes.c_void_p(copy.ctypes.data)
        how = key.ljust(112, b"\0"), ctypes.c_size_t(len(key)), missing, ctypes.c_uint64(sealed_at)
        self.library.seal(self._shape, self._space, *where, *how, *self._scratch)

    def verify(self, row: np.ndarray, key: bytes, copy: np.ndarray | None = None) -> Verdict:
        where = ctypes.c_void_p(row.ctypes.data), None if copy is None else ctypes.c_void_p(copy.ctypes.data)
        known = key.ljust(112, b"\0"), ctypes.c_size_t(len(key))
        return Verdict(self.library.verify(self._shape, self._space, *where, *known, *self._scratch))


def noise(geometry: Geometry, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, geometry.row_bytes, dtype=np.uint8)


def sealed(geometry: Geometry, key: bytes = KEY, seed: int = 0, **options: int) -> np.ndarray:
    row = noise(geometry, seed)
    Sealer(geometry, NAMESPACE, EPOCH).seal(row, key, **options)
    return row


def verdict(
    geometry: Geometry, row: np.ndarray, key: bytes = KEY, *, namespace: bytes = NAMESPACE, epoch: int = EPOCH
) -> Verdict:
    """By both ways, also while copying: a copy of a good row is the row."""
    copies = [noise(geometry, 1) for _ in range(2)]
    sealer, said = Sealer(geometry, namespace, epoch), list[Verdict]()
    said += [sealer.verify(row, key), sealer.verify(row, key, copies[0])]
    if row.shape == (geometry.row_bytes,) and len(key) <= MAX_KEY_BYTES:  # else its caller does not ask
        in_c = InC(geometry, namespace, epoch)
        said += [in_c.verify(row, key), in_c.verify(row, key, copies[1])]
        if said[0] is Verdict.OK:
            assert all(np.array_equal(copy, row) for copy in copies)
    assert len(set(said)) == 1, said
    return said[0]


def by_hand(geometry: Geometry, payload: np.ndarray, key: bytes, present: int, sealed_at: int) -> bytes:
    """A whole row of format version 1, written from docs/reference/formats.md without the code under test."""
    row = bytearray(geometry.row_bytes)
    digests = b""
    for cell in range(geometry.cells):
        at = cell * geometry.cell_bytes
        kept = bytearray(payload[at : at + geometry.cell_payload].tobytes())
        for b in range(geometry.sub_blocks):
            if not present >> b & 1:
                size = geometry.cell_payload // geometry.sub_blocks
                kept[b * size : (b + 1) * size] = bytes(size)
        row[at : at + len(kept)] = kept
        pieces = b"".join(xxhash.xxh3_64(bytes(kept[p : p + 65536])).digest() for p in range(0, len(kept), 65536))
        digests += xxhash.xxh3_128(pieces).digest()
    block = b"nixltier" + struct.pack("<HHI", 1, geometry.seal_bytes, 0) + struct.pack("<QQ", EPOCH, sealed_at)
    block += NAMESPACE + struct.pack("<QQ", geometry.cells * geometry.cell_payload, geometry.cell_payload)
    block += struct.pack("<II", geometry.cells, geometry.sub_blocks) + struct.pack("<BBHI", 16, 1, len(key), 0)
    assert len(block) == 80
    block += key + bytes(112 - len(key))
    block += present.to_bytes(-(-geometry.sub_blocks // 64) * 8, "little") + digests
    block += xxhash.xxh3_128(block).digest()
    row[geometry.row_bytes - len(block) :] = block
    assert len(row) == geometry.row_bytes
    return bytes(row)


def resealed(row: np.ndarray, geometry: Geometry, offset: int, field: bytes) -> np.ndarray:
    """The row with one field of its seal changed and the seal's own digest made right again."""
    row = row.copy()
    block = bytearray(row[-geometry.seal_bytes :].tobytes())
    block[offset : offset + len(field)] = field
    block[-16:] = xxhash.xxh3_128(bytes(block[:-16])).digest()
    row[-geometry.seal_bytes :] = np.frombuffer(bytes(block), np.uint8)
    return row


@settings(deadline=None, max_examples=150)
@given(geometry=geometries, key=keys, data=st.data())
def test_a_sealed_row_is_whole_and_holds_nothing_else(geometry: Geometry, key: bytes, data: st.DataObject) -> None:
    missing = data.draw(st.none() | st.integers(0, geometry.sub_blocks))
    bits = data.draw(st.integers(0, geometry.present(0))) if missing is None else geometry.present(missing)
    before = noise(geometry)
    row, copy, in_c, copy_in_c = before.copy(), noise(geometry, 1), before.copy(), noise(geometry, 2)
    sealer = Sealer(geometry, NAMESPACE, EPOCH)
    sealer.seal(row, key, present=None if missing == 0 else bits, sealed_at=1_790_000_000, copy=copy)
    assert verdict(geometry, row, key) is Verdict.OK
    assert np.array_equal(copy, row)
    if missing is not None:
        InC(geometry, NAMESPACE, EPOCH).seal(in_c, key, missing, 1_790_000_000, copy_in_c)
        assert np.array_equal(in_c, row)
        assert np.array_equal(copy_in_c, row)
    assert row.tobytes() == by_hand(geometry, before, key, bits, 1_790_000_000)
    covered = np.zeros(geometry.row_bytes, bool)
    covered[-geometry.seal_bytes :] = True
    for cell in range(geometry.cells):
        for b in range(geometry.sub_blocks):
            at = cell * geometry.cell_bytes + b * geometry.sub_block_bytes
            part = slice(at, at + geometry.sub_block_bytes)
            assert np.array_equal(row[part], before[part] if bits >> b & 1 else np.zeros_like(row[part]))
            covered[part] = True
    assert not row[~covered].any()


@pytest.mark.parametrize("geometry", EACH_KIND, ids=str)
def test_read_finds_the_header_in_a_seal_a_row_and_any_tail(geometry: Geometry) -> None:
    row = sealed(geometry, present=1, sealed_at=42)
    header = seal.read(row[-geometry.seal_bytes :])
    assert header is not None
    assert (header.namespace, header.epoch, header.key, header.present) == (NAMESPACE, EPOCH, KEY, 1)
    assert (header.geometry, header.flags, header.sealed_at, header.piece_bytes) == (geometry, 0, 42, 65536)
    assert Sealer(geometry, NAMESPACE, EPOCH).sealed_at(row) == 42
    for cell, digest in enumerate(header.digests):
        at = cell * geometry.cell_bytes
        assert digest == seal.cell_digest(memoryview(row[at : at + geometry.cell_payload].tobytes()))
    assert seal.read(row) == seal.read(row.tobytes()) == seal.read(memoryview(row[-PAGE:])) == header
    assert seal.read(row[:-8]) is None
    assert seal.read(np.append(row, np.zeros(8, np.uint8))) is None


@pytest.mark.parametrize("geometry", [IN_PADDING, OWN_PAGE], ids=str)
def test_every_single_bit_of_the_seal_and_byte_of_the_row_counts(geometry: Geometry) -> None:
    row = sealed(geometry)
    ways = Sealer(geometry, NAMESPACE, EPOCH), InC(geometry, NAMESPACE, EPOCH)
    seal_at = geometry.row_bytes - geometry.seal_bytes
    for at in range(geometry.row_bytes):
        for bit in range(8) if at >= seal_at else [at % 8]:
            row[at] ^= 1 << bit
            assert Verdict.OK not in [way.verify(row, KEY) for way in ways], at
            if at >= seal_at:
                assert seal.read(row) is None
            row[at] ^= 1 << bit
    assert verdict(geometry, row) is Verdict.OK


@pytest.mark.parametrize("geometry", EACH_KIND, ids=str)
def test_truncated_and_shifted_rows_are_refused(geometry: Geometry) -> None:
    row = sealed(geometry)
    for kept in (0, 1, 8, 80, geometry.seal_bytes, PAGE - 1, geometry.row_bytes - PAGE, geometry.row_bytes - 1):
        short = row[:kept]
        assert verdict(geometry, short) is Verdict.SHAPE
        assert verdict(geometry, np.append(short, np.zeros(len(row) - kept, np.uint8))) is not Verdict.OK
    assert verdict(geometry, np.append(row, row[:1])) is Verdict.SHAPE
    assert verdict(geometry, np.roll(row, 8)) is not Verdict.OK
    assert verdict(geometry, row.reshape(1, -1)) is Verdict.SHAPE


@pytest.mark.parametrize("geometry", EACH_KIND, ids=str)
def test_another_namespace_or_key_is_refused_with_its_verdict(geometry: Geometry) -> None:
    row = sealed(geometry)
    assert verdict(geometry, row, namespace=bytes(16)) is Verdict.NAMESPACE
    assert verdict(geometry, row, epoch=EPOCH + 1) is Verdict.NAMESPACE
    for key in (b"", KEY[:-1], KEY + b"\0", b"x" * 200):
        assert verdict(geometry, row, key) is Verdict.KEY
    assert verdict(geometry, noise(geometry)) is Verdict.NOT_A_SEAL
    assert verdict(geometry, np.zeros(geometry.row_bytes, np.uint8)) is Verdict.NOT_A_SEAL


def test_a_row_of_another_shape_is_refused_even_if_its_seal_is_in_the_same_place() -> None:
    for mine, theirs in [(OWN_PAGE, Geometry(2, 2 * PAGE, 8)), (IN_PADDING, Geometry(2, PAGE + 1004, 4))]:
        assert (mine.row_bytes, mine.seal_bytes) == (theirs.row_bytes, theirs.seal_bytes)
        assert verdict(mine, sealed(theirs)) is Verdict.SHAPE


def test_unknown_versions_and_flags_are_refused_and_reserved_fields_ignored() -> None:
    row = sealed(PIECES)
    for offset, field in [(8, b"\2"), (12, b"\1"), (15, b"\x80"), (72, b"\x09"), (72, b"\x30"), (73, b"\2")]:
        changed = resealed(row, PIECES, offset, field)
        assert verdict(PIECES, changed) is Verdict.VERSION
        assert seal.read(changed) is None
    reserved = resealed(row, PIECES, 76, b"\1\2\3\4")
    assert verdict(PIECES, reserved) is Verdict.OK
    assert seal.read(reserved) == seal.read(row)
    other_pieces = resealed(row, PIECES, 72, b"\x0e")
    digests_at = PIECES.seal_bytes - 48
    for cell in range(2):
        at = cell * PIECES.cell_bytes
        payload = memoryview(row[at : at + PIECES.cell_payload].tobytes())
        other_pieces = resealed(other_pieces, PIECES, digests_at + 16 * cell, seal.cell_digest(payload, 1 << 14))
    assert verdict(PIECES, other_pieces) is Verdict.OK
    header = seal.read(other_pieces)
    assert header is not None
    assert header.piece_bytes == 1 << 14


def test_read_refuses_inconsistent_seals() -> None:
    row = sealed(OWN_PAGE)
    contradictions = [
        (10, struct.pack("<H", 8)),  # seal_bytes
        (48, struct.pack("<Q", 1)),  # payload_bytes
        (56, struct.pack("<Q", 0)),  # cell_payload
        (64, struct.pack("<I", 0)),  # cells
        (68, struct.pack("<I", 3)),  # sub_blocks that do not divide the cell
        (74, struct.pack("<H", 0)),  # key length
        (74, struct.pack("<H", 113)),
        (74, struct.pack("<H", 3)),  # a key with something behind it
        (192, b"\xff"),  # more sub-blocks present than there are
    ]
    for offset, field in contradictions:
        assert seal.read(resealed(row, OWN_PAGE, offset, field)) is None, offset


@settings(deadline=None, max_examples=300)
@given(head=st.binary(min_size=80, max_size=232), honest=st.booleans())
def test_verify_never_raises_and_refuses_random_bytes(head: bytes, honest: bool) -> None:
    row = noise(TIGHT)
    block = bytearray(row[-TIGHT.seal_bytes :].tobytes())
    block[: len(head)] = head
    if honest:  # as far as magic, version, flags, hash and the seal's own digest go
        block[:8], block[8:10], block[12:16], block[72:74] = seal.MAGIC, b"\1\0", bytes(4), b"\x10\1"
        block[-16:] = xxhash.xxh3_128(bytes(block[:-16])).digest()
    row[-TIGHT.seal_bytes :] = np.frombuffer(bytes(block), np.uint8)
    assert verdict(TIGHT, row) is not Verdict.OK
    seal.read(row)


def test_invalid_arguments_are_refused_before_the_row_is_touched() -> None:
    row = noise(OWN_PAGE)
    before = row.copy()
    sealer = Sealer(OWN_PAGE, NAMESPACE, EPOCH)
    for key, options in [(b"", {}), (b"x" * 113, {}), (KEY, {"present": 16}), (KEY, {"present": -1}),
                         (KEY, {"sealed_at": -1}), (KEY, {"sealed_at": 1 << 64})]:  # fmt: skip
        with pytest.raises(ValueError):
            sealer.seal(row, key, **options)
    with pytest.raises(ValueError, match="20480 bytes"):
        sealer.seal(row[:-1], KEY)
    with pytest.raises(ValueError, match="a row is"):
        sealer.seal(row.reshape(2, -1), KEY)
    assert np.array_equal(row, before)
