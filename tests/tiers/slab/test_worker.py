"""The native worker: rows are sealed and verified as by memory/seal.py, and each has a verdict of its own."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.slab.worker import LEAST_THREADS, Worker
from nixl_tiers.tiers.staging import BUFFER_BYTES, Buffer, DirectRows, StagedRows
from tests.mover.harness import NAMESPACE, key_of

GEOMETRIES = [
    Geometry(1, 65_536),
    Geometry(1, 50_000),
    Geometry(3, 4096),
    Geometry(2, 66_000, 4),  # a last piece of 464 bytes
    Geometry(1, 65_600, 2),  # of 64
    Geometry(1, 131_072 + 201),
    Geometry(5, 1),
    Geometry(1, 400 * 16, 400),  # a bitmap of several words
    Geometry(1, 5 << 20, 4),  # three requests
]
ROWS = 8
NOW = 1_900_000_000


class Rig:
    """A worker, a region and a file with a slot for each row of it."""

    def __init__(self, geometry: Geometry, path: Path) -> None:
        self.geometry = geometry
        self.region = HostRegion.create(geometry, ROWS)
        self.worker = Worker(self.region, geometry, LEAST_THREADS)
        self.sealer = Sealer(geometry, NAMESPACE, 7)
        with path.open("wb") as file:
            file.truncate(ROWS * geometry.row_bytes)
        self._file = self.worker.register_file(str(path), 0, direct=False)
        self.fd = self._file.devices[0]
        self.buffer = Buffer(self.worker, geometry.row_bytes, BUFFER_BYTES)

    def move(
        self, moves: Sequence[Move], *, write: bool, staged: bool = False, fd: int = 0
    ) -> list[tuple[Verdict | None, int]]:
        rows = StagedRows(self.region, self.buffer, moves) if staged else DirectRows(self.region)
        with rows:
            slots = [(fd or self.fd, move.slot * self.geometry.row_bytes) for move in moves]
            steps = self.worker.move(moves, rows, slots, self.sealer, NOW + 0.5, write=write)
            condition = next(steps)
            while not condition():
                assert select.select([self.worker.fd], [], [], 60.0)[0], "a unit does not end"
                self.worker.poll()
            try:
                next(steps)
            except StopIteration as ended:
                return [(verdict, sealed_at) for verdict, sealed_at, _ in ended.value]
        raise AssertionError("one step too many")

    def slot(self, number: int) -> NDArray[np.uint8]:
        size = self.geometry.row_bytes
        return np.frombuffer(os.pread(self.fd, size, number * size), np.uint8)

    def close(self) -> None:
        self.worker.deregister(self._file)
        self.worker.close()
        self.worker.close()
        self.buffer.close()
        self.region.close()


@pytest.fixture(params=GEOMETRIES, ids=str)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(request.param, tmp_path / "rows")
    yield rig
    rig.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(Geometry(2, 66_000, 4), tmp_path / "rows")
    yield rig
    rig.close()


def noise(geometry: Geometry, number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, geometry.row_bytes, np.uint8)


@pytest.mark.parametrize("staged", [False, True])
def test_rows_are_stored_and_loaded_as_python_seals_them(rig: Rig, *, staged: bool) -> None:
    geometry, region = rig.geometry, rig.region
    wanted = np.array([noise(geometry, row) for row in range(ROWS)])
    moves = []
    for row in range(ROWS):
        region.rows_view[row] = wanted[row]
        missing = row % (geometry.sub_blocks + 1)
        rig.sealer.seal(wanted[row], key_of(row), present=geometry.present(missing), sealed_at=NOW)
        moves.append(Move(row, (row + 1) % ROWS, key_of(row), seal=True, missing=missing))
    assert rig.move(moves, write=True, staged=staged) == [(Verdict.OK, NOW)] * ROWS
    assert np.array_equal(region.rows_view, wanted)
    assert all(np.array_equal(rig.slot(move.slot), wanted[move.row]) for move in moves)
    region.rows_view[:] = 0xEE
    back = [Move(ROWS - 1 - move.row, move.slot, move.key) for move in moves]
    assert rig.move(back, write=False, staged=staged) == [(Verdict.OK, NOW)] * ROWS
    assert np.array_equal(region.rows_view[::-1], wanted)


CHANGES = {
    "nothing": None,
    "first byte": 0,
    "end of a cell": 65_999,
    "gap": 66_001,
    "gap before the seal": -300,
    "digest of the seal": -1,
    "digest of a cell": -20,
    "bitmap": -64,
    "key": -160,
}


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_verdicts_are_those_of_python(one: Rig, change: str, *, staged: bool) -> None:
    row = noise(one.geometry, 2)
    one.sealer.seal(row, key_of(2), sealed_at=NOW)
    raw = bytearray(row.tobytes())
    at = CHANGES[change]
    if at is not None:
        raw[at] ^= 1
    os.pwrite(one.fd, raw, 2 * one.geometry.row_bytes)
    wanted = one.sealer.verify(np.frombuffer(raw, np.uint8), key_of(2))
    ((verdict, _),) = one.move([Move(4, 2, key_of(2))], write=False, staged=staged)
    assert verdict is wanted
    assert (verdict is Verdict.OK) == (at is None)
    if verdict is Verdict.OK:
        assert np.array_equal(one.region.rows_view[4], np.frombuffer(raw, np.uint8))


def test_rows_outside_region_and_buffer_are_refused(one: Rig) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        one.move([Move(0, 0, b"a"), Move(ROWS, 0, b"b")], write=False)
    move = Move(0, 0, b"a")
    staged = StagedRows(one.region, one.buffer, [move])
    staged._taken[0] = len(one.buffer.rows)
    with pytest.raises(OSError, match="Invalid argument"):
        next(one.worker.move([move], staged, [(one.fd, 0)], one.sealer, NOW, write=False))


def test_descriptor_is_readable_while_a_unit_has_ended_that_was_not_polled(one: Rig) -> None:
    readable = select.poll()
    readable.register(one.worker.fd, select.POLLIN)
    for _ in range(3):
        assert not readable.poll(0)
        moves, rows = [Move(0, 0, b"a", seal=True)], DirectRows(one.region)
        steps = [one.worker.move(moves, rows, [(one.fd, 0)], one.sealer, NOW, write=True) for _ in range(2)]
        conditions = [next(step) for step in steps]
        while not all(condition() for condition in conditions):
            assert readable.poll(60_000)
            one.worker.poll()
