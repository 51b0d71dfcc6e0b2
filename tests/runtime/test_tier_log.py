"""The log of a tier: one line for each outage, however much flaps within it."""

from __future__ import annotations

import logging

import pytest

from nixl_tiers.core.member import Breaker
from nixl_tiers.core.types import Direction
from nixl_tiers.runtime.mover_status import MoverStatus, gauges
from nixl_tiers.runtime.tier_log import LINES, STEADY_S, TierLog
from tests.support.file_tier import file_config


@pytest.fixture
def caplog_info(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nixl_tiers")
    return caplog


@pytest.fixture
def tier() -> TierLog:
    return TierLog("s3", "s3://bucket/prefix", "10TiB", logging.getLogger("nixl_tiers.runtime.tier_log").log)


def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    tier: TierLog, caplog_info: pytest.LogCaptureFixture
) -> None:
    for now in range(100):
        tier.down("no route", float(now))
    tier.up(100.0)
    tier.up(101.0)
    assert caplog_info.messages == [
        "nixl_tiers: the s3 tier (s3://bucket/prefix, 10TiB) is down: no route",
        "nixl_tiers: the s3 tier is up again after 100 s",
    ]
    assert [record.levelname for record in caplog_info.records] == ["WARNING", "INFO"], "good news is no warning"


def test_a_crash_loop_is_one_outage(tier: TierLog, caplog_info: pytest.LogCaptureFixture) -> None:
    """A mover that comes up and dies with its first job, once a minute, for a day."""
    for minute in range(24 * 60):
        now = 60.0 * minute
        tier.down("its mover ended with -6", now)
        tier.up(now + 1)
        for second in range(2, 50):
            tier.watch({}, now + second)
    assert len(caplog_info.records) == 3  # down, up again, down again
    end = 60.0 * 24 * 60
    tier.watch({}, end + STEADY_S)
    assert caplog_info.messages[-1].startswith("nixl_tiers: the s3 tier is up again after")


def test_an_open_circuit_is_logged_once(tier: TierLog, caplog_info: pytest.LogCaptureFixture) -> None:
    breakers = {way: Breaker() for way in Direction}
    load = breakers[Direction.LOAD]
    load.trip(0.0)
    for now in range(1000):
        load.watch(float(now))
        tier.watch(breakers, float(now))
        if load.wants_probe:
            load.end_probe(load.begin_probe(), False, float(now))
        tier.watch(breakers, float(now))
    assert len(caplog_info.records) == 1
    assert "loads from the s3 tier fail" in caplog_info.text
    while not load.closed:
        now += 1
        load.watch(float(now))
        if load.wants_probe:
            load.end_probe(load.begin_probe(), True, float(now))
        tier.watch(breakers, float(now))
    assert [record.message.split(" after")[0] for record in caplog_info.records][1:] == [
        "nixl_tiers: loads from the s3 tier work again"
    ]


def test_circuits_opened_by_a_dead_mover_are_not_logged(tier: TierLog, caplog_info: pytest.LogCaptureFixture) -> None:
    breakers = {way: Breaker() for way in Direction}
    tier.down("its mover is killed", 0.0)
    for breaker in breakers.values():
        breaker.trip(0.0)
    tier.watch(breakers, 0.0)
    tier.up(0.5)
    assert len(caplog_info.records) == 2
    now = 0.5
    while breakers[Direction.STORE].episode == 1:  # it is up, and still its stores fail
        now += 0.5
        for breaker in breakers.values():
            breaker.watch(now)
            if breaker.wants_probe:
                breaker.end_probe(breaker.begin_probe(), breaker is breakers[Direction.LOAD], now)
        tier.watch(breakers, now)
    assert len(caplog_info.records) == 3
    assert "stores to the s3 tier fail" in caplog_info.messages[-1]


@pytest.mark.parametrize(
    ("kinds", "refusal", "shown", "over"),
    [
        ({"full"}, "", (0, 1), "what it stores may grow again"),
        ({"put"}, "denied", (1, 0), "put is no longer denied"),
        ({"unreachable"}, "unreachable", (0, 0), "rows are stored again"),
        ({"put", "unreachable", "full"}, "denied", (1, 1), "put is no longer denied"),
    ],
)
def test_full_denied_and_unreachable_are_three_things(
    kinds: set[str], refusal: str, shown: tuple[int, int], over: str, caplog_info: pytest.LogCaptureFixture
) -> None:
    """A disk that is full was one of "requests denied", with a line that it is no longer denied."""
    config = file_config("/kv", "1GiB")
    status = MoverStatus("file", "file", config, logging.getLogger("nixl_tiers.runtime.tier_log").log)
    status.log.denied({kind: f"it is {kind}" for kind in kinds})
    assert status.log.refusal == refusal
    assert (gauges([status])["denials"], gauges([status])["full"]) == shown
    status.log.denied({})
    assert f"nixl_tiers: the file tier: {over}" in caplog_info.messages
    assert status.log.refusal == ""


def test_a_restart_loop_does_not_repeat_log_lines(tier: TierLog, caplog_info: pytest.LogCaptureFixture) -> None:
    for now in range(50):
        tier.line(logging.ERROR, "the mover failed | ZeroDivisionError")
        tier.down("its mover ended with 1", float(now))
    tier.up(50.0)
    assert len(caplog_info.records) == 3
    tier.line(logging.ERROR, "the mover failed | ZeroDivisionError")
    assert len(caplog_info.records) == 4
    for number in range(3 * LINES):
        tier.line(logging.INFO, str(number))
    assert len(tier._lines) == LINES
