"""A real mover process on a socketpair, driven the way the supervisor drives it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory import columns as listed
from nixl_tiers.memory.address_space import AddressSpace
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import (
    MAX_PACKET,
    CheckExistence,
    Configure,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    ListedColumns,
    Load,
    Open,
    Opened,
    RowsEnded,
    Stop,
    Store,
    ToCoordinator,
    ToMover,
    decode_to_coordinator,
    encode,
)
from nixl_tiers.tiers.base import Entry, Move, PackedEntries

TIMEOUT_S = 120.0
NAMESPACE = bytes(range(16))


def key_of(number: int) -> bytes:
    return b"key-%08d" % number


def payload(number: int, geometry: Geometry) -> np.ndarray:
    """The row of key `number`: cheap to make, different in every page."""
    words = np.arange(geometry.row_bytes // 8, dtype=np.uint64) + np.uint64(number << 32 | 1)
    return words.view(np.uint8)


def entries_in(fd: int) -> list[Entry]:
    """The rows in the columns behind `fd`, which is closed."""
    columns = listed.ListedColumns.attach(fd)
    records = np.frombuffer(columns.records, np.uint8).reshape(columns.count, columns.width)
    rows = PackedEntries(np.frombuffer(columns.slots, np.uint32), np.frombuffer(columns.ticks, np.uint64), records)
    entries = [*rows]
    del rows, records
    columns.close()
    return entries


class MoverProcess:
    """A mover, the region it shares with this process, and this process's end of its socket."""

    def __init__(
        self,
        tier: dict[str, object],
        geometry: Geometry,
        rows: int,
        region: HostRegion | None = None,
        engine: str = "",
        *,
        movers: int = 1,
        replicas: int = 1,
        times: Times = PRODUCTION,
    ) -> None:
        """`movers`: of the tier; `replicas`: engines that share its capacity."""
        self.geometry = geometry
        self.region = region or HostRegion.create(geometry, rows)
        self._owns_region = region is None
        self.memory = AddressSpace()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "nixl_tiers.mover", "--tier", "one", "--socket", str(theirs.fileno())),
                    *("--region", str(self.region.fd), "--mark", str(self.memory.fd), "--parent", str(os.getpid())),
                ],
                pass_fds=(theirs.fileno(), self.region.fd, self.memory.fd),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd=Path(__file__).parents[2],
            )
        self.used_bytes = 0
        self.heartbeats = 0
        self._unread: list[ToCoordinator] = []
        self._jobs = 0
        self._ended: dict[int, dict[int, Outcome | None]] = {}  # by job, by row of the region: what was reported
        cells, payload_bytes, blocks = geometry.cells, geometry.cell_payload, geometry.sub_blocks
        given = {"engine": engine, "movers": movers, "replicas": replicas, "times": times}
        self.send(Configure(tier, cells, payload_bytes, blocks, self.region.rows, **given))  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.socket.close()
        self.memory.close()
        if self._owns_region:
            self.region.close()

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, message: ToMover) -> None:
        self.socket.settimeout(TIMEOUT_S)
        self.socket.send(encode(message))

    def expect(self, wanted: Callable[[ToCoordinator], bool], timeout_s: float = TIMEOUT_S) -> ToCoordinator:
        """The first message that is `wanted`; others are kept for later calls, heartbeats are only counted."""
        deadline = time.monotonic() + timeout_s
        for place, message in enumerate(self._unread):
            if wanted(message):
                return self._unread.pop(place)
        while True:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            packet, fds, _, _ = socket.recv_fds(self.socket, MAX_PACKET, 1)
            if not packet:
                raise EOFError(f"the mover exited: {self.log()}")
            message = decode_to_coordinator(packet)
            if isinstance(message, ListedColumns):
                message = Listed(message.epoch, entries_in(fds[0]), last=False)
            if isinstance(message, Heartbeat):
                self.used_bytes = message.used_bytes
                self.heartbeats += 1
            if isinstance(message, RowsEnded):
                ended = self._ended[message.job]
                assert all(ended[row] is None for row in message.rows), "a row was reported twice"
                ended.update(zip(message.rows, map(Outcome, message.outcomes), strict=True))
            if wanted(message):
                return message
            if not isinstance(message, (Heartbeat, RowsEnded)):
                self._unread.append(message)

    def open(self, namespace: bytes = NAMESPACE, epoch: int = 0) -> int:
        """Number of slots that the tier offers."""
        self.send(Open(namespace, epoch))
        message = self.expect(lambda m: isinstance(m, Opened) and m.epoch == epoch)
        assert isinstance(message, Opened)
        return message.slots

    def listed_rows(self) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            message = self.expect(lambda m: isinstance(m, Listed))
            assert isinstance(message, Listed)
            entries += message.entries
            if message.last:
                return entries

    def there(self, numbers: Sequence[int]) -> list[int]:
        """Which of these keys an existence check finds, in a tier that is asked."""
        if not numbers:
            return []
        self._jobs += 1
        check, keys = self._jobs, {key_of(number): number for number in numbers}
        self.send(CheckExistence(check, [*keys], chain=False))
        answer = self.expect(lambda m: isinstance(m, ExistenceChecked) and m.check_id == check)
        assert isinstance(answer, ExistenceChecked)
        found = {entry.key for message in self._unread if isinstance(message, Listed) for entry in message.entries}
        self._unread = [message for message in self._unread if not isinstance(message, Listed)]
        assert keys.keys() - answer.absent <= found, "a key is neither absent nor found"
        return sorted(keys[key] for key in keys.keys() - answer.absent)

    def begin(self, kind: type[Store | Load], moves: Sequence[Move]) -> int:
        self._jobs += 1
        self._ended[self._jobs] = {move.row: None for move in moves}
        self.send(kind(self._jobs, list(moves)))
        return self._jobs

    def finished(self, job: int) -> list[Outcome]:
        """The outcomes of its rows, those included that were reported while others went on."""
        message = self.expect(lambda m: isinstance(m, Finished) and m.job == job)
        assert isinstance(message, Finished)
        ended = self._ended.pop(job)
        left = [row for row, outcome in ended.items() if outcome is None]
        ended.update(zip(left, map(Outcome, message.outcomes), strict=True))
        return [outcome for outcome in ended.values() if outcome is not None]

    def store(self, numbers: Sequence[int], slots: Sequence[int] | None = None, first_row: int = 0) -> list[Outcome]:
        """Put payload(n) under key n into slot n (or the given one), through rows from `first_row` on."""
        moves = []
        for place, number in enumerate(numbers):
            row = first_row + place
            self.region.rows_view[row] = payload(number, self.geometry)
            slot = slots[place] if slots is not None else number
            moves.append(Move(row, slot, key_of(number), tick=number + 1, seal=True))
        return self.finished(self.begin(Store, moves))

    def load(self, numbers: Sequence[int], slots: Sequence[int] | None = None, first_row: int = 0) -> list[Outcome]:
        """Load keys into rows with other content; every OK row is compared with what was stored."""
        moves = []
        for place, number in enumerate(numbers):
            self.region.rows_view[first_row + place] = 0xEE
            moves.append(Move(first_row + place, slots[place] if slots is not None else number, key_of(number)))
        outcomes = self.finished(self.begin(Load, moves))
        for place, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True)):
            if outcome is Outcome.OK:
                assert self.holds(first_row + place, number), f"wrong bytes for key {number}"
        return outcomes

    def holds(self, row: int, number: int) -> bool:
        wanted = payload(number, self.geometry)
        return all(
            np.array_equal(
                self.region.rows_view[row][at : at + self.geometry.cell_payload],
                wanted[at : at + self.geometry.cell_payload],
            )
            for at in range(0, self.geometry.cells * self.geometry.cell_bytes, self.geometry.cell_bytes)
        )

    # --- exit -------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        self.send(Stop())
        assert self.process.wait(TIMEOUT_S) == 0

    def kill(self) -> None:
        """As the supervisor does: it is dead when it is reaped and its memory is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(TIMEOUT_S)
        assert wait_until(self.memory.is_gone)

    def log(self) -> str:
        """What it wrote to stderr; call it only after the mover has exited."""
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


def shard_dir(path: Path, namespace: bytes = NAMESPACE, part: int = 0) -> Path:
    """Where `layout: slabs` keeps the rows of a namespace in a part of its path."""
    return path / f"part-{part}" / namespace.hex()


def wait_until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def has_exited(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
