"""Slab tiers whose threads and clock are the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_movers import Clock
from tests.support.hooked import build
from tests.tiers.slab.stepped import SteppedSlabs, Threads


@pytest.fixture(scope="package")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("hooked"), "hooked_worker")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Threads:
    return Threads(monkeypatch, clock)


@pytest.fixture
def make(threads: Threads, clock: Clock, tmp_path: Path) -> Iterator[Callable[..., SteppedSlabs]]:
    made: list[SteppedSlabs] = []

    def make(path: Path = tmp_path / "kv", **fields: Any) -> SteppedSlabs:
        made.append(SteppedSlabs(path, clock, **fields))
        return made[-1]

    yield make
    for pool in threads.pools.values():  # a close waits for what runs
        pool.at_once = True
        pool.run()
    for each in made:
        each.close()
