"""Rendezvous: how the processes of one engine on one node get to share a region, in whatever order they start.

The first process binds an abstract Unix socket, creates the region and sends its descriptor to the others from a
thread. The kernel removes an abstract name with the process that bound it, so that nothing is left behind whatever
dies, and the next process becomes the owner.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError

ADDRESS_PREFIX: Final = "nixl-tiers-"
_RETRY_S: Final = 0.01

_REQUEST: Final = struct.Struct("<8s6Q")
_REQUEST_MAGIC: Final = b"nixljoin"
_ACK: Final = b"have it"


class OtherSizes(RegionError):
    """The region exists, and is another one than this process asks for."""


class _Sizes(NamedTuple):
    """What all processes of an engine must ask for alike."""

    cells: int
    cell_payload: int
    sub_blocks: int
    rows: int
    copies: int
    processes: int

    def create(self, huge_pages: HugePages) -> HostRegion:
        geometry = Geometry(self.cells, self.cell_payload, self.sub_blocks)
        return HostRegion.create(geometry, self.rows, huge_pages=huge_pages, copies=self.copies)

    def are_of(self, region: HostRegion) -> bool:
        got = region.geometry
        return self[:-1] == (got.cells, got.cell_payload, got.sub_blocks, region.rows, region.copies)


# A forked child would keep the listener, and with it the name, after its parent is dead, and never answer.
_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_listeners() -> None:
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_listeners)


def address_of(name: str) -> str:
    """The abstract socket address (without its leading NUL) of this user's `name`."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{ADDRESS_PREFIX}{os.geteuid()}-{digest}"


def rendezvous(
    name: str,
    geometry: Geometry,
    rows: int,
    processes: int,
    timeout_s: float = 60.0,
    *,
    huge_pages: HugePages = HugePages.AUTO,
    copies: int = 1,
    answer_s: float = PRODUCTION.rendezvous_answer_s,
) -> HostRegion:
    """Create the region `name`, or attach to the one that another of its `processes` (this one included) has created.

    `name` must belong to one start of one engine: processes of different starts must not meet. All must ask for the
    same geometry, rows, copies of each cell (HostRegion.create) and number of processes. One that calls this n times
    counts as n processes. The owner waits `answer_s` for each. RegionError says what differs, what is short, or which
    process did not answer within `timeout_s`. A process that comes after the owner died, while others have its region
    already, gets a new one: `identity` and missing fingerprints show that.
    """
    if processes < 1:
        raise RegionError(f"region {name!r} needs at least one process, not {processes}")
    sizes = _Sizes(geometry.cells, geometry.cell_payload, geometry.sub_blocks, rows, copies, processes)
    if processes == 1:
        return sizes.create(huge_pages)
    deadline = time.monotonic() + timeout_s
    while True:
        region = _create(name, sizes, huge_pages, answer_s) or _ask_owner(name, sizes, deadline)
        if region is not None:
            return region
        if time.monotonic() >= deadline:
            raise RegionError(f"region {name!r} could not be joined within {timeout_s:g} s: no process handed it over")
        time.sleep(_RETRY_S)


def _create(name: str, sizes: _Sizes, huge_pages: HugePages, answer_s: float) -> HostRegion | None:
    """Become the owner, or None if another process is."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + address_of(name))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise RegionError(f"region {name!r} cannot be offered to others: {error.strerror}") from error
    _listeners.add(listener)
    try:
        region = sizes.create(huge_pages)
    except RegionError:
        listener.close()
        raise
    listener.setblocking(False)
    listener.listen(128)
    wake = os.eventfd(0, os.EFD_CLOEXEC)
    arguments = listener, wake, os.dup(region.fd), sizes, answer_s
    server = threading.Thread(target=_serve, args=arguments, name=f"nixl_tiers region {name}", daemon=True)
    server.start()

    def stop() -> None:
        if server.is_alive():  # never in a forked child, which must not stop its parent's
            os.eventfd_write(wake, 1)
            server.join()
        os.close(wake)

    region.at_close(stop)
    return region


def _serve(listener: socket.socket, wake: int, fd: int, sizes: _Sizes, answer_s: float) -> None:
    """Send the region until all processes have it, or `wake` signals that the region is closed. An engine may compile
    for as long as it likes before its scheduler asks."""
    missing = sizes.processes - 1
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(wake, select.POLLIN)
    try:
        while missing:
            ready = {ready for ready, _ in poll.poll()}
            if wake in ready:
                return
            if ready:
                with contextlib.suppress(OSError), listener.accept()[0] as peer:
                    missing -= _hand_over(peer, fd, sizes, answer_s)
    finally:
        listener.close()
        os.close(fd)


def _hand_over(peer: socket.socket, fd: int, sizes: _Sizes, answer_s: float) -> bool:
    """Whether this peer has the region now."""
    if identity(peer)[1] != os.geteuid():
        return False
    peer.settimeout(answer_s)
    request = _REQUEST.pack(_REQUEST_MAGIC, *sizes)
    if peer.recv(_REQUEST.size) != request:
        peer.send(request)
        return False
    socket.send_fds(peer, [request], [fd])
    return peer.recv(len(_ACK)) == _ACK


def _ask_owner(name: str, sizes: _Sizes, deadline: float) -> HostRegion | None:
    """Get the region from its owner; None if there is none (yet, or any more)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as owner:
        owner.settimeout(max(deadline - time.monotonic(), _RETRY_S))
        pid = 0
        try:
            owner.connect("\0" + address_of(name))
            pid, uid = identity(owner)
            if uid != os.geteuid():
                raise RegionError(f"region {name!r} is offered by process {pid} of another user (uid {uid})")
            owner.send(_REQUEST.pack(_REQUEST_MAGIC, *sizes))
            answer, fds, _, _ = socket.recv_fds(owner, _REQUEST.size, 1)
        except TimeoutError as error:
            raise RegionError(f"region {name!r}: process {pid} created it and does not hand it over") from error
        except OSError:
            return None
        if not answer:
            return None
        if not fds:
            raise OtherSizes(_difference(name, pid, sizes, answer))
        region = _attach(fds[0], name, sizes)
        with contextlib.suppress(OSError):  # an owner that has died since does not count any more
            owner.send(_ACK)
        return region


def _attach(fd: int, name: str, sizes: _Sizes) -> HostRegion:
    region = HostRegion.attach(fd)
    if not sizes.are_of(region):
        region.close()
        raise RegionError(f"region {name!r} is not what its owner announced")
    return region


def _difference(name: str, pid: int, mine: _Sizes, answer: bytes) -> str:
    if len(answer) != _REQUEST.size or answer[:8] != _REQUEST_MAGIC:
        return f"region {name!r}: process {pid} answers in another version of the protocol"
    theirs = _REQUEST.unpack(answer)[1:]
    pairs = zip(mine._fields, mine, theirs, strict=True)
    differences = ", ".join(f"{field} is {m} here and {t} there" for field, m, t in pairs if m != t)
    return f"region {name!r} was created by process {pid} with other sizes: {differences}"


def identity(peer: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
