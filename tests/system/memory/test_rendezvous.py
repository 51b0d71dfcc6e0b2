"""The rendezvous over a region: any order, any death, no leaks, and no process of another user."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory import region as region_module
from nixl_tiers.memory import rendezvous as rendezvous_module
from nixl_tiers.memory.cgroup import Room
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from nixl_tiers.memory.rendezvous import address_of, rendezvous

GEOMETRY = Geometry(cells=2, cell_payload=8192, sub_blocks=4)
ROWS = 6
NOBODY_UID = 65534
TIMEOUT_S = 120.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
        wait_until(lambda: all(" T " in (task / "stat").read_text() for task in tasks.iterdir()))

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


def test_owner_serves_for_as_long_as_others_are_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler asks when its workers have compiled, which may take any time."""
    clock, calls = time.monotonic, iter(range(1000))

    def monotonic() -> float:
        owner = threading.current_thread().name.startswith("nixl_tiers region")
        return clock() + (1e6 * next(calls) if owner else 0.0)

    monkeypatch.setattr(rendezvous_module.time, "monotonic", monotonic)
    first = rendezvous(name, GEOMETRY, ROWS, 2, TIMEOUT_S)
    wait_until(lambda: is_bound(name))
    second = rendezvous(name, GEOMETRY, ROWS, 2, TIMEOUT_S)
    assert second.identity == first.identity
    close(first, second)


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
    wait_until(lambda: not is_bound(name))
    mine.close()


def test_one_process_may_call_it_more_than_once_and_from_many_threads(name: str) -> None:
    for peers in (1, 2, 8):
        with ThreadPoolExecutor(peers) as pool:
            regions = list(pool.map(lambda _, n=peers: rendezvous(name, GEOMETRY, ROWS, n, TIMEOUT_S), range(peers)))
        assert len({region.identity for region in regions}) == 1
        assert len({region.address for region in regions}) == peers
        regions[0].rows_view[2] = 77
        assert all((region.rows_view[2] == 77).all() for region in regions)
        wait_until(lambda: not is_bound(name))
        close(*regions)


def test_an_owner_killed_before_the_others_came_is_replaced(name: str, peer_process: StartPeer) -> None:
    owner, second, third = (peer_process(name, 2) for _ in range(3))
    owner.start()
    first = owner.joined()
    assert is_bound(name)
    owner.kill()
    assert not is_bound(name)
    second.start()
    again = second.joined()
    third.start()
    assert third.joined() == again != first


def test_a_process_that_waits_for_a_dying_owner_becomes_the_owner(name: str, peer_process: StartPeer) -> None:
    owner, *waiting = (peer_process(name, 3) for _ in range(4))
    owner.start()
    first = owner.joined()
    owner.stop()
    for each in waiting:
        each.start()
    # Each waits for an answer now: its end of the connection is in the kernel's table beside the listener.
    wait_until(lambda: Path("/proc/net/unix").read_text().count(f"@{address_of(name)}") >= 1 + len(waiting))
    owner.kill()
    identities = {each.joined() for each in waiting}
    assert len(identities) == 1
    assert first not in identities


def test_an_owner_killed_after_the_rendezvous_does_not_matter(name: str, peer_process: StartPeer) -> None:
    owner, *others = (peer_process(name, 3) for _ in range(3))
    for each in (owner, *others):
        each.start()
    assert len({each.joined() for each in (owner, *others)}) == 1
    assert owner.ask("write 3 200") == "done"
    wait_until(lambda: not is_bound(name))
    owner.kill()
    assert others[0].ask("read 3") == "200"
    assert others[0].ask("write 4 9") == "done"
    assert others[1].ask("read 4") == "9"


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
        wait_until(lambda: "socket:" not in descriptors_of(child))
        owner.kill()
        wait_until(lambda: not is_bound(name))
        other.start()
        again = other.joined()
        third.start()
        assert third.joined() == again != first
    finally:
        os.kill(child, signal.SIGKILL)


