"""What an engine and its movers say to each other over a SOCK_SEQPACKET socketpair, one msgpack message a packet.

A packet stays below MAX_PACKET bytes: senders split batches. Packets arrive whole and in order, or not at all. What is
longer, or no message, or says what cannot be, does not decode: it costs the mover, whoever of both has sent it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from nixl_tiers.tiers.base import Count, Entry, Move, RowKey, Tick

MAX_PACKET: Final = 64 << 10
MAX_MOVES: Final = 256
HEARTBEAT_S: Final = 1.0
MAX_DENIALS: Final = 8
MAX_KIND_CHARS: Final = 64
MAX_SENTENCE_CHARS: Final = 1024

_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Kind = Annotated[str, msgspec.Meta(max_length=MAX_KIND_CHARS)]
_Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE_CHARS)]
_Denials = Annotated[dict[_Kind, _Sentence], msgspec.Meta(max_length=MAX_DENIALS)]


class Configure(msgspec.Struct, tag="hello", frozen=True):
    """Engine -> mover, once, first: what to be."""

    tier: dict[str, object]  # the tier's configuration (config.tier_to_dict)
    cells: int
    cell_payload: int
    sub_blocks: int
    rows: int
    named: bool = False  # tables that it sends must tell keys: rows leave this tier by being written to the next one


class Open(msgspec.Struct, tag="open", frozen=True):
    """Engine -> mover: serve this namespace from now on (at start, and after every reset). Answered by Opened."""

    namespace: bytes
    epoch: int


class Store(msgspec.Struct, tag="store", frozen=True):
    """Engine -> mover: region -> tier. Answered by Finished."""

    job: int
    moves: list[Move]


class Load(msgspec.Struct, tag="load", frozen=True):
    """Engine -> mover: tier -> region, every row verified before it is OK. Answered by Finished."""

    job: int
    moves: list[Move]


class Delete(msgspec.Struct, tag="drop", frozen=True):
    """Engine -> mover: forget these (slot, key). Not answered."""

    entries: list[tuple[int, bytes]]


class DeleteCold(msgspec.Struct, tag="drop_adopted", frozen=True):
    """Engine -> mover: forget these rows of its tables: (slot, digest of the key). Not answered."""

    entries: list[tuple[int, bytes]]


class CheckExistence(msgspec.Struct, tag="probe", frozen=True):
    """Engine -> mover, of a tier to which others store too: are these there? `chain`: each is worth nothing without
    those before it. Answered by Adopt with what was found, and then Probed."""

    probe: int
    keys: list[RowKey]
    chain: bool


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Engine -> mover: finish what runs, write the journal, leave."""


class Opened(msgspec.Struct, tag="opened", frozen=True):
    """Mover -> engine: the tier is up (again). `slots`: how many rows it may hold. A Heartbeat
    goes before it, so that the engine knows what the tier takes when it hears that it is up."""

    epoch: int
    slots: Count


class Slots(msgspec.Struct, tag="slots", frozen=True):
    """Mover -> engine: the tier has room for more or fewer rows than it said. What stands beyond follows as Adopt
    entries of slot GONE."""

    epoch: int
    slots: Count


class Down(msgspec.Struct, tag="down", frozen=True):
    """Mover -> engine: the tier cannot serve now; the mover goes on trying and sends Opened when it can."""

    reason: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Mover -> engine: the tier can never serve as configured (no such bucket). One sentence. The mover leaves."""

    reason: str


class Listed(msgspec.Struct, tag="adopt", frozen=True):
    """Mover -> engine, after Opened: rows found in this namespace, oldest first in `tick`. `last` ends the listing;
    where others write to the medium, changes may follow it at any time."""

    epoch: int
    entries: list[Entry]
    last: bool


class ListedIndex(msgspec.Struct, tag="adopt_table", frozen=True):
    """Mover -> engine, among the Adopts of a first listing: a memory.table.Table of more rows, which comes as a
    descriptor with this packet. `newest`: the highest tick in it."""

    epoch: int
    newest: Tick


class ExistenceChecked(msgspec.Struct, tag="probed", frozen=True):
    """Mover -> engine: a probe ended; of its keys, `absent` are surely not there. What is neither found nor absent was
    not asked for, or there was no answer."""

    probe: int
    absent: list[RowKey]


class Finished(msgspec.Struct, tag="finished", frozen=True):
    """Mover -> engine: a job ended; `outcomes` holds one Outcome a move, in the job's order. Its rows are quiet now.

    `partial`: of the rows that a load brought, those that lack sub-blocks: (place in the job, how many at the row's
    beginning are not to be used).
    """

    job: int
    outcomes: bytes
    seconds: float
    partial: list[tuple[Count, Count]] = []


class Heartbeat(msgspec.Struct, tag="heartbeat", frozen=True):
    """Mover -> engine, every HEARTBEAT_S from the loop that moves rows."""

    used_bytes: _Bytes  # what the tier takes on its medium now
    denials: _Denials = {}  # StorageTier.denials
    listed: _Bytes = 0  # how many rows it has found since it was opened


ToMover = Configure | Open | Store | Load | Delete | DeleteCold | CheckExistence | Stop
ToCoordinator = Opened | Slots | Down | Refused | Listed | ListedIndex | ExistenceChecked | Finished | Heartbeat

encode = msgspec.msgpack.Encoder().encode
decode_to_mover = msgspec.msgpack.Decoder(ToMover).decode
decode_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode


def sendable(message: ToMover) -> bool:
    """Whether a mover would take this for a message. What is none costs whoever sent it, so it is better not sent."""
    try:
        packet = encode(message)
        decode_to_mover(packet)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
        return False
    return len(packet) <= MAX_PACKET
