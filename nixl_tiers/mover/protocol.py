"""The messages between a coordinator and its movers, over a SOCK_SEQPACKET socketpair, one msgpack message a packet.

A packet stays below MAX_PACKET bytes: senders split batches. Packets arrive whole and in order, or not at all. A packet
that is too long, malformed or out of range does not decode, and ends the mover, whichever side has sent it.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import Annotated, Final

import msgspec

from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.tiers.base import Count, Entry, Move, RowKey, Tick

MAX_PACKET: Final = 64 << 10
MAX_TOUCHED: Final = 4096  # of 15 bytes at most
MAX_DENIALS: Final = 8
MAX_KIND_CHARS: Final = 64
MAX_SENTENCE_CHARS: Final = 1024

_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Kind = Annotated[str, msgspec.Meta(max_length=MAX_KIND_CHARS)]
_Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE_CHARS)]
_Path = Annotated[bytes, msgspec.Meta(max_length=4096)]
_Denials = Annotated[dict[_Kind, _Sentence], msgspec.Meta(max_length=MAX_DENIALS)]


class Configure(msgspec.Struct, tag="configure", frozen=True):
    """Coordinator -> mover: the first message, sent once: which tier to run, and the layout of the region."""

    tier: dict[str, object]  # the tier's configuration (config.tier_to_dict)
    cells: int
    cell_payload: int
    sub_blocks: int
    rows: int
    engine: str = ""  # StorageTier.identify
    secret_variables: list[str] = []  # environment variables whose values must not be logged
    description: Description | None = None  # StorageTier.describe
    mount_point: _Path = b""  # StorageTier.mount_point, as the last mover that opened it has found it
    movers: int = 1  # of the tier in this engine, this one included
    replicas: int = 1  # engines of this machine that share its capacity
    times: Times = PRODUCTION


class Open(msgspec.Struct, tag="open", frozen=True):
    """Coordinator -> mover: serve this namespace from now on (at start and after every reset); answered by Opened."""

    namespace: bytes
    epoch: int


class Store(msgspec.Struct, tag="store", frozen=True):
    """Coordinator -> mover: copy rows from the region to the tier; answered by Finished."""

    job: int
    moves: list[Move]


class Load(msgspec.Struct, tag="load", frozen=True):
    """Coordinator -> mover: copy rows from the tier to the region and verify each; answered by Finished."""

    job: int
    moves: list[Move]


class Delete(msgspec.Struct, tag="delete", frozen=True):
    """Coordinator -> mover: delete the rows (slot, key); not answered."""

    entries: list[tuple[int, bytes]]


class Touch(msgspec.Struct, tag="touch", frozen=True):
    """Coordinator -> mover: rows that were used, as (slot, tick); not answered."""

    entries: Annotated[list[tuple[Count, Tick]], msgspec.Meta(min_length=1, max_length=MAX_TOUCHED)]


class CheckExistence(msgspec.Struct, tag="check_existence", frozen=True):
    """Coordinator -> mover of a shared tier: which of these keys are stored? Answered by Listed with those that were
    found, followed by ExistenceChecked. `chain`: a key is useful only if all keys before it exist."""

    check_id: int
    keys: list[RowKey]
    chain: bool


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Coordinator -> mover: finish running jobs, write the journal and exit."""


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """Mover -> coordinator: the tier is up (again) and may hold `slots` rows. A Heartbeat is sent before it, so that
    the bytes in use are known when the tier comes up."""

    epoch: int
    slots: Count
    mount_point: _Path = b""  # StorageTier.mount_point


class Slots(msgspec.Struct, tag="slots", frozen=True):
    """Mover -> coordinator: the tier's number of slots has changed. Rows that no longer have a slot follow as Listed
    entries with slot GONE."""

    epoch: int
    slots: Count


