"""The mover process: its messages, heartbeat and back-pressure, and that it always exits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory.address_space import AddressSpace
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import (
    CheckExistence,
    Down,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    Load,
    Open,
    Opened,
    Refused,
    Stop,
    Store,
)
from nixl_tiers.tiers.base import Entry, Move
from tests.mover.harness import NAMESPACE, MoverProcess, has_exited, key_of, wait_until
from tests.support.file_tier import file_tier
from tests.support.times import changed

GEOMETRY = Geometry(1, 60_000)


def stub(name: str, tmp_path: Path, times: Times = PRODUCTION) -> MoverProcess:
    tier: dict[str, object] = {
        "type": "tests.mover.stub_tiers:StubConfig",
        "stub": name,
        "closed": str(tmp_path / "closed"),
        "wake": str(tmp_path / "wake"),
    }
    return MoverProcess(tier, GEOMETRY, 8, times=times)


def test_the_region_is_mapped_before_the_first_row_moves(tmp_path: Path) -> None:
    with stub("InstantTier", tmp_path) as mover:
        assert mover.open() == 100
        assert mover.region.prefault().wait(120)
        smaps = Path(f"/proc/{mover.process.pid}/smaps")

        def mapped_kib() -> int:
            lines = iter(smaps.read_text().splitlines())
            region = next(line for line in lines if "memfd:nixl_tiers" in line)
            assert region
            return int(next(line for line in lines if line.startswith("Rss:")).split()[1])

        assert wait_until(lambda: mapped_kib() << 10 >= mover.region.nbytes)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_custom_tier_is_loaded_by_name_and_closed_at_stop(tmp_path: Path) -> None:
    with stub("InstantTier", tmp_path) as mover:
        assert mover.open() == 100
        assert mover.listed_rows() == [Entry(1, b"one", 1)]
        assert mover.store(range(3)) == [Outcome.OK] * 3
        beat = mover.expect(lambda m: isinstance(m, Heartbeat))
        assert isinstance(beat, Heartbeat)
        assert beat.used_bytes == 42
        mover.stop()
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("kind", ["nowhere.to.be:Found", "tests.mover.stub_tiers:Missing", "fiel"])
def test_an_unknown_tier_type_is_refused(tmp_path: Path, kind: str) -> None:
    with MoverProcess({"type": kind}, GEOMETRY, 8) as mover:
        refused = mover.expect(lambda m: isinstance(m, Refused))
        assert isinstance(refused, Refused)
        assert kind in refused.reason
        assert mover.process.wait(120) == 0


def test_a_refusing_tier_is_reported_and_the_mover_exits(tmp_path: Path) -> None:
    with stub("RefusingTier", tmp_path) as mover:
        mover.send(Open(NAMESPACE, 0))
        assert mover.expect(lambda m: isinstance(m, Refused)) == Refused("bucket: there is no such thing")
        assert mover.process.wait(120) == 0


def test_a_tier_that_is_down_is_retried_and_the_loop_never_blocks_on_it(tmp_path: Path) -> None:
    with stub("SlowToOpen", tmp_path) as mover:
        mover.send(Open(NAMESPACE, 3))
        assert mover.expect(lambda m: isinstance(m, Down)) == Down("the medium sleeps", 3)
        assert mover.store(range(2)) == [Outcome.FAILED] * 2
        for _ in range(4):  # the second attempt hangs meanwhile
            mover.expect(lambda m: isinstance(m, Heartbeat))
        assert mover.store(range(2)) == [Outcome.FAILED] * 2
        (tmp_path / "wake").touch()
        assert mover.expect(lambda m: isinstance(m, Opened)) == Opened(3, 7)
        assert mover.store(range(2)) == [Outcome.OK] * 2


def test_heartbeats_and_messages_do_not_wait_for_the_next_poll_of_a_busy_tier(tmp_path: Path) -> None:
    with stub("NeedsNoPolls", tmp_path) as mover:
        mover.open()
        mover.begin(Store, [Move(0, 0, key_of(0))])
        for number in range(3):
            mover.expect(lambda m: isinstance(m, Heartbeat))
            mover.send(CheckExistence(number, [key_of(1)], chain=False))
            assert mover.expect(lambda m: isinstance(m, ExistenceChecked)) == ExistenceChecked(number, [])


def test_open_waits_for_earlier_jobs(tmp_path: Path) -> None:
    """After a reset: the old epoch's jobs end before the new one is served."""
    with MoverProcess(file_tier(tmp_path, 64 << 20), Geometry(1, 2 << 20), 8) as mover:
        mover.open()
        mover.listed_rows()
        job = mover.begin(Store, [Move(n, n, key_of(n), seal=True) for n in range(8)])
        mover.send(Open(bytes(16), 1))
        first = mover.expect(lambda m: isinstance(m, (Finished, Opened)))
        assert isinstance(first, Finished)
        assert (first.job, set(first.outcomes)) == (job, {Outcome.OK})
        assert isinstance(mover.expect(lambda m: isinstance(m, (Finished, Opened))), Opened)
        assert set(mover.load(range(8))) == {Outcome.MISSING}


