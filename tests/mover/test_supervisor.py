"""The supervisor: whatever a mover does, only that mover is killed and restarted."""

from __future__ import annotations

import socket
import time

import pytest

from nixl_tiers.base.clock import COUNTED_S, RunningClock
from nixl_tiers.mover import child
from nixl_tiers.mover.child import Redactor
from nixl_tiers.mover.protocol import (
    MAX_PACKET,
    Down,
    Heartbeat,
    Refused,
    ToCoordinator,
    encode,
)
from nixl_tiers.mover.restarts import KILLS_AN_HOUR, RestartBackoff


def test_time_while_the_process_did_not_run_barely_counts() -> None:
    moments = [0.0, 1.0, 3601.0, 3602.0, 7200.0]
    clock = RunningClock(iter(moments).__next__)
    assert [clock() for _ in moments[1:]] == pytest.approx([1.0, 1.0 + COUNTED_S, 2.0 + COUNTED_S, 2.0 + 2 * COUNTED_S])


def test_packets_queued_before_a_reset_are_received() -> None:
    """A mover that leaves with unread packets in its socket resets the connection; its last words are queued before
    that, as when it is refused at once and has not read `Open` yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.setblocking(False)
        ours.send(b"not read")
        theirs.send(encode(Refused("bucket: there is no such thing")))
        theirs.close()
        mover = object.__new__(child.Child)
        mover.socket, mover.eof, mover.killed_s, mover._clock = ours, False, None, time.monotonic
        mover._buffer, mover._redact = bytearray(MAX_PACKET), Redactor([])
        assert [message for message, _ in mover.receive()] == [Refused("bucket: there is no such thing")]
        assert mover.eof


def test_secrets_in_the_texts_of_a_movers_messages_are_redacted() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        mover = object.__new__(child.Child)
        mover.socket, mover.eof, mover.killed_s, mover._clock = ours, False, None, time.monotonic
        mover._buffer, mover._redact = bytearray(MAX_PACKET), Redactor(["my-secret"])
        for message in _with_texts("no my-secret"):
            theirs.send(encode(message))
        assert [message for message, _ in mover.receive()] == _with_texts("no ***")


def _with_texts(text: str) -> list[ToCoordinator]:
    return [Down(text, 7), Refused(text), Heartbeat(1, {"put": text, text: "denied"})]


def test_kills_are_bounded_by_the_hour_and_deaths_are_not() -> None:
    backoff, now = RestartBackoff(), 0.0
    for _ in range(3 * KILLS_AN_HOUR):
        now = backoff.died(now)
    assert now <= 60.0 * 3 * KILLS_AN_HOUR
    backoff, now, starts = RestartBackoff(), 0.0, []
    for _ in range(3 * KILLS_AN_HOUR):
        backoff.killed(now)
        now = backoff.died(now)
        starts.append(now)
    for first, last in zip(starts, starts[KILLS_AN_HOUR:], strict=False):
        assert last - first >= 3600.0 - 120.0
