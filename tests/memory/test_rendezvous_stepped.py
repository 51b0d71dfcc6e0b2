"""Both ends of the hand-over of a region, each by itself: who gets its descriptor, and whose is taken. No thread, no
process and no name: the other end is one of a socket pair, and has sent what it has to say before."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory import rendezvous as module
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from tests.support.times import PATIENCE_S

GEOMETRY = Geometry(1, 4096)
Pair = tuple[socket.socket, socket.socket]
Ask = Callable[[], HostRegion | None]
SIZES = module._Sizes(GEOMETRY.cells, GEOMETRY.cell_payload, GEOMETRY.sub_blocks, 4, 1, 2)


def request_of(sizes: module._Sizes) -> bytes:
    return module._REQUEST.pack(module._REQUEST_MAGIC, *sizes)


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, 4) as region:
        yield region


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def answer_to(end: socket.socket) -> tuple[bytes, list[int]]:
    try:
        answer, fds, _, _ = socket.recv_fds(end, 256, 4)
    except (BlockingIOError, ConnectionResetError):  # what it has not read resets the connection
        return b"", []
    return answer, fds


class TestTheOwner:
    def test_hands_nothing_to_another_user(
        self, pair: Pair, region: HostRegion, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        peer, end = pair
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        end.send(request_of(SIZES))
        end.send(module._ACK)
        assert not module._hand_over(peer, region.fd, SIZES, PATIENCE_S)
        assert answer_to(end) == (b"", [])

    def test_waits_for_none_longer_than_it_is_told(self, pair: Pair, region: HostRegion) -> None:
        """One that is stopped must not block the rest."""
        peer, end = pair
        end.send(b"nothing")
        assert not module._hand_over(peer, region.fd, SIZES, 0.5)
        assert peer.gettimeout() == 0.5

    @pytest.mark.parametrize("said", [b"", b"nothing", request_of(SIZES._replace(rows=5)), request_of(SIZES)[:-1]])
    def test_tells_its_sizes_to_one_who_asks_for_something_else(
        self, pair: Pair, region: HostRegion, said: bytes
    ) -> None:
        peer, end = pair
        end.send(said)
        assert not module._hand_over(peer, region.fd, SIZES, PATIENCE_S)
        assert answer_to(end) == (request_of(SIZES), [])

    @pytest.mark.parametrize("said", [b"", b"had it"])
    def test_does_not_count_one_that_has_not_confirmed(self, pair: Pair, region: HostRegion, said: bytes) -> None:
        """It may be dead: another process takes its place."""
        peer, end = pair
        end.send(request_of(SIZES))
        end.send(said)
        assert not module._hand_over(peer, region.fd, SIZES, PATIENCE_S)


class Joined(socket.socket):
    """The end of a pair, where a socket is made and connected."""

    def connect(self, address: object) -> None:
        """It is."""


class TestOneWhoJoins:
    @pytest.fixture
    def ask(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Ask:
        end = Joined(fileno=pair[0].detach())
        monkeypatch.setattr(module.socket, "socket", lambda *_: end)
        return lambda: module._ask_owner("name", SIZES, time.monotonic() + 60.0)

    def test_takes_none_of_another_user(
        self,
        ask: Ask,
        pair: Pair,
        region: HostRegion,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        socket.send_fds(pair[1], [request_of(SIZES)], [region.fd])
        with pytest.raises(RegionError, match=f"offered by process {os.getpid()} of another user \\(uid {uid}\\)"):
            ask()
        assert answer_to(pair[1]) == (b"", []), "it is asked for nothing"

    def test_takes_none_that_is_not_what_was_announced(self, ask: Ask, pair: Pair) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        with HostRegion.create(GEOMETRY, 5) as other:
            socket.send_fds(pair[1], [request_of(SIZES)], [other.fd])
            with pytest.raises(RegionError, match="not what its owner announced"):
                ask()
        assert len(list(Path("/proc/self/fd").iterdir())) < before, "its descriptor and that of the socket are closed"

    def test_tries_again_if_the_owner_dies_meanwhile(self, ask: Ask, pair: Pair) -> None:
        pair[1].close()
        assert ask() is None