def test_an_exception_of_a_tier_is_logged_and_ends_the_process(tmp_path: Path) -> None:
    with stub("CrashingTier", tmp_path) as mover:
        mover.open()
        mover.begin(Store, [Move(0, 0, key_of(0))])
        assert mover.process.wait(120) == 1
        log = mover.log()
        assert "ZeroDivisionError" in log
        assert all(line.startswith("nixl_tiers mover[") for line in log.splitlines())


# --- sockets ----------------------------------------------------------------------------------------------------------


def test_a_coordinator_that_does_not_read_loses_no_result(tmp_path: Path) -> None:
    enough = 200_000  # no kernel's socket buffers hold the answers to so many
    halted = threading.Event()
    with stub("InstantTier", tmp_path) as mover:
        mover.open()
        mover.listed_rows()
        moves = [Move(0, slot, key_of(slot)) for slot in range(200)]

        def send() -> None:
            while not halted.is_set() and mover._jobs < enough:
                mover.begin(Load, moves)

        sender = threading.Thread(target=send)
        sender.start()
        # Back-pressure: the mover reads no more than it can answer, so the sender blocks while none is read.
        assert wait_until(lambda: mover._jobs > 0 and _sender_halted(mover))
        jobs = mover._jobs
        assert jobs < enough
        halted.set()
        seen = [mover.expect(lambda m: isinstance(m, Finished)) for _ in range(jobs)]
        sender.join()
        seen += [mover.expect(lambda m: isinstance(m, Finished)) for _ in range(mover._jobs - jobs)]
        assert [message.job for message in seen if isinstance(message, Finished)] == list(range(1, mover._jobs + 1))
        assert all(isinstance(message, Finished) and len(message.outcomes) == 200 for message in seen)


def _sender_halted(mover: MoverProcess) -> bool:
    before = mover._jobs
    time.sleep(0.3)
    return mover._jobs == before


def test_a_stopped_mover_continues_when_resumed(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 8) as mover:
        mover.open()
        mover.process.send_signal(signal.SIGSTOP)
        jobs = [mover.begin(Store, [Move(0, slot, key_of(slot), seal=True)]) for slot in range(60)]
        mover.process.send_signal(signal.SIGCONT)
        for job in jobs:
            assert mover.finished(job) == [Outcome.OK]


def test_listings_do_not_delay_jobs(tmp_path: Path) -> None:
    rows = 1500
    small = Geometry(1, 2000)
    with MoverProcess(file_tier(tmp_path, 32 << 20), small, 250) as mover:
        mover.open()
        for start in range(0, rows, 250):
            mover.store(range(start, start + 250))
        mover.stop()
    with MoverProcess(file_tier(tmp_path, 32 << 20), small, 250) as mover:
        mover.send(Open(NAMESPACE, 0))
        assert set(mover.load(range(8))) <= {Outcome.OK, Outcome.FAILED}  # FAILED: it came before the tier was open
        entries = mover.listed_rows()
        assert [entry.slot for entry in entries] == list(range(rows))
        assert set(mover.load(range(1250, 1500))) == {Outcome.OK}


def test_heartbeats_are_sent_while_busy_and_while_idle(tmp_path: Path) -> None:
    with stub("NeverFinishes", tmp_path) as mover:
        mover.open()
        for _ in range(2):
            assert isinstance(mover.expect(lambda m: isinstance(m, Heartbeat)), Heartbeat)
        mover.begin(Store, [Move(0, 0, key_of(0))])
        for _ in range(2):
            assert isinstance(mover.expect(lambda m: isinstance(m, Heartbeat)), Heartbeat)


# --- exit -------------------------------------------------------------------------------------------------------------