class Down(msgspec.Struct, tag="down", frozen=True):
    """Mover -> coordinator: the tier cannot serve now; the mover retries with backoff and sends Opened on success.
    `epoch`: of the Open that it answers."""

    reason: str
    epoch: int


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Mover -> coordinator: the tier can never work as configured (no such bucket), for one reason; the mover exits."""

    reason: str


class Listed(msgspec.Struct, tag="listed", frozen=True):
    """Mover -> coordinator, after Opened: rows found in this namespace, oldest first by `tick`. `last` ends the first
    listing, which is empty where the medium is asked; on a shared medium, changes may follow it at any time."""

    epoch: int
    entries: list[Entry]
    last: bool


class ListedColumns(msgspec.Struct, tag="listed_columns", frozen=True):
    """Mover -> coordinator, before the last Listed of a first listing: many rows, as memory.columns whose file
    descriptor comes with this packet."""

    epoch: int


class ExistenceChecked(msgspec.Struct, tag="existence_checked", frozen=True):
    """Mover -> coordinator: an existence check has ended; the keys in `absent` do not exist. Keys that are neither
    absent nor in a Listed before it are unknown: they were not requested, or there was no answer."""

    check_id: int
    absent: list[RowKey]


class RowsEnded(msgspec.Struct, tag="rows_ended", frozen=True):
    """Mover -> coordinator: rows of a job that goes on with others have ended, and no transfer touches them any more.
    `rows`: where in the region they are, each once in a job's life; `outcomes`: one Outcome for each.

    `partial`: loaded rows that lack sub-blocks: (position in `rows`, number of missing sub-blocks at the row's start).
    """

    job: int
    rows: list[Count]
    outcomes: bytes
    partial: list[tuple[Count, Count]] = []


class Finished(msgspec.Struct, tag="finished", frozen=True):
    """Mover -> coordinator: a job has ended, and no transfer touches its rows any more. `outcomes` holds one Outcome
    per move that no RowsEnded has reported, in the job's order.

    `partial`: as that of RowsEnded: (position in `outcomes`, number of missing sub-blocks at the row's start).
    """

    job: int
    outcomes: bytes
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    partial: list[tuple[Count, Count]] = []


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """Mover -> coordinator: sent every `heartbeat_s` by the main loop, the one that moves rows."""

    used_bytes: _Bytes  # what the tier occupies on its medium now
    denials: _Denials = {}  # StorageTier.denials
    listed: _Bytes = 0  # rows that the first listing has found so far
    staged: tuple[bool, bool] = (False, False)  # StorageTier.staged
    gone_before: Tick = 0  # StorageTier.gone_before
    stuck: bool = False  # StorageTier.stuck


def sendable_text(text: object, most: int = MAX_SENTENCE_CHARS) -> str:
    """A text for a message, which may name files: not every name is UTF-8, and a message must be."""
    return str(text).encode(errors="backslashreplace").decode()[:most]


ToMover = Configure | Open | Store | Load | Delete | Touch | CheckExistence | Stop
ToCoordinator = (
    Opened | Slots | Down | Refused | Listed | ListedColumns | ExistenceChecked | RowsEnded | Finished | Heartbeat
)

encode = msgspec.msgpack.Encoder().encode
decode_to_mover = msgspec.msgpack.Decoder(ToMover).decode
decode_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode


def packet_of(message: ToMover) -> bytes | None:
    """The message, encoded. None if a mover could not decode it: that would end the mover, so it must not be sent."""
    try:
        packet = encode(message)
        decode_to_mover(packet)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return None
    return packet if len(packet) <= MAX_PACKET else None


LOG_FORMAT: Final = "nixl_tiers mover[%s] %%(levelname)s: %%(message)s"
"""Of the lines that a mover writes to its standard error."""


class SendQueue:
    """Packets to the coordinator, in order. What the socket does not take at once is queued; nothing blocks or is
    lost."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._packets: deque[tuple[bytes, int | None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._packets)

    def send(self, message: ToCoordinator, fd: int | None = None) -> None:
        """Queue a message, with a descriptor if there is one, and flush. The descriptor is closed once it is sent."""
        self._packets.append((encode(message), fd))
        if self._closed:
            self.close()
        else:
            self.flush()

    def close(self) -> None:
        """The coordinator is gone: discard all messages, also those to come."""
        self._closed = True
        for _, fd in self._packets:
            if fd is not None:
                os.close(fd)
        self._packets.clear()

    def flush(self) -> None:
        """Send as much as the socket takes. Raises OSError when the other end is closed."""
        while self._packets:
            packet, fd = self._packets[0]
            try:
                if fd is None:
                    self._socket.send(packet)
                else:
                    socket.send_fds(self._socket, [packet], [fd])
            except BlockingIOError:
                return
            self._packets.popleft()
            if fd is not None:
                os.close(fd)
