"""GPU memory <-> files through NIXL's GDS_MT plugin and NVIDIA's cuFile, on the fake CUDA driver: run by
test_gpu_memory.py in a pytest of its own.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed. cuFile moves the bytes through its own buffers,
with copies of the driver in its own threads, streams and contexts; the fake driver does each as late as CUDA allows.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nixl_tiers.tiers.nixl_agent import Agent
from tests.support.no_gpu import counters
from tests.system.tiers.gds.gpu_memory import Gpu, pattern

MIB = 1 << 20
SIZE = 8 * MIB
PIECE = 32 << 10

Piece = tuple[int, int, int]
"""offset in the memory, offset in the file, bytes"""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    assert gpu.violations() == ""


@pytest.fixture(scope="module")
def agent(gpu: Gpu) -> Agent:
    return Agent("GDS_MT", {"thread_count": "2"}, "FILE")


class Moves:
    """Moves pieces between GPU memory at `address` and a file."""

    def __init__(self, agent: Agent, address: int, path: Path) -> None:
        with path.open("ab") as file:
            file.truncate(SIZE)
        self._agent = agent
        self._address = address
        self._memory = agent._register([(address, SIZE, 0, "")], "VRAM")
        self._file = agent.register_file(str(path), SIZE, direct=True)

    def __call__(self, operation: str, pieces: Sequence[Piece]) -> None:
        api, device = self._agent._api, self._file.devices[0]
        local = np.array([(self._address + at, nbytes, 0) for at, _, nbytes in pieces], np.uint64)
        remote = np.array([(offset, nbytes, device) for _, offset, nbytes in pieces], np.uint64)
        handle = api.initialize_xfer(
            operation, api.get_xfer_descs(local, "VRAM"), api.get_xfer_descs(remote, "FILE"), "mover"
        )
        state, deadline = api.transfer(handle), time.monotonic() + 120
        while state == "PROC":
            assert time.monotonic() < deadline
            time.sleep(1e-4)
            state = api.check_xfer_state(handle)
        assert state == "DONE"
        handle.release()


def whole(row_bytes: int) -> list[Piece]:
    return [(at, at, row_bytes) for at in range(0, SIZE, row_bytes)]


def content(path: Path) -> NDArray[np.uint8]:
    return np.fromfile(path, np.uint8)


@pytest.mark.parametrize("row_bytes", [64 << 10, MIB])
def test_rows_are_byte_exact_both_ways(gpu: Gpu, agent: Agent, cufile_place: Path, row_bytes: int) -> None:
    address, path = gpu.allocate(SIZE), cufile_place / "rows"
    move = Moves(agent, address, path)
    before, copies = counters(), [gpu.counted(f"cuMemcpy{way}Async_v2") for way in ("DtoH", "HtoD")]
    gpu.write(address, pattern(1, SIZE))
    move("WRITE", whole(row_bytes))
    assert np.array_equal(content(path), pattern(1, SIZE))
    pattern(2, SIZE).tofile(path)
    move("READ", whole(row_bytes))
    assert np.array_equal(gpu.read(address, SIZE), pattern(2, SIZE))
    after, copied = counters(), [gpu.counted(f"cuMemcpy{way}Async_v2") for way in ("DtoH", "HtoD")]
    assert (after.read - before.read, after.written - before.written) == (SIZE, SIZE)
    assert all(now - then >= SIZE // row_bytes for now, then in zip(copied, copies, strict=True))


def test_scattered_pieces_touch_nothing_else(gpu: Gpu, agent: Agent, cufile_place: Path) -> None:
    address, path = gpu.allocate(SIZE), cufile_place / "rows"
    move = Moves(agent, address, path)
    stored = pattern(3, SIZE)
    stored.tofile(path)
    gpu.write(address, np.full(SIZE, 0xEE, np.uint8))
    order = np.random.default_rng(4).permutation(SIZE // PIECE)[: SIZE // PIECE // 2]
    pieces = [(int(to) * PIECE, number * PIECE, PIECE) for number, to in enumerate(order)]
    move("READ", pieces)
    wanted = np.full(SIZE, 0xEE, np.uint8)
    for at, offset, nbytes in pieces:
        wanted[at : at + nbytes] = stored[offset : offset + nbytes]
    assert np.array_equal(gpu.read(address, SIZE), wanted)


def test_memory_of_another_process_is_byte_exact(gpu: Gpu, agent: Agent, cufile_place: Path) -> None:
    """As a worker's staging ring would be: made there with cuMemCreate, handed over as a descriptor, mapped here."""
    path = cufile_place / "rows"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.system.tiers.gds.gpu_memory", str(theirs.fileno()), str(SIZE)]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as owner:
        theirs.close()
        _, (descriptor,), _, _ = socket.recv_fds(ours, 16, 1)
        address = gpu.attach(descriptor, SIZE)
        move = Moves(agent, address, path)
        move("WRITE", whole(MIB))
        assert np.array_equal(content(path), pattern(1, SIZE))
        pattern(2, SIZE).tofile(path)
        move("READ", whole(MIB))
        ours.sendall(b"loaded")
        assert ours.recv(16) == b"right"
        assert owner.wait(120) == 0
