"""The NIXL agent as movers use it: a failure is a state of one transfer, and the agent works on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import nixl_agent
from nixl_tiers.tiers.folder import fd_path
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Transfer, TransferState
from tests.support.waiting import until

GEOMETRY = Geometry(1, 8192 - 1024)
ROW = GEOMETRY.row_bytes


def end(transfer: Transfer) -> TransferState:
    """Its state, once it has ended and is released."""
    until(lambda: transfer.state() is not TransferState.PENDING, "a transfer to end")
    transfer.release()
    transfer.release()  # harmless
    return transfer.state()


@pytest.fixture(scope="module")
def agent() -> Agent:
    return Agent.posix()


@pytest.fixture
def region(agent: Agent) -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, 64) as region:
        registration = agent.register_region(region)
        yield region
        agent.deregister(registration)


def test_failure_is_a_state_and_the_next_transfer_works(agent: Agent, region: HostRegion, tmp_path: Path) -> None:
    path = tmp_path / "a file, with: odd characters"
    path.write_bytes(bytes(64 * ROW))
    file = agent.register_file(str(path), 1 << 30, direct=True)
    (device,) = file.devices
    beyond = [(region.address, ROW, 64 * ROW, device)]
    unaligned = [(region.address, ROW, 100, device)]
    unknown_memory = [(region.address + region.nbytes, ROW, 0, device)]
    unknown_file = [(region.address, ROW, 0, device + 1000)]
    good = [(region.address, ROW, 0, device)]
    for bad in (beyond, unaligned, unknown_memory, unknown_file):
        assert end(agent.read(bad)) is TransferState.FAILED
        assert end(agent.read(good)) is TransferState.DONE
    agent.deregister(file)


def test_files_opened_by_the_same_path_stay_apart(agent: Agent, region: HostRegion, tmp_path: Path) -> None:
    """A tier registers a file by the path of its descriptor, whose number is reused for the next file."""
    paths, files, names = [tmp_path / f"file-{n}" for n in range(4)], [], set()
    for path in paths:
        path.write_bytes(bytes(ROW))
        descriptor = os.open(path, os.O_RDWR)
        names.add(fd_path(descriptor))
        files.append(agent.register_file(fd_path(descriptor), ROW, direct=True))
        os.close(descriptor)
    assert len(names) == 1
    transfers = []
    for number, file in enumerate(files):
        region.rows_view[number] = number + 1
        transfers.append(agent.write([(region.address + number * ROW, ROW, 0, file.devices[0])]))
    assert {end(transfer) for transfer in transfers} == {TransferState.DONE}
    for file in files:
        agent.deregister(file)
    assert [path.read_bytes() for path in paths] == [bytes([number + 1]) * ROW for number in range(4)]


def test_unavailable_backend_or_file_is_one_sentence(agent: Agent, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="POSIX cannot register FILE"):
        agent.register_file(str(tmp_path / "missing"), ROW, direct=True)
    with pytest.raises(AgentError, match="NO_SUCH is not available") as failure:
        Agent("NO_SUCH", {"secret_key": "hunter2"}, "FILE")
    assert "hunter2" not in str(failure.value)


@pytest.mark.parametrize(
    ("installed", "backend", "library", "taken"),
    [
        (("nixl_cu12",), "OBJ", nixl_agent.RDMA_LIBRARY, "nixl_cu12"),
        (("nixl_cu13",), "OBJ", nixl_agent.RDMA_LIBRARY, "nixl_cu13"),
        (("nixl_cu12", "nixl_cu13"), "OBJ", nixl_agent.RDMA_LIBRARY, "nixl_cu12"),
        (("nixl_cu12", "nixl_cu13"), "OBJ", "libc.so.6", "nixl"),
        (("nixl_cu12", "nixl_cu13"), "POSIX", nixl_agent.RDMA_LIBRARY, "nixl"),
        ((), "OBJ", nixl_agent.RDMA_LIBRARY, "nixl"),
    ],
)
def test_plugin_that_lacks_its_library_is_not_chosen(
    installed: tuple[str, ...], backend: str, library: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is of GPU machines; here is none, and `libc.so.6` stands for one that is there."""
    monkeypatch.setattr(nixl_agent, "RDMA_LIBRARY", library)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    assert nixl_agent.flavour(backend) == taken
