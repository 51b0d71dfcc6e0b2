"""The trial that decides whether rows are staged, on a clock of the test's own."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from nixl_tiers.tiers import staging_trial
from nixl_tiers.tiers.staging_trial import WINDOWS, Measured, Trial, all_remembered, recall, remember

UNIT_BYTES = 8 << 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(trial: Trial, direct_s: float, staged_s: float, *, running: int = 4, pause_s: float = 0.0) -> float:
    """Units one after the other through a disk that takes so long for each, with `running` submitted at a time;
    returns how long that took."""
    now, ways = 0.0, deque[bool]()
    for _ in range(100_000):
        while len(ways) < running:
            ways.append(trial.begin(now))
        staged = ways.popleft()
        now += staged_s if staged else direct_s
        trial.end(now, UNIT_BYTES, staged=staged)
        if trial.over:
            return now
        if pause_s:
            while ways:  # a burst has ended
                staged = ways.popleft()
                now += staged_s if staged else direct_s
                trial.end(now, UNIT_BYTES, staged=staged)
            now += pause_s
    raise AssertionError("it never ends")


@pytest.mark.parametrize("running", [1, 4, 16])
@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_rates_are_those_of_each_way(running: int, pause_s: float) -> None:
    trial = Trial()
    run(trial, 0.004, 0.002, running=running, pause_s=pause_s)
    measured = trial.measured("loads", Path("/kv"), 4096)
    assert measured.direct == pytest.approx(UNIT_BYTES / 0.004, rel=0.01)
    assert measured.staged == pytest.approx(UNIT_BYTES / 0.002, rel=0.01)
    assert measured.pays


@pytest.mark.parametrize(("staged_s", "pays"), [(0.0102 / 1.1, False), (0.0098 / 1.1, True), (0.02, False)])
def test_gain_of_less_than_a_tenth_does_not_pay(staged_s: float, pays: bool) -> None:
    trial = Trial()
    run(trial, 0.01, staged_s)
    assert trial.measured("loads", Path("/kv"), 4096).pays is pays


def test_half_of_the_time_is_spent_each_way_and_seconds_are_enough() -> None:
    trial = Trial()
    seconds = run(trial, 0.003, 0.003)
    assert 2 * WINDOWS * staging_trial.WINDOW_S <= seconds < 5
    assert {len(rates) for rates in trial.rates.values()} == {WINDOWS}


def test_failed_units_do_not_count() -> None:
    """Neither their time, nor their bytes: a fast failure must not look like a fast disk, nor a timeout like a slow
    one."""
    trial, now = Trial(), 0.0
    while not trial.over:
        for nbytes, seconds in ((0, 1.0), (UNIT_BYTES, 0.01)):
            staged = trial.begin(now)
            now += seconds
            trial.end(now, nbytes, staged=staged)
    assert trial.measured("loads", Path("/kv"), 4096).direct == pytest.approx(UNIT_BYTES / 0.01, rel=0.01)


def test_one_slow_window_does_not_decide() -> None:
    trial = Trial()
    trial.begin(0.0)
    trial.end(60.0, staging_trial.WINDOW_BYTES, staged=False)
    run(trial, 0.01, 0.01)
    assert not trial.measured("loads", Path("/kv"), 4096).pays


def test_choice_is_remembered_by_direction_device_and_row_size(cache: Path, tmp_path: Path) -> None:
    there = Measured("loads", str(tmp_path), 4096, 1e9, 2e9)
    remember(there)
    assert recall("loads", tmp_path, 4096) == there
    assert recall("stores", tmp_path, 4096) is None
    assert recall("loads", tmp_path, 8192) is None
    assert recall("loads", Path("/proc"), 4096) is None
    assert all_remembered() == [there]
    expected = f"loads of rows of 4096 bytes, {tmp_path}: 2.00 GB/s staged, 1.00 GB/s direct; they are staged"
    assert str(there) == expected


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"direction": "loads"}'])
def test_damaged_choice_is_measured_again(cache: Path, tmp_path: Path, text: str) -> None:
    remember(Measured("loads", str(tmp_path), 4096, 1e9, 2e9))
    (file,) = cache.glob("*/staging-*.json")
    file.write_text(text)
    assert recall("loads", tmp_path, 4096) is None
    assert all_remembered() == []


def test_nothing_is_remembered_without_a_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured("loads", str(tmp_path), 4096, 1e9, 2e9)
    monkeypatch.setattr(staging_trial, "cache_folder", lambda: None)
    remember(measured)
    assert recall("loads", tmp_path, 4096) is None
    monkeypatch.setattr(staging_trial, "cache_folder", lambda: tmp_path / "file" / "below")
    (tmp_path / "file").touch()
    remember(measured)  # the directory cannot be made
    assert recall("loads", tmp_path, 4096) is None
    assert recall("loads", tmp_path / "missing", 4096) is None