def test_closing_the_owners_region_frees_the_name(name: str) -> None:
    before = {entry.name for entry in Path("/proc/self/fd").iterdir()}
    made = rendezvous(name, GEOMETRY, ROWS, 2)
    assert is_bound(name)
    made.close()
    assert not is_bound(name)
    assert {entry.name for entry in Path("/proc/self/fd").iterdir()} <= before


@pytest.mark.parametrize(
    ("asked", "differences"),
    [
        ((Geometry(3, 8192, 4), ROWS, 3), "cells is 3 here and 2 there"),
        ((Geometry(2, 4096, 4), ROWS, 3), "cell_payload is 4096 here and 8192 there"),
        ((Geometry(2, 8192, 8), ROWS, 3), "sub_blocks is 8 here and 4 there"),
        ((GEOMETRY, 7, 3), "rows is 7 here and 6 there"),
        ((GEOMETRY, ROWS, 2), "processes is 2 here and 3 there"),
        ((GEOMETRY, ROWS, 3, 2), "copies is 2 here and 1 there"),
        ((Geometry(2, 8192, 8), 7, 3), "sub_blocks is 8 here and 4 there, rows is 7 here and 6 there"),
    ],
)  # fmt: skip
def test_another_geometry_is_refused_with_the_difference(
    asked: tuple[Geometry, *tuple[int, ...]], differences: str, name: str, peer_process: StartPeer
) -> None:
    made = rendezvous(name, GEOMETRY, ROWS, 3)
    geometry, rows, peers, *copies = asked
    with pytest.raises(RegionError) as refusal:
        rendezvous(name, geometry, rows, peers, TIMEOUT_S, copies=copies[0] if copies else 1)
    assert str(refusal.value) == f"region {name!r} was created by process {os.getpid()} with other sizes: {differences}"
    # The one that was refused does not count: two more may come, and a third then makes its own.
    others = [rendezvous(name, GEOMETRY, ROWS, 3, TIMEOUT_S) for _ in range(2)]
    assert {other.identity for other in others} == {made.identity}
    wait_until(lambda: not is_bound(name))
    close(made, *others)


def test_a_refused_process_reports_the_reason(name: str, peer_process: StartPeer) -> None:
    made = rendezvous(name, GEOMETRY, ROWS, 2)
    other = peer_process(name, 2, rows=ROWS + 1)
    other.start()
    assert other.read().startswith("refused region ")
    made.close()


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