def test_sigint_is_ignored(tmp_path: Path) -> None:
    with stub("InstantTier", tmp_path) as mover:
        mover.open()
        mover.process.send_signal(signal.SIGINT)
        assert mover.store(range(2)) == [Outcome.OK] * 2


@pytest.mark.parametrize("end", ["sigterm", "hang up", "stop"])
def test_it_exits_when_asked_and_keeps_stored_rows(tmp_path: Path, end: str) -> None:
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 8) as mover:
        mover.open()
        assert set(mover.store(range(8))) == {Outcome.OK}
        if end == "sigterm":
            mover.process.send_signal(signal.SIGTERM)
        elif end == "hang up":
            mover.socket.close()
        else:
            mover.send(Stop())
        assert mover.process.wait(120) == 0
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 8) as mover:
        mover.open()
        assert len(mover.listed_rows()) == 8


def test_it_exits_though_a_transfer_never_ends(tmp_path: Path) -> None:
    with stub("NeverFinishes", tmp_path) as mover:
        mover.open()
        mover.begin(Store, [Move(0, 0, key_of(0))])
        mover.socket.close()
        assert mover.process.wait(120) == 0


@pytest.mark.parametrize("moment", ["while busy", "at close"])
def test_the_watchdog_ends_an_orphan_whose_call_never_returns(tmp_path: Path, moment: str) -> None:
    with stub("HangsWithInterpreterLock", tmp_path, changed(watchdog_s=2.0)) as mover:
        mover.open()
        if moment == "while busy":
            mover.begin(Store, [Move(0, 0, key_of(0))])
            assert wait_until((tmp_path / "wake").exists)
        mover.socket.close()
        assert mover.process.wait(120) == -signal.SIGALRM


def test_the_watchdog_spares_a_process_that_was_stopped(tmp_path: Path) -> None:
    with stub("InstantTier", tmp_path, changed(watchdog_s=1.5)) as mover:
        mover.open()
        for _ in range(2):  # so that the short timeout is in force; and it survives every time
            before = mover.heartbeats
            while mover.heartbeats < before + 3:
                mover.expect(lambda m: isinstance(m, Heartbeat))
            os.kill(mover.process.pid, signal.SIGSTOP)
            time.sleep(2.5)  # longer than the timeout
            os.kill(mover.process.pid, signal.SIGCONT)
        assert mover.store(range(2)) == [Outcome.OK] * 2


PARENT = """
    import os, sys, time
    from pathlib import Path
    from nixl_tiers.base.chunk import Geometry
    from tests.mover.harness import MoverProcess
    from tests.support.file_tier import file_tier

    mover = MoverProcess(file_tier(Path(sys.argv[1]), 16 << 20), Geometry(1, 60_000), 8)
    mover.open()
    mover.store(range(8))
    child = os.fork()
    if child:
        print(mover.process.pid, child, flush=True)
    time.sleep(600)
"""


def test_it_exits_when_the_parent_is_killed_though_a_child_of_it_holds_the_socket(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    pid, child = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait()
        assert wait_until(lambda: has_exited(pid))
        assert not has_exited(child)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 8) as mover:
        mover.open()
        assert len(mover.listed_rows()) == 8


def test_it_exits_at_start_if_the_parent_is_dead() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, HostRegion.create(GEOMETRY, 2) as region:
        command = [sys.executable, "-m", "nixl_tiers.mover", "--tier", "one", "--parent", str(parent.pid)]
        memory = AddressSpace()
        command += ["--socket", str(theirs.fileno()), "--region", str(region.fd), "--mark", str(memory.fd)]
        root = Path(__file__).parents[3]
        subprocess.run(command, pass_fds=(theirs.fileno(), region.fd, memory.fd), cwd=root, timeout=120, check=True)
        memory.close()


def test_a_full_batch_of_entries_fits_a_packet() -> None:
    from nixl_tiers.base.chunk import MAX_KEY_BYTES
    from nixl_tiers.mover.protocol import MAX_PACKET, MAX_TOUCHED, Touch, encode
    from nixl_tiers.tiers.base import MAX_ENTRIES

    entries = [Entry(2**40, bytes(MAX_KEY_BYTES), 2**60)] * MAX_ENTRIES
    assert len(encode(Listed(2**60, entries, last=False))) <= MAX_PACKET
    assert len(encode(Touch([(2**32 - 1, 2**62)] * MAX_TOUCHED))) <= MAX_PACKET
