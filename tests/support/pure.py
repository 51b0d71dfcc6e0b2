"""A plugin of pytest: the pure tree holds tests that cannot fail by chance, so none of its items starts a thread or a
process, connects a socket or sleeps. What an item does of that fails it, whatever the code under test catches."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

TESTS: Final = Path(__file__).parents[1]
ELSEWHERE: Final = (TESTS / "system", TESTS / "hardware")
"""Where tests may do all of that."""
MOST_SMOKE: Final = 40

_EVENTS: Final = {
    "subprocess.Popen": "a process",
    "os.fork": "a process",
    "os.forkpty": "a process",
    "os.posix_spawn": "a process",
    "socket.connect": "a connection",
}
_seen: list[str] | None = None  # while an item runs


class NotPureError(BaseException):
    """No `Exception`, so that what it interrupts does not take it for a failure that it expects."""


def _forbid(what: str) -> None:
    if _seen is not None:
        _seen.append(what)
        raise NotPureError(f"{what} in the pure tree: such tests stand in tests/system")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event in _EVENTS:
        _forbid(_EVENTS[event])


sys.addaudithook(_audit)

# Once and for all, before anything under test is imported: `from time import sleep` then binds this one.
_sleep, _start = time.sleep, threading.Thread.start


def _no_sleep(seconds: float, /) -> None:
    _forbid("time.sleep")
    _sleep(seconds)


def _no_start(thread: threading.Thread) -> None:
    _forbid(f"the thread {thread.name}")
    _start(thread)


time.sleep = _no_sleep  # type: ignore[assignment]
threading.Thread.start = _no_start  # type: ignore[assignment,method-assign]


def is_pure(item: pytest.Item) -> bool:
    """Whether it stands in the pure tree, and is none of those that need an engine or a device."""
    return not any(map(item.get_closest_marker, ("gpu", "gds", "vllm"))) and not any(
        place in item.path.parents for place in ELSEWHERE
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the items of the pure tree, which `make test` runs whole, and bounds what it runs of tests/system."""
    for item in items:
        if is_pure(item):
            item.add_marker(pytest.mark.pure)
    smoke = [item.nodeid for item in items if item.get_closest_marker("smoke")]
    if len(smoke) > MOST_SMOKE:
        raise pytest.UsageError(f"{len(smoke)} items are marked `smoke`, and `make test` has room for {MOST_SMOKE}")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    """What several tests share, such as a compiled library, may be made while the first of them runs."""
    global _seen  # noqa: PLW0603
    seen = _seen
    if fixturedef.scope != "function":
        _seen = None
    try:
        return (yield)
    finally:
        _seen = seen


@pytest.fixture(autouse=True)
def nothing_but_computing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Armed during an item, not while what a whole session shares is made."""
    global _seen  # noqa: PLW0603 - the hooks are the process's
    if not is_pure(request.node):
        yield
        return
    seen: list[str] = []
    _seen = seen
    try:
        yield
    finally:
        _seen = None
    assert not seen, f"not pure: {', '.join(dict.fromkeys(seen))}"


@pytest.fixture(autouse=True)
def look_without_a_child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine has for a configuration is looked at in this process."""
    if is_pure(request.node):
        from nixl_tiers.config.here import answer
        from nixl_tiers.runtime import here

        monkeypatch.setattr(here, "run", lambda raw, deadline_s, in_all_s: answer(raw))
