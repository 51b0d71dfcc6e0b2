"""The rendezvous over a region: any order, any death, no leaks, and no process of another user."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from nixl_tiers.memory.rendezvous import address_of, rendezvous
from tests.support.waiting import until

GEOMETRY = Geometry(cells=2, cell_payload=8192, sub_blocks=4)
ROWS = 6
TIMEOUT_S = 120.0


def is_bound(name: str) -> bool:
    return f"@{address_of(name)}" in Path("/proc/net/unix").read_text()


def descriptors_of(pid: int) -> str:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(str(link.readlink()))
    return "\n".join(links)


class PeerProcess:
    """A process that takes part in a rendezvous on command."""

    def __init__(self, name: str, processes: int, geometry: Geometry, rows: int, home: Path) -> None:
        numbers = (geometry.cells, geometry.cell_payload, geometry.sub_blocks, rows, processes, TIMEOUT_S)
        root = Path(nixl_tiers.__path__[0]).parent
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("rendezvous_process.py"), name, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # not pytest's, which is a file
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(home), "HOME": str(home)},
        )

    def send(self, line: str) -> None:
        assert self.process.stdin
        print(line, file=self.process.stdin, flush=True)

    def read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.read()

    def start(self) -> None:
        assert self.read() == "ready"
        self.send("join")

    def joined(self) -> str:
        verb, _, identity = self.read().partition(" ")
        assert verb == "joined", identity
        return identity

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Stop every thread of it, surely."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()), "all of it to be stopped")

    def places(self) -> str:
        """Every file that the process has open or mapped, but for the program itself, wherever that is installed."""
        places = descriptors_of(self.process.pid) + Path(f"/proc/{self.process.pid}/maps").read_text()
        homes = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[3]))
        return "\n".join(line for line in places.splitlines() if not any(home in line for home in homes))


StartPeer = Callable[..., PeerProcess]


@pytest.fixture
def peer_process(tmp_path: Path) -> Iterator[StartPeer]:
    started: list[PeerProcess] = []

    def start(name: str, processes: int, rows: int = ROWS) -> PeerProcess:
        started.append(PeerProcess(name, processes, GEOMETRY, rows, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.process.communicate()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    unique = f"{request.node.name} {os.getpid()} {time.monotonic_ns()}"
    yield unique
    assert not is_bound(unique)


def close(*regions: HostRegion) -> None:
    for region in regions:
        region.close()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("one_by_one", [True, False])
def test_processes_share_one_region_in_any_order(
    one_by_one: bool, seed: int, name: str, peer_process: StartPeer
) -> None:
    peers = [peer_process(name, 4) for _ in range(3)]
    turns: list[PeerProcess | None] = [*peers, None]  # None: this process
    random.Random(seed).shuffle(turns)
    identities: list[str] = []
    for turn in turns:
        if turn is None:
            mine = rendezvous(name, GEOMETRY, ROWS, 4, TIMEOUT_S)
            identities.append(mine.identity.hex())
        else:
            turn.start()
            if one_by_one:
                identities.append(turn.joined())
    if not one_by_one:
        identities += [each.joined() for each in peers]
    assert identities == [mine.identity.hex()] * 4
    for n, writer in enumerate(peers):
        assert writer.ask(f"write {n} {n + 1}") == "done"
        assert (mine.rows_view[n] == n + 1).all()
        assert {reader.ask(f"read {n}") for reader in peers} == {str(n + 1)}
    until(lambda: not is_bound(name), "the name to be free")
    mine.close()


@pytest.mark.parametrize("complete", [True, False])
def test_killed_processes_leak_nothing(complete: bool, name: str, peer_process: StartPeer) -> None:
    peers = [peer_process(name, 3) for _ in range(3 if complete else 2)]
    for each in peers:
        each.start()
    assert len({each.joined() for each in peers}) == 1
    for each in peers:
        places = each.places()
        assert "/memfd:nixl_tiers" in places
        assert "/dev/shm" not in places
        assert "/tmp" not in places
    for each in peers:
        each.kill()
    assert not is_bound(name)  # and the fixture finds no file in the peers' HOME and TMPDIR


def test_a_forked_child_of_the_owner_does_not_keep_its_name(name: str, peer_process: StartPeer) -> None:
    owner, other, third = (peer_process(name, 2) for _ in range(3))
    owner.start()
    first = owner.joined()
    child = int(owner.ask("fork"))
    try:
        until(lambda: "socket:" not in descriptors_of(child), "the child to close its sockets")
        owner.kill()
        until(lambda: not is_bound(name), "the name to be free")
        other.start()
        again = other.joined()
        third.start()
        assert third.joined() == again != first
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_owner_that_does_not_answer_times_out(name: str, peer_process: StartPeer) -> None:
    owner = peer_process(name, 2)
    owner.start()
    owner.joined()
    owner.stop()
    with pytest.raises(RegionError, match=f"process {owner.process.pid} created it and does not hand it over"):
        rendezvous(name, GEOMETRY, ROWS, 2, timeout_s=0.3)


def test_a_name_that_is_bound_and_never_served_times_out(name: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind("\0" + address_of(name))
        with pytest.raises(RegionError, match=r"could not be joined within 0\.2 s"):
            rendezvous(name, GEOMETRY, ROWS, 2, timeout_s=0.2)
