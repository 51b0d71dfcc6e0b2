"""The mover process: descriptors, signals and logging at its start, the watchdog, and how it exits.

The loop itself (mover/loop.py) begins with the first message, Configure, which says what tier to make.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Final, NoReturn

import msgspec

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.address_space import marked
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.loop import POLL_S, Mover, limit_exit, rearm_watchdog, run_loop
from nixl_tiers.mover.protocol import (
    LOG_FORMAT,
    MAX_PACKET,
    Configure,
    Refused,
    SendQueue,
    decode_to_mover,
    sendable_text,
)
from nixl_tiers.tiers.base import TierRefused, make_tier

logger = logging.getLogger(__name__)

SOCKET_BYTES: Final = 1 << 20
STOP_S: Final = 2.0  # after Stop: for what still runs
SWITCH_S: Final = 0.001  # how long a thread waits at most for another one that runs Python code


def run(socket_fd: int, region_fd: int, mark_fd: int, parent: int) -> NoReturn:
    """Be the mover on these descriptors until Stop, or until the coordinator closes its socket or dies.

    Never returns, never unwinds: an interpreter that tears NIXL down may wait for dead servers, or crash.
    """
    status = 1
    threading.excepthook = _thread_failed
    sys.setswitchinterval(SWITCH_S)
    try:
        mark = marked(mark_fd)  # noqa: F841 (mapped until this process ends)
        _run(socket_fd, region_fd, parent)
        status = 0
    except BaseException:
        logger.exception("the mover failed")
    finally:
        with contextlib.suppress(OSError):  # the scheduler's process, which reads it, may be gone
            sys.stderr.flush()
        os._exit(status)


def _thread_failed(failed: threading.ExceptHookArgs) -> NoReturn:
    """A tier whose thread has ended would wait for it for ever. The next mover begins anew."""
    name = "?" if failed.thread is None else failed.thread.name
    logger.error("the thread %s failed: %s", name, failed.exc_type.__name__, exc_info=failed.exc_value)
    os._exit(1)


def _run(socket_fd: int, region_fd: int, parent: int) -> None:
    end = socket.socket(fileno=socket_fd)
    end.set_inheritable(False)
    end.setblocking(False)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    terminated, terminate = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGTERM, lambda *_: os.write(terminate, b"."))
    events = select.poll()
    for descriptor in (parent_fd, terminated, end.fileno()):
        events.register(descriptor, select.POLLIN)

    configure = _receive_configure(end, events, {parent_fd, terminated})
    if configure is None:
        return
    _set_up_logging(str(configure.tier.get("type", "?")))
    rearm_watchdog(configure.times.watchdog_s)
    region = HostRegion.attach(region_fd)
    region.map_pages()
    try:
        geometry = Geometry(configure.cells, configure.cell_payload, configure.sub_blocks)
        tier = make_tier(configure.tier, geometry, region, configure.movers, configure.replicas, times=configure.times)
        tier.mount_point = configure.mount_point
        if configure.engine:
            tier.identify(configure.engine)
        if configure.description is not None:
            tier.describe(configure.description)
        mover = Mover(tier, end, region, configure)
    except TierRefused as error:
        SendQueue(end).send(Refused(sendable_text(error)))
        return
    if tier.wake_fd is not None:
        events.register(tier.wake_fd, select.POLLIN)
    stopped = run_loop(mover, end, events, {parent_fd, terminated})
    _exit(mover, orphaned=not stopped)


def _receive_configure(end: socket.socket, events: select.poll, ends: set[int]) -> Configure | None:
    """The first packet, or None if one of the descriptors `ends` became readable, or the socket was closed, before."""
    while True:
        for descriptor, _ in events.poll():
            if descriptor in ends:
                return None
        try:
            packet = end.recv(MAX_PACKET)
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return None
        if not packet:
            return None
        message = decode_to_mover(packet)
        if not isinstance(message, Configure):
            raise msgspec.ValidationError(f"the first message must be Configure, not {type(message).__name__}")
        return message


def _exit(mover: Mover, *, orphaned: bool) -> None:
    """Finish what runs, as far as that is quick, and write the journal."""
    times = mover.times
    limit_exit(times.orphan_exit_s if orphaned else times.stop_exit_s)
    mover.abandon()
    # The results are not read any more, but rows that are written now are found after a restart.
    deadline = time.monotonic() + (times.orphan_exit_s / 5 if orphaned else STOP_S)
    while not mover.may_close and time.monotonic() < deadline:
        time.sleep(POLL_S)
        mover.step(time.monotonic())
    if mover.may_close:
        mover.close()


def _set_up_logging(name: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(LOG_FORMAT % name))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("botocore").setLevel(logging.WARNING)  # at INFO it logs every search for credentials


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")