def test_a_peer_that_says_nothing_is_hung_up_on(name: str) -> None:
    made = rendezvous(name, GEOMETRY, ROWS, 2, answer_s=0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect("\0" + address_of(name))
        assert silent.recv(1) == b"", "the owner hangs up"
    close(made)


def test_peers_that_disconnect_or_send_garbage_do_not_count(name: str) -> None:
    made = rendezvous(name, GEOMETRY, ROWS, 2)
    request_bytes = rendezvous_module._REQUEST.pack(b"nixljoin", 2, 8192, 4, ROWS, 1, 2)
    for sent in (b"", b"nonsense", request_bytes[:-1], request_bytes):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as odd:
            odd.connect("\0" + address_of(name))
            odd.send(sent)
            if sent == request_bytes:  # takes the region, and dies before it confirms
                _, fds, _, _ = socket.recv_fds(odd, 100, 1)
                os.close(fds[0])
    other = rendezvous(name, GEOMETRY, ROWS, 2, TIMEOUT_S)
    assert other.identity == made.identity
    wait_until(lambda: not is_bound(name))
    close(made, other)


def test_an_owner_may_die_right_after_the_handover(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = HostRegion.create(GEOMETRY, ROWS)
    gone = threading.Event()
    attach = rendezvous_module._attach

    def attach_late(*arguments: object) -> HostRegion:
        assert gone.wait(TIMEOUT_S)
        return attach(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rendezvous_module, "_attach", attach_late)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
        owner.bind("\0" + address_of(name))
        owner.listen()

        def hand_over_and_die() -> None:
            with owner.accept()[0] as peer:
                socket.send_fds(peer, [peer.recv(100)], [made.fd])
            gone.set()

        thread = threading.Thread(target=hand_over_and_die)
        thread.start()
        other = rendezvous(name, GEOMETRY, ROWS, 2, TIMEOUT_S)
        thread.join()
    assert other.identity == made.identity
    close(made, other)


def test_a_region_of_another_size_than_announced_is_refused(name: str) -> None:
    made = HostRegion.create(GEOMETRY, ROWS + 1)
    before = descriptors_of(os.getpid()).count("memfd:nixl_tiers")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
        owner.bind("\0" + address_of(name))
        owner.listen()

        def lie() -> None:
            with owner.accept()[0] as peer:
                socket.send_fds(peer, [peer.recv(100)], [made.fd])

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(RegionError, match="is not what its owner announced"):
            rendezvous(name, GEOMETRY, ROWS, 2, TIMEOUT_S)
        thread.join()
    assert descriptors_of(os.getpid()).count("memfd:nixl_tiers") == before
    made.close()


def test_an_owner_without_memory_frees_the_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "rooms_of_this_process", lambda: [Room("the test", 1)])
    with pytest.raises(RegionError, match="the test has") as refusal:
        rendezvous(name, GEOMETRY, ROWS, 2)
    assert not is_bound(name), refusal
    monkeypatch.undo()
    close(rendezvous(name, GEOMETRY, ROWS, 2))


def test_a_rendezvous_needs_at_least_one_process(name: str) -> None:
    with pytest.raises(RegionError, match="at least one process"):
        rendezvous(name, GEOMETRY, ROWS, 0)


DROP_PRIVILEGES = f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY_UID}); os.setuid({NOBODY_UID})\n"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may run a process of another user")


@needs_root
def test_another_user_does_not_get_the_region(name: str) -> None:
    made = rendezvous(name, GEOMETRY, ROWS, 2)
    program = DROP_PRIVILEGES + (
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect('\\0' + sys.argv[1])\n"
        "try: s.send(bytes.fromhex(sys.argv[2])); print(socket.recv_fds(s, 100, 1)[:2])\n"
        "except OSError as error: print('hung up')"
    )
    request_bytes = rendezvous_module._REQUEST.pack(b"nixljoin", 2, 8192, 4, ROWS, 1, 2)
    command = [sys.executable, "-c", program, address_of(name), request_bytes.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.strip() in {"(b'', [])", "hung up"}
    other = rendezvous(name, GEOMETRY, ROWS, 2, TIMEOUT_S)
    assert other.identity == made.identity
    close(made, other)
    wait_until(lambda: not is_bound(name))


@needs_root
def test_another_users_region_is_refused(name: str) -> None:
    program = DROP_PRIVILEGES + (
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind('\\0' + sys.argv[1]); s.listen()\n"
        "print('bound', flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, address_of(name)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as squatter:
        assert squatter.stdout
        assert squatter.stdout.readline() == "bound\n"
        with pytest.raises(RegionError, match=rf"process {squatter.pid} of another user \(uid {NOBODY_UID}\)"):
            rendezvous(name, GEOMETRY, ROWS, 2, TIMEOUT_S)
        squatter.kill()


@pytest.mark.parametrize("processes", [1, 2])
def test_region_is_made_with_the_pages_that_its_processes_ask_for(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[HugePages] = []

    def refuse(*_: object, huge_pages: HugePages, copies: int) -> HostRegion:
        asked.append(huge_pages)
        assert copies == 1
        raise RegionError("refused")

    monkeypatch.setattr(HostRegion, "create", refuse)
    for pages in HugePages:
        with pytest.raises(RegionError, match="refused"):
            rendezvous(f"pages-{os.getpid()}", GEOMETRY, ROWS, processes, TIMEOUT_S, huge_pages=pages)
    assert asked == list(HugePages)
