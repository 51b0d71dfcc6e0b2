"""An unexpected error on the supervisor's thread: the tier is down with a sentence, and comes up again by itself."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Key
from nixl_tiers.core.turn import Events
from nixl_tiers.store import TieredStore
from tests.support.core import backlog
from tests.support.file_tier import file_tier
from tests.support.load import get, put
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


FAILED = "its mover is killed: the supervisor failed (ZeroDivisionError)"
NOT_APPLIED = "its mover is killed: its message could not be applied"
SUPERVISED: dict[str, tuple[type, str, str]] = {
    "a plan": (Events, "plan", FAILED),
    "the end of a job": (Events, "finished", NOT_APPLIED),
    "a death": (Events, "lost", "its mover ended with -9"),
}


@pytest.mark.parametrize("what", SUPERVISED)
def test_an_error_on_the_supervisors_thread_ends_its_movers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    owner, method, reason = SUPERVISED[what]
    original, failed = getattr(owner, method), list[bool]()

    def fail_once(*arguments: Any, **named: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError
        return original(*arguments, **named)

    tier = file_tier(tmp_path / "kv", 64 << 20)
    with nixl_tiers.open({"tiers": [CPU, tier], "wait_s": 600}, SIZE, "n") as store:
        assert serves(store)
        monkeypatch.setattr(owner, method, fail_once)
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
