"""The mover process: one loop between the engine's socket and one storage tier.

The loop never waits for the medium: opening runs on a thread, transfers are polled, and what the engine's end of the
socket does not take yet is kept. So a missing heartbeat means that this process is stuck, and may be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NoReturn

import msgspec

from nixl_tiers.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import missing_of
from nixl_tiers.mover.index_builder import IndexBuilder
from nixl_tiers.mover.index_publisher import IndexPublisher
from nixl_tiers.mover.protocol import (
    HEARTBEAT_S,
    MAX_DENIALS,
    MAX_KIND_CHARS,
    MAX_PACKET,
    MAX_SENTENCE_CHARS,
    CheckExistence,
    Configure,
    Delete,
    DeleteCold,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    Load,
    Open,
    Opened,
    Refused,
    Slots,
    Stop,
    Store,
    ToMover,
    decode_to_mover,
)
from nixl_tiers.mover.protocol import Down as TierIsDown
from nixl_tiers.mover.send_queue import SendQueue
from nixl_tiers.mover.stderr import FORMAT
from nixl_tiers.tiers.base import MAX_ENTRIES, StorageTier, TierDown, TierRefused
from nixl_tiers.tiers.registry import make_tier

logger = logging.getLogger(__name__)

POLL_S: Final = 0.0003  # tighter burns a core and gains nothing, measured
LOOK_S: Final = 0.005  # how soon an opening is looked at again
RETRY_S: Final = (0.5, 30.0)
LEAVE_S: Final = 5.0  # the longest that leaving may take once nobody waits for the results
JOURNAL_S: Final = 60.0  # the same where the engine asked for it, and waits for as long as it likes
STUCK_S: Final = 120.0  # longer than an engine that lives lets its mover be silent
QUEUE_PACKETS: Final = 256  # more than this unsent, or not begun: nothing new is taken in
SOCKET_BYTES: Final = 1 << 20

_libc = ctypes.CDLL(None)


class Mover:
    """The state of the loop. `step` does all that can be done now."""

    def __init__(self, tier: StorageTier, end: socket.socket, region: HostRegion, *, named: bool) -> None:
        """`named`: see Hello."""
        self.outbox = SendQueue(end)
        self.leaving = False
        self._tier = tier
        self._region = region
        self._named = named
        self._inbox: deque[ToMover] = deque()
        self._jobs: dict[int, tuple[Store | Load, float]] = {}  # batch_id -> the engine's job, started at
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="opener")
        self._opening: tuple[Open, Future[int]] | None = None
        self._again: tuple[float, Open] | None = None  # when to try the open that failed
        self._backoff_s = RETRY_S[0]
        self._answered = False  # whether the configuration was ever judged to be possible
        self._served: Open | None = None
        self._slots_told = 0
        self._up_at_s = 0.0
        self._teller: IndexPublisher | None = None
        self._beat_at_s = 0.0
        self._used_bytes = 0
        self._denials: dict[str, str] = {}

    def take(self, message: ToMover) -> None:
        self._inbox.append(message)

    @property
    def crowded(self) -> bool:
        """Whether nothing more should be taken for now: the engine is behind with what it has been told, or an Open
        waits for jobs that do not end."""
        return len(self.outbox) >= QUEUE_PACKETS or len(self._inbox) >= QUEUE_PACKETS

    @property
    def busy(self) -> bool:
        """Whether step is worth calling within POLL_S."""
        return bool(self._jobs) or (self._served is not None and self._tier.busy)

    def next_s(self, now: float) -> float:
        """How long step may be put off if no message comes, in seconds."""
        moments = [self._beat_at_s]
        if self._opening is not None:
            moments.append(now + LOOK_S)
        if self._again is not None:
            moments.append(self._again[0])
        if self._teller is not None:
            moments.append(self._teller.next_at_s)
        return max(0.0, min(moments) - now)

    def step(self, now: float) -> None:
        self._opened(now)
        self._handle_messages(now)
        if self._served is not None:
            self._collect(now)
            self._tell_slots()
        if self._teller is not None:
            self._teller.step(now)
        if now >= self._beat_at_s:
            self._beat_at_s = now + HEARTBEAT_S
            if not self.outbox:  # an engine that does not read needs no more of them
                self._beat()

    def close(self) -> None:
        """Let the tier write what it has pending."""
        if self._opening is not None:
            self._opening[1].exception()  # wait for it
        self._tier.close()

    def _beat(self) -> None:
        if self._opening is None:  # while it opens, the tier belongs to the opener
            self._used_bytes = self._tier.used_bytes
            self._denials = _bounded(self._tier.denials)
        listed = 0 if self._teller is None else self._teller.listed
        self.outbox.send(Heartbeat(self._used_bytes, self._denials, listed))

    # --- opening --------------------------------------------------------------------------------------------------

    def _handle_messages(self, now: float) -> None:
        """In order. An Open waits until everything before it has ended; a Stop too."""
        if self._again is not None and now >= self._again[0] and self._opening is None:
            self._begin_open(self._again[1])
        while self._inbox and len(self.outbox) < QUEUE_PACKETS:
            message = self._inbox[0]
            if isinstance(message, (Open, Stop)) and (self._jobs or self._opening is not None):
                return
            self._inbox.popleft()
            if isinstance(message, Open):
                self._backoff_s = RETRY_S[0]
                self._begin_open(message)
            elif isinstance(message, Stop):
                self.leaving = True
                return
            elif isinstance(message, (Store, Load)):
                self._begin_job(message, now)
            elif isinstance(message, CheckExistence):
                if self._served is None or not self._tier.check_existence(message.probe, message.keys, message.chain):
                    self.outbox.send(ExistenceChecked(message.probe, []))
            elif isinstance(message, Delete) and self._served is not None:
                self._tier.delete(message.entries)
            elif isinstance(message, DeleteCold) and self._teller is not None:
                self._tier.delete(self._teller.keys(message.entries))

    def _begin_open(self, message: Open) -> None:
        self._again = None
        self._serve_nothing()
        self._opening = (message, self._opener.submit(self._tier.open, message.namespace, message.epoch))

    def _opened(self, now: float) -> None:
        if self._opening is None or not self._opening[1].done():
            return
        (message, future), self._opening = self._opening, None
        try:
            slots = future.result()
        except (TierDown, TierRefused) as error:
            if isinstance(error, TierRefused) and not self._answered:
                self.outbox.send(Refused(str(error)))
                self.leaving = True
                return
            # What was accepted once, or could not be judged at the start, may come back: a bucket made anew, a mount.
            self._down(message, error, now)
        else:
            self._answered = True
            self._served = message
            self._up_at_s = now
            self._slots_told = slots
            self._beat()
            self.outbox.send(Opened(message.epoch, slots))
            adoption = IndexBuilder(slots, named=self._named)
            self._teller = IndexPublisher(self._tier, self.outbox, message.epoch, adoption, self._beat)

    def _serve_nothing(self) -> None:
        self._served = None
        if self._teller is not None:
            self._teller.close()
            self._teller = None

    def _down(self, message: Open, error: TierDown | TierRefused, now: float) -> None:
        self._answered = True
        self._serve_nothing()
        self._again = (now + self._backoff_s, message)
        self._backoff_s = min(2 * self._backoff_s, RETRY_S[1])
        self.outbox.send(TierIsDown(str(error)))

    # --- rows -----------------------------------------------------------------------------------------------------

    def _tell_slots(self) -> None:
        slots = self._tier.slots
        if self._served is not None and slots is not None and slots != self._slots_told:
            self._slots_told = slots
            self.outbox.send(Slots(self._served.epoch, slots))

    def _begin_job(self, message: Store | Load, now: float) -> None:
        if self._served is None:
            self.outbox.send(Finished(message.job, bytes([Outcome.FAILED] * len(message.moves)), 0.0))
            return
        if any(move.row >= self._region.rows for move in message.moves):
            raise ValueError("a job on rows that there are not")
        begin = self._tier.store if isinstance(message, Store) else self._tier.load
        self._jobs[begin(message.moves)] = (message, now)

    def _collect(self, now: float) -> None:
        try:
            ended = self._tier.poll()
        except TierDown as error:
            if self._jobs:  # their rows may not be quiet: only the end of this process makes them so
                raise
            assert self._served is not None
            if now - self._up_at_s > RETRY_S[1]:
                self._backoff_s = RETRY_S[0]
            self._down(self._served, error, now)
            return
        for done in ended:
            message, started = self._jobs.pop(done.batch_id)
            self.outbox.send(
                Finished(message.job, bytes(done.outcomes), now - started, self._partial(message, done.outcomes))
            )
        for answer in self._tier.existence_answers():
            assert self._served is not None
            for start in range(0, len(answer.found), MAX_ENTRIES):
                batch = list(answer.found[start : start + MAX_ENTRIES])
                self.outbox.send(Listed(self._served.epoch, batch, last=False))
            self.outbox.send(ExistenceChecked(answer.check_id, list(answer.absent)))

    def _partial(self, message: Store | Load, outcomes: Sequence[Outcome]) -> list[tuple[int, int]]:
        """Which of the rows that a load brought lack sub-blocks, by their seals."""
        geometry = self._region.geometry
        if isinstance(message, Store) or geometry.sub_blocks == 1:
            return []
        missing = (
            (place, missing_of(self._region.rows_view[move.row], geometry))
            for place, (move, outcome) in enumerate(zip(message.moves, outcomes, strict=True))
            if outcome is Outcome.OK
        )
        return [(place, count) for place, count in missing if count]


def _bounded(denials: Mapping[str, str]) -> dict[str, str]:
    """As much of it as a message may hold."""
    some = itertools.islice(denials.items(), MAX_DENIALS)
    return {kind[:MAX_KIND_CHARS]: sentence[:MAX_SENTENCE_CHARS] for kind, sentence in some}


def run(socket_fd: int, region_fd: int, parent: int) -> NoReturn:
    """Be the mover on these descriptors until the engine says stop, hangs up, or dies. Never returns, never unwinds:
    an interpreter that tears NIXL down may wait for dead servers, or crash."""
    status = 1
    try:
        _run(socket_fd, region_fd, parent)
        status = 0
    except BaseException:
        logger.exception("the mover failed")
    finally:
        with contextlib.suppress(OSError):  # the engine, which reads it, may be gone
            sys.stderr.flush()
        os._exit(status)


def _run(socket_fd: int, region_fd: int, parent: int) -> None:
    end = socket.socket(fileno=socket_fd)
    end.set_inheritable(False)
    end.setblocking(False)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    try:
        parent_fd = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    told, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGTERM, lambda *_: os.write(tell, b"."))
    events = select.poll()
    for descriptor in (parent_fd, told, end.fileno()):
        events.register(descriptor, select.POLLIN)

    hello = _first(end, events, {parent_fd, told})
    if hello is None:
        return
    _log_as(str(hello.tier.get("type", "?")))
    _end_if_stuck()
    region = HostRegion.attach(region_fd)
    try:
        mover = Mover(make_tier(hello, region), end, region, named=hello.named)
    except TierRefused as error:
        SendQueue(end).send(Refused(str(error)))
        return
    asked = _loop(mover, end, events, {parent_fd, told})
    _leave(mover, hurry=not asked)


def _loop(mover: Mover, end: socket.socket, events: select.poll, ends: set[int]) -> bool:
    """True if the engine asked for the end, False if it is gone."""
    alive_at_s = 0.0
    while True:
        now = time.monotonic()
        if now >= alive_at_s:
            _end_if_stuck()
            alive_at_s = now + HEARTBEAT_S
        try:
            mover.step(now)
            if mover.leaving and not mover.outbox:
                return True
            mover.outbox.flush()
        except (BrokenPipeError, ConnectionResetError):
            return False
        interest = (0 if mover.crowded or mover.leaving else select.POLLIN) | (select.POLLOUT if mover.outbox else 0)
        events.modify(end.fileno(), interest)
        if mover.busy:
            time.sleep(POLL_S)
            ready = events.poll(0)
        else:
            ready = events.poll(1000 * mover.next_s(now) + 1)
        for descriptor, event in ready:
            if descriptor in ends:
                return False
            if event & select.POLLIN:
                if not _receive(mover, end):
                    return False
            elif event & (select.POLLHUP | select.POLLERR):
                return False


def _receive(mover: Mover, end: socket.socket) -> bool:
    """Take the messages that are there, as many as may wait here; False when the other end is closed."""
    while not mover.crowded:
        try:
            packet = end.recv(MAX_PACKET)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not packet:
            return False
        mover.take(decode_to_mover(packet))
    return True


def _leave(mover: Mover, *, hurry: bool) -> None:
    """Finish what runs and write the journal; without the engine, only as far as that is quick."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LEAVE_S if hurry else JOURNAL_S)
    if hurry:
        mover.outbox.hang_up()
        # Results have nobody to go to, but what is written now is there after a restart.
        deadline = time.monotonic() + LEAVE_S / 5
        while mover.busy and time.monotonic() < deadline:
            time.sleep(POLL_S)
            mover.step(time.monotonic())
    if not mover.busy:
        mover.close()


def _end_if_stuck() -> None:
    """Have the kernel end this process after STUCK_S, unless this is called again. When a call into NIXL does not
    return, and keeps the interpreter's lock, no thread of ours can; and the engine that would do it may be dead.

    The timer runs while this process is stopped (SIGSTOP, a frozen cgroup, a suspended machine), and would end it as
    soon as it goes on. So the first alarm only sets another one: its handler is alarm(2) itself, called with the
    signal's number, 14, and thus good for 14 s. It is called once, then SIGALRM is deadly again.
    """
    _libc.sysv_signal(signal.SIGALRM, ctypes.cast(_libc.alarm, ctypes.c_void_p))
    signal.setitimer(signal.ITIMER_REAL, STUCK_S)


def _first(end: socket.socket, events: select.poll, ends: set[int]) -> Configure | None:
    """The engine's first packet, or None if it hung up before."""
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
            raise msgspec.ValidationError(f"the first message must be hello, not {type(message).__name__}")
        return message


def _log_as(name: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(FORMAT % name))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells at every look where it found credentials


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", " | ")
