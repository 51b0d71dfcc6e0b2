"""How the processes of one engine on one node come to share a region, in whatever order they start.

The first comer binds an abstract Unix socket, makes the region and hands its descriptor to the others from a thread.
An abstract name is the kernel's: it goes with the process, so that nothing is left behind whatever dies, and who
comes next becomes the maker.
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
from typing import Final

from nixl_tiers.chunk import Geometry
from nixl_tiers.memory.region import HostRegion, RegionError

ADDRESS_PREFIX: Final = "nixl-tiers-"
SERVE_S: Final = 600.0  # how long the maker waits for the others
_ANSWER_S: Final = 2.0  # how long the maker waits for one of them to speak, so that a stopped one cannot block the rest
_RETRY_S: Final = 0.01

_FIELDS: Final = ("cells", "cell_payload", "sub_blocks", "rows", "parties")
_CARD: Final = struct.Struct("<8s5Q")
_CARD_MAGIC: Final = b"nixljoin"
_HAVE_IT: Final = b"have it"

# A forked child would go on holding a listener after its parent is gone, and the name with it, answering nobody.
_listeners: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_listeners() -> None:
    for listener in list(_listeners):
        listener.close()


os.register_at_fork(after_in_child=_close_listeners)


def address_of(name: str) -> str:
    """The abstract socket address (without its leading NUL) where this user's `name` is met."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{ADDRESS_PREFIX}{os.geteuid()}-{digest}"


def rendezvous(name: str, geometry: Geometry, rows: int, parties: int, timeout_s: float = 60.0) -> HostRegion:
    """Make the region `name`, or share the one that another of its `parties` (this caller included) has made.

    `name` must be of one start of one engine: parties of different starts must not meet. All must ask for the same
    geometry, rows and parties. A process may join more than once, and then is as many parties. RegionError says what
    differs, what is short, or who did not answer within `timeout_s`. A party that joins after the maker died, while
    others have its region already, gets a new one: `identity` and unpublished fingerprints tell.
    """
    if parties < 1:
        raise RegionError(f"region {name!r} needs at least one party, not {parties}")
    if parties == 1:
        return HostRegion.create(geometry, rows)
    card = (geometry.cells, geometry.cell_payload, geometry.sub_blocks, rows, parties)
    deadline = time.monotonic() + timeout_s
    while True:
        region = _make(name, geometry, rows, card) or _ask(name, card, deadline)
        if region is not None:
            return region
        if time.monotonic() >= deadline:
            raise RegionError(f"region {name!r} could not be joined within {timeout_s:g} s: nobody handed it over")
        time.sleep(_RETRY_S)


def _make(name: str, geometry: Geometry, rows: int, card: tuple[int, ...]) -> HostRegion | None:
    """Be the maker, or None if somebody is already."""
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
        region = HostRegion.create(geometry, rows)
    except RegionError:
        listener.close()
        raise
    listener.setblocking(False)
    listener.listen(128)
    wake = os.eventfd(0, os.EFD_CLOEXEC)
    server = threading.Thread(
        target=_serve, args=(listener, wake, os.dup(region.fd), card), name=f"nixl_tiers region {name}", daemon=True
    )
    server.start()

    def stop() -> None:
        if server.is_alive():  # never so in a forked child, which must not stop its parent's
            os.eventfd_write(wake, 1)
            server.join()
        os.close(wake)

    region.at_close(stop)
    return region


def _serve(listener: socket.socket, wake: int, fd: int, card: tuple[int, ...]) -> None:
    """Hand the region over until all parties have it, the time is up, or `wake` says that the region is closed."""
    missing = card[-1] - 1
    deadline = time.monotonic() + SERVE_S
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(wake, select.POLLIN)
    try:
        while missing and (left_s := deadline - time.monotonic()) > 0:
            ready = {ready for ready, _ in poll.poll(left_s * 1000)}
            if wake in ready:
                return
            if ready:
                with contextlib.suppress(OSError), listener.accept()[0] as peer:
                    missing -= _hand_over(peer, fd, card)
    finally:
        listener.close()
        os.close(fd)


def _hand_over(peer: socket.socket, fd: int, card: tuple[int, ...]) -> bool:
    """Whether this peer has the region now."""
    if _identity(peer)[1] != os.geteuid():
        return False
    peer.settimeout(_ANSWER_S)
    mine = _CARD.pack(_CARD_MAGIC, *card)
    if peer.recv(_CARD.size) != mine:
        peer.send(mine)
        return False
    socket.send_fds(peer, [mine], [fd])
    return peer.recv(len(_HAVE_IT)) == _HAVE_IT


def _ask(name: str, card: tuple[int, ...], deadline: float) -> HostRegion | None:
    """Have the maker hand the region over; None if it is not there (yet, or any more)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as maker:
        maker.settimeout(max(deadline - time.monotonic(), _RETRY_S))
        pid = 0
        try:
            maker.connect("\0" + address_of(name))
            pid, uid = _identity(maker)
            if uid != os.geteuid():
                raise RegionError(f"region {name!r} is offered by process {pid} of another user (uid {uid})")
            maker.send(_CARD.pack(_CARD_MAGIC, *card))
            answer, fds, _, _ = socket.recv_fds(maker, _CARD.size, 1)
        except TimeoutError as error:
            raise RegionError(f"region {name!r}: process {pid} made it and does not hand it over") from error
        except OSError:
            return None
        if not answer:
            return None
        if not fds:
            raise RegionError(_difference(name, pid, card, answer))
        region = _attach(fds[0], name, card)
        with contextlib.suppress(OSError):  # a maker that is gone now does not count any more
            maker.send(_HAVE_IT)
        return region


def _attach(fd: int, name: str, card: tuple[int, ...]) -> HostRegion:
    region = HostRegion.attach(fd)
    got = region.geometry
    if (got.cells, got.cell_payload, got.sub_blocks, region.rows) != card[:4]:
        region.close()
        raise RegionError(f"region {name!r} is not what its maker said")
    return region


def _difference(name: str, pid: int, mine: tuple[int, ...], answer: bytes) -> str:
    if len(answer) != _CARD.size or answer[:8] != _CARD_MAGIC:
        return f"region {name!r}: process {pid} answers in another version of the protocol"
    theirs = _CARD.unpack(answer)[1:]
    pairs = zip(_FIELDS, mine, theirs, strict=True)
    differences = ", ".join(f"{field} is {m} here and {t} there" for field, m, t in pairs if m != t)
    return f"region {name!r} was made by process {pid} with other sizes: {differences}"


def _identity(peer: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid
