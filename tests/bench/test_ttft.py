"""What bench.ttft makes of its answers, and how it times a connector, without vLLM."""

from __future__ import annotations

import threading

import pytest

from bench.connector_time import ConnectorTime
from bench.ttft import Found, by_start, print_tables


class Clocked:
    """A connector, and the time that its calls take."""

    now_s = 0.0

    def look_up(self) -> str:
        self.now_s += 1.0
        self.build()
        return "hit"

    def build(self) -> None:
        self.now_s += 2.0
        self.sleep()

    def sleep(self) -> None:
        self.now_s += 8.0


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    clocked = Clocked()
    monkeypatch.setattr("bench.connector_time.time.perf_counter", lambda: clocked.now_s)
    return clocked


def test_a_call_within_a_call_is_counted_once_and_sleep_is_not(connector: Clocked) -> None:
    timed = ConnectorTime([connector], ["look_up", "build", "absent"], [(connector, "sleep")])
    assert connector.look_up() == "hit"
    connector.build()
    connector.sleep()  # not in a call of the connector
    assert timed.waiting_s == 16.0
    assert timed.take_ms() == {"look_up": 3000.0, "build": 2000.0}
    assert timed.take_ms() == {}


def test_only_the_engines_thread_is_timed(connector: Clocked) -> None:
    timed = ConnectorTime([connector], ["build"])
    other = threading.Thread(target=connector.build)
    other.start()
    other.join()
    assert timed.take_ms() == {}


def test_figures_are_medians_of_starts_and_each_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [{"start": start, "token_ms": ms, "thread_ms": {}} for start, ms in ((0, 1), (0, 3), (0, 50), (1, 7))]
    assert by_start(turns, lambda turn: turn["token_ms"]) == [3, 7]
    found = Found.nothing(["plain"])
    found.decoded["plain"] += turns
    for rate, start in ((10.0, 0), (20.0, 1)):
        times = [1 / rate, 2 / rate]
        found.fresh["plain"].append({"start": start, "ended_s": times, "begun_s": 0.1, "thread_s": {}})
    found.answers["plain"]["cold"] = [
        {
            "start": start,
            "ttft_s": ttft_s,
            "total_s": 1.0,
            "logprob_difference": 0.0,
            "same_tokens": True,
            "compared_with": "itself",
            "connector_ms": {"a": 1.5, "b": 4.0},
            "connector_metric_ms": {"scheduler": 4.5, "worker": 1.0},
            "steps": 2,
            "cached_tokens": 0,
        }
        for start, ttft_s in ((0, 0.2), (1, 0.4))
    ]
    found.batches["plain"] = [{"start": start, "seconds": 1.0, "cached_tokens": 5} for start in (0, 0, 0, 1, 1, 1)]
    print_tables(found, batch_turns=3)
    printed = capsys.readouterr().out
    assert printed.count("same run, 2 starts of each engine") == 4
    assert "| plain | 5.00 (3.00 to 7.00) |  |" in printed
    assert "| plain | 15.00 (10.00 to 20.00) | 1.000 (1.000 to 1.000) |" in printed
    assert "| plain | cold | 0.3000 (0.2000 to 0.4000) |" in printed
    assert "| 5.50 (5.50 to 5.50): b 4.00, a 1.50 | 2 | 0 |" in printed
