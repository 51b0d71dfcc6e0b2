"""Control: an operator's commands to a running engine, over a local socket.

An abstract Unix socket, as that by which the engine's processes meet (`memory/rendezvous.py`): it leaves nothing
behind, and is found by its name. Both ends check with SO_PEERCRED that the other one is of the same user. One request
of one packet is answered by one packet; clients are served one after the other, by a thread that does nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from nixl_tiers.memory.rendezvous import ADDRESS_PREFIX, close_in_children, identity
from nixl_tiers.runtime.clearing import Cleared, Clearing
from nixl_tiers.runtime.coordinator import Coordinator

log = logging.getLogger(__name__)

CLEAR_S: Final = 300.0  # a command takes no longer
ANSWER_S: Final = CLEAR_S + 60.0  # and its client waits no longer
REQUEST_S: Final = 2.0  # a client that has connected sends its request by then
MAX_REQUEST_BYTES: Final = 1024
MAX_ANSWER_BYTES: Final = 64 << 10
_SOCKETS: Final = Path("/proc/net/unix")


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Clear the engine's rows, or say which there are. `quota`: those of one quota only."""

    clear: bool
    quota: str | None = None


class Answer(msgspec.Struct):
    """`problem`: a sentence, if nothing was done."""

    pid: int
    tiers: list[Cleared] = []
    problem: str = ""


class Unreachable(OSError):
    """The engine does not answer; a sentence."""


# --- the engine's side --------------------------------------------------------------------------------------------


def serve(coordinator: Coordinator) -> None:
    """Serve commands until the coordinator's region is closed. Raises nothing: without them the engine works."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{_prefix()}{os.getpid()}-{secrets.token_hex(4)}")
        listener.listen(4)
    except OSError as error:
        log.warning("nixl_tiers: there is no local socket for `nixl-tiers clear` (%s)", error.strerror)
        return
    close_in_children(listener)
    server = threading.Thread(
        target=_serve, args=(listener, weakref.ref(coordinator)), name="nixl_tiers control", daemon=True
    )
    server.start()

    def stop() -> None:
        if server.is_alive():  # never in a forked child
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept
            server.join(REQUEST_S)
        listener.close()

    coordinator.region.at_close(stop)


def _serve(listener: socket.socket, coordinator: weakref.ref[Coordinator]) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        with peer, contextlib.suppress(OSError):
            if allowed(peer):
                peer.settimeout(REQUEST_S)
                packet = peer.recv(MAX_REQUEST_BYTES + 1)
                peer.send(msgspec.json.encode(_answer(packet, coordinator())))


def allowed(peer: socket.socket) -> bool:
    """Whether it is of this process's user."""
    return identity(peer)[1] == os.geteuid()


def _answer(packet: bytes, coordinator: Coordinator | None) -> Answer:
    answer = Answer(os.getpid())
    try:
        request = msgspec.json.decode(packet, type=Request)
    except msgspec.DecodeError:
        answer.problem = "the engine does not understand this command: it may be of another version"
        return answer
    if coordinator is None or coordinator.closed:
        answer.problem = "the engine is shutting down"
        return answer
    tenants = coordinator.tenants.named
    if request.quota is not None and request.quota not in tenants:
        answer.problem = f"the engine has no quota of that name: it has {', '.join(tenants) or 'none'}"
        return answer
    tenant = 0 if request.quota is None else tenants[request.quota]
    try:
        clearing = Clearing(coordinator, tenant, time.monotonic() + CLEAR_S)
        answer.tiers = clearing.run() if request.clear else clearing.look()
    except Exception:
        log.exception("nixl_tiers: a command to clear has failed")
        answer.problem = "the engine failed to do that: its log says why"
    if request.clear and not answer.problem:
        what = "all rows" if request.quota is None else f"the rows of the quota {request.quota}"
        rows = ", ".join(f"{each.rows} in {each.tier}" for each in answer.tiers if not each.shared)
        log.warning("nixl_tiers: `nixl-tiers clear` has cleared %s: %s", what, rows)
    return answer


# --- the command's side -------------------------------------------------------------------------------------------


def engines() -> Iterator[tuple[int, socket.socket]]:
    """(pid, connection) of each running engine of this user, in this network namespace; the caller closes it."""
    prefix = f"@{_prefix()}"
    names = {line.rpartition(" ")[2] for line in _SOCKETS.read_text().splitlines()}
    for name in sorted(name for name in names if name.startswith(prefix)):
        engine = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            engine.settimeout(REQUEST_S)
            engine.connect(f"\0{name[1:]}")
            engine.settimeout(ANSWER_S)
            if not allowed(engine):
                engine.close()  # another user's process has bound a name of ours
                continue
        except OSError:  # it has just exited
            engine.close()
            continue
        yield identity(engine)[0], engine


def ask(engine: socket.socket, request: Request) -> Answer:
    """Raises Unreachable."""
    try:
        engine.send(msgspec.json.encode(request))
        packet = engine.recv(MAX_ANSWER_BYTES)
        if packet:
            return msgspec.json.decode(packet, type=Answer)
    except TimeoutError:
        raise Unreachable(f"it has not answered for {ANSWER_S:.0f} s") from None
    except (OSError, msgspec.DecodeError) as error:
        raise Unreachable(f"it does not answer ({error})") from None
    raise Unreachable("it has exited before it answered")


def _prefix() -> str:
    return f"{ADDRESS_PREFIX}{os.geteuid()}-control-"
