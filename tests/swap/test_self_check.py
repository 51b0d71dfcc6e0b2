"""Choosing a copy strategy and checking it, on the fake driver, which moves real bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.swap import kernels, self_check, submit
from nixl_tiers.swap.driver import Device, Driver
from nixl_tiers.swap.kernels import Kernels
from nixl_tiers.swap.pinned import PinnedRegion
from nixl_tiers.swap.plan import CopyPlan, Share
from nixl_tiers.swap.self_check import choose
from nixl_tiers.swap.strategies import BATCHES
from tests.swap.fake_gpu import FakeGpu, leftovers
from tests.swap.scenario import CopyScenario, assert_same, scenario_of


def scenario() -> CopyScenario:
    return scenario_of(np.random.default_rng(1), [[2048] * 4, [16] * 2], blocks=40, rows=20, sub_blocks=3, gap=16)


@contextmanager
def parts(fake: FakeGpu, here: CopyScenario) -> Iterator[tuple[Device, PinnedRegion, Kernels | None]]:
    with ExitStack() as undo:
        device = Device(fake.driver, 0)
        undo.callback(device.close)
        loaded = kernels.load(device)
        pinned = PinnedRegion(device, here.plan)
        pinned.lock_first(here.plan.rows)
        undo.callback(pinned.release)
        yield device, pinned, loaded
        undo.close()
        assert [left for left in leftovers(fake) if "modules" not in left] == []


@pytest.fixture
def start(fake_library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("here", lambda: b"image\0")]))
    monkeypatch.delenv(self_check.ENVIRONMENT, raising=False)
    monkeypatch.setattr(self_check, "SAMPLE_BYTES", 1 << 20)

    def make(here: CopyScenario, version: int = 13000) -> FakeGpu:
        fake = FakeGpu(fake_library, 1, version)
        fake.own(here)
        return fake

    return make


def test_the_strategy_is_checked_and_the_region_restored(start: Callable[..., FakeGpu]) -> None:
    here = scenario()
    fake = start(here)
    region, memory = here.region.copy(), [tensor.copy() for tensor in here.memory]
    with parts(fake, here) as (device, pinned, loaded):
        assert choose(device, here.plan, pinned, loaded, here.plan.rows) == ("staged", "staged")
    assert fake.calls("cuLaunchKernel") == 4, "each group, both ways"
    assert_same(here.region, region, "region")
    for tensor, wanted in zip(here.memory, memory, strict=True):
        assert_same(tensor, wanted, "the engine's memory")
    fake.check()


def test_a_rank_without_a_row_to_try_starts_with_the_copy_engine(start: Callable[..., FakeGpu]) -> None:
    """There are fewer rows than ranks that share a cell; it writes none, and may not touch the others'."""
    here = scenario_of(np.random.default_rng(1), [[2048] * 4], blocks=40, rows=3)
    here.plan.share = Share.of(3, 4)
    fake = start(here)
    before = here.region.copy()
    with parts(fake, here) as (device, pinned, loaded):
        assert choose(device, here.plan, pinned, loaded, here.plan.rows) == ("copy_engine",)
    assert_same(here.region, before, "region")
    fake.check()


def test_a_rank_tries_only_the_rows_of_its_turn(start: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another may be trying its own at the same time."""
    here = scenario()
    here.plan.share = Share.of(1, 2)
    fake, tried = start(here), list[int]()
    pairs = CopyPlan.pairs
    monkeypatch.setattr(CopyPlan, "pairs", lambda *how: (tried.extend(how[3] // 3), pairs(*how))[1])
    with parts(fake, here) as (device, pinned, loaded):
        assert choose(device, here.plan, pinned, loaded, here.plan.rows) == ("staged", "staged")
    assert tried
    assert all(row % 2 == 1 for row in tried)


def test_a_strategy_that_copies_wrong_bytes_is_not_used(
    start: Callable[..., FakeGpu], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the kernels think that tiles are of half their size, so that they leave out the second half of each row."""
    monkeypatch.setattr(submit, "first_parts", lambda parts: np.zeros(1, np.uint32))
    here = scenario()
    fake = start(here)
    with caplog.at_level(logging.WARNING), parts(fake, here) as (device, pinned, loaded):
        chosen = choose(device, here.plan, pinned, loaded, here.plan.rows)
    assert chosen == ("copy_engine", "copy_engine")
    assert "the copy strategy staged is not used: stores of 60 blocks by staged moved wrong bytes" in caplog.text


def test_large_pages_are_for_the_copy_engine(start: Callable[..., FakeGpu]) -> None:
    here = scenario_of(np.random.default_rng(1), [[512 << 10], [4096] * 2], blocks=4, rows=4)
    fake = start(here)
    with parts(fake, here) as (device, pinned, loaded):
        assert choose(device, here.plan, pinned, loaded, here.plan.rows) == ("copy_engine", "staged")
        assert choose(device, here.plan, pinned, None, here.plan.rows) == ("copy_engine", "copy_engine")


@pytest.mark.parametrize(
    ("setting", "capability", "batches"), [("auto", (10, 0), False), ("off", (9, 0), False), ("on", (10, 0), True)]
)
def test_blackwell_copies_all_pages_staged_and_without_batches(
    start: Callable[..., FakeGpu],
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    capability: tuple[int, int],
    batches: bool,
) -> None:
    """Its driver was seen to hang on repeated batches. The environment turns them off and on."""
    here = scenario_of(np.random.default_rng(1), [[512 << 10], [4096] * 2], blocks=4, rows=4)
    fake = start(here)
    monkeypatch.setattr(Driver, "capability", lambda *_: capability)
    monkeypatch.setenv(BATCHES, setting)
    with parts(fake, here) as (device, pinned, loaded):
        chosen = choose(device, here.plan, pinned, loaded, here.plan.rows)
    assert chosen == ("staged" if capability >= (10, 0) else "copy_engine", "staged")
    assert (fake.calls("cuMemcpyBatchAsync") > 0) is batches
    assert (fake.calls("cuMemcpyAsync") > 0) is not batches
