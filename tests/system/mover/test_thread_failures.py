"""An unexpected error on any background thread: the tier is down with a sentence, and comes up again by itself.

Threads of a mover end it, whatever they do; so a new thread is safe without a test of its own here. The two that hold a
budget log the error and go on.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Key
from nixl_tiers.core.turn import Events
from nixl_tiers.store import TieredStore, open_with
from tests.mover.stub_tiers import FailingFileConfig, FailingS3Config
from tests.support.core import backlog
from tests.support.file_tier import file_tier
from tests.support.load import get, put
from tests.support.servers import S3Server
from tests.support.times import changed
from tests.support.waiting import until, until_up

SIZE = 60_000
KEYS: list[Key] = [b"key-%d" % number for number in range(8)]
CPU = {"type": "cpu", "capacity": 4 << 20}


@pytest.fixture(autouse=True)
def _levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nixl_tiers")


def is_down(caplog: pytest.LogCaptureFixture, reason: str) -> bool:
    return any(message.startswith("nixl_tiers: the") and reason in message for message in caplog.messages)


def serves(store: TieredStore) -> bool:
    """Whether the tier holds what is stored now."""
    until_up(store)
    put(store, KEYS)
    return store.flush(60) and None not in store.locate(KEYS)


# --- threads of movers ------------------------------------------------------------------------------------------------


def _ends(store: TieredStore, caplog: pytest.LogCaptureFixture, thread: str) -> None:
    reason = f"its mover ended with 1; its last lines: the thread {thread} failed: ZeroDivisionError"
    until(lambda: is_down(caplog, reason), "the sentence")
    assert serves(store)


def test_an_error_on_a_thread_of_a_file_tier_ends_its_mover(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It runs where the journal is lost."""
    tier = file_tier(tmp_path / "kv", 64 << 20, layout="slabs")
    with nixl_tiers.open({"tiers": [CPU, tier]}, SIZE, "n") as store:
        assert serves(store)
    for journal in (tmp_path / "kv").rglob("*journal*"):
        journal.unlink()
    kind = f"{FailingFileConfig.__module__}:{FailingFileConfig.__name__}"
    tier |= {"type": kind, "fails": "nixl_tiers.tiers.slab.slabs:SealScan._run", "failed": str(tmp_path / "failed")}
    with open_with(changed(ready_s=0.0), {"tiers": [CPU, tier]}, SIZE, "n") as store:
        put(store, KEYS)
        _ends(store, caplog, "seal-scan")


@pytest.fixture
def objects(
    moto: S3Server,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> dict[str, Any]:
    """Of an S3 tier on a prefix of its own."""
    s3_credentials(moto)
    return {"bucket": s3_bucket(moto), "endpoint": moto.endpoint, "prefix": s3_prefix, "capacity": 64 << 20}


def failing(objects: dict[str, Any], method: str, failed: Path) -> dict[str, Any]:
    return objects | {
        "type": f"{FailingS3Config.__module__}:{FailingS3Config.__name__}",
        "fails": method,
        "failed": failed,
    }


def test_budget_thread_of_an_s3_tier_goes_on_after_an_unexpected_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, objects: dict[str, Any]
) -> None:
    tier = failing(objects, "nixl_tiers.tiers.s3.budget:Budget._turn", tmp_path / "failed")
    numbers = itertools.count()
    with open_with(changed(ready_s=0.0), {"tiers": [CPU, tier]}, SIZE, "n") as store:

        def stores() -> bool:
            """The tier takes no rows without a record, and those that it did not take are not offered again."""
            put(store, [b"key-%d" % next(numbers)])
            return store.flush(60) and store.stats()["s3"]["rows"] > 0

        until(stores, "a row in the bucket")
        # A mover's log comes by another pipe than its reports, and may come later.
        until(lambda: "unexpected error (ZeroDivisionError)" in caplog.text, "the error in the log")
    messages = [message for message in caplog.messages if "unexpected error (ZeroDivisionError)" in message]
    assert len(messages) == 1
    assert "the budget of the prefix" in messages[0]
    assert not any("mover ended" in message for message in caplog.messages)


# --- the supervisor's thread, which applies what movers report --------------------------------------------------------

FAILED = "its mover is killed: the supervisor failed (ZeroDivisionError)"
NOT_APPLIED = "its mover is killed: its message could not be applied"
SUPERVISED: dict[str, tuple[type, str, str]] = {
    "a plan": (Events, "plan", FAILED),
    "the end of a job": (Events, "finished", NOT_APPLIED),
    "a death": (Events, "lost", "its mover ended with -9"),
}


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type, str], list[bool]]]:
    """Makes a method raise at its next call. The list says whether it has."""

    def plant(owner: type, name: str) -> list[bool]:
        original, failed = getattr(owner, name), list[bool]()

        def fail_once(*arguments: Any, **named: Any) -> Any:
            if not failed:
                failed.append(True)
                raise ZeroDivisionError
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, fail_once)
        return failed

    return plant


@pytest.mark.parametrize("what", SUPERVISED)
def test_an_error_on_the_supervisors_thread_ends_its_movers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails_once: Callable[[type, str], list[bool]], what: str
) -> None:
    owner, method, reason = SUPERVISED[what]
    tier = file_tier(tmp_path / "kv", 64 << 20)
    with nixl_tiers.open({"tiers": [CPU, tier], "wait_s": 600}, SIZE, "n") as store:
        assert serves(store)
        failed = fails_once(owner, method)
        if what == "a death":
            pid = store.coordinator.mover_pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        put(store, [b"another"])
        until(lambda: failed, "the error")
        until(lambda: is_down(caplog, reason), "the sentence")
        assert serves(store)
        assert get(store, KEYS) == ([True] * len(KEYS), [])  # no request waits for what has been lost
        assert backlog(store.coordinator) == 0
