"""`nixl-tiers report URL`: what it says of a page of metrics, and of servers that have none."""

from __future__ import annotations

import io
import json
import re
import urllib.error
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Self

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nixl_tiers.base.metrics import METRICS
from nixl_tiers.cli import FAILED, OK, main, report
from nixl_tiers.cli.report import Scrapes
from nixl_tiers.cli.tally import BY_TIER, GAUGES, NEW, Tally

Serve = Callable[..., str]
LABELS = 'engine="0",model_name="m"'
GAUGES_OF_S3 = {"up": 1, "listing": 0, "breaker": 0, "denials": 0, "full": 0}


def page(scale: int = 1) -> str:
    lines = [
        "# HELP nixl_tiers:hit_tokens_total Tokens.",
        "# TYPE nixl_tiers:hit_tokens_total counter",
        f'nixl_tiers:hit_tokens_total{{{LABELS},tier="cpu"}} {30_000 * scale}',
        f'nixl_tiers:hit_tokens_total{{{LABELS},tier="s3"}} {4_000 * scale}',
        "# TYPE nixl_tiers:saved_prefill_seconds_total counter",
        f'nixl_tiers:saved_prefill_seconds_total{{{LABELS},tier="cpu"}} {90.5 * scale}',
        f'nixl_tiers:saved_prefill_seconds_total{{{LABELS},tier="s3"}} {10.0 * scale}',
        "# TYPE nixl_tiers:saved_first_token_seconds_total counter",
        f'nixl_tiers:saved_first_token_seconds_total{{{LABELS},tier="cpu"}} {80.0 * scale}',
        f'nixl_tiers:saved_first_token_seconds_total{{{LABELS},tier="s3"}} {2.0 * scale}',
        "# TYPE nixl_tiers:lost_seconds_total counter",
        f'nixl_tiers:lost_seconds_total{{{LABELS},reason="slower",tier="s3"}} {1.0 * scale}',
        f'nixl_tiers:lost_seconds_total{{{LABELS},reason="vain",tier="s3"}} {2.5 * scale}',
        "# TYPE nixl_tiers:misses_total counter",
        f'nixl_tiers:misses_total{{{LABELS},reason="never_stored",tier="none"}} {25 * scale}',
        f'nixl_tiers:misses_total{{{LABELS},reason="evicted",tier="s3"}} {75 * scale}',
        f'nixl_tiers:misses_total{{{LABELS},reason="late",tier="s3"}} 0',
        *(f'nixl_tiers:{name}{{{LABELS},tier="s3"}} {value}' for name, value in GAUGES_OF_S3.items()),
        f'nixl_tiers:used_bytes{{{LABELS},place="bucket",tier="s3"}} {1 << 40}',
        f'nixl_tiers:capacity_bytes{{{LABELS},place="bucket",tier="s3"}} {2 << 40}',
        f'nixl_tiers:used_bytes{{{LABELS},tier="cpu"}} {3 << 30}',
        f'nixl_tiers:capacity_bytes{{{LABELS},tier="cpu"}} {4 << 30}',
        f"vllm:prompt_tokens_total{{{LABELS}}} {68_000 * scale}",
        f"vllm:prefix_cache_hits_total{{{LABELS}}} {6_800 * scale}",
    ]
    return "\n".join(lines) + "\n"


class InOrder:
    """In place of the threads that ask several servers at once."""

    def __init__(self, most: int) -> None:
        self.map = map

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    servers: dict[str, tuple[list[str], int]] = {}

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        host, slash, path = url.removeprefix("http://").partition("/")
        if host not in servers:
            raise urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))
        left, status = servers[host]
        if status != 200 or slash + path != "/metrics":
            raise urllib.error.HTTPError(url, 404, "Not Found", Message(), None)
        return io.BytesIO((left.pop(0) if len(left) > 1 else left[0]).encode())

    def start(*texts: str, status: int = 200) -> str:
        """One text a scrape, the last one from then on."""
        host = f"s{len(servers)}:8000"
        servers[host] = [*texts], status
        return f"http://{host}"

    monkeypatch.setattr("nixl_tiers.cli.scrape.urllib.request.urlopen", urlopen)
    monkeypatch.setattr(report, "ThreadPoolExecutor", InOrder)
    return start


def test_report_says_what_was_saved_lost_and_missed(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", serve(page())]) == OK
    lines = said(capsys)
    evicted = "this tier's budget was too small: it was the last to hold it (s3)"
    assert lines[:3] == [
        "hit rate: 50.0% of 68,000 prompt tokens came from tiers, 10.0% from vLLM's own cache",
        "since start: 34,000 tokens and 100.5 s of prefill saved, first tokens 82.0 s earlier, 3.5 s lost",
        f"missed: 25 chunks of new prompts, 75 others, all because: {evicted}",
    ]
    assert "cpu up 3 GiB of 4 GiB 30,000 44.1% 0" in lines
    assert "s3 up 1 TiB of 2 TiB 4,000 5.9% 0" in lines
    assert "cpu 90.5 s 80.0 s 0.0 s 0.0 s" in lines
    assert "s3 10.0 s 2.0 s 1.0 s 2.5 s" in lines
    assert "all 100.5 s 82.0 s 1.0 s 2.5 s" in lines
    assert lines[-1] == "25 none new prompts: no tier is known to have held them"


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("gauges", "word"),
    [
        ({}, "up"),
        ({"up": 0, "breaker": 2}, "down"),
        ({"breaker": 1}, "circuit half-open"),
        ({"breaker": 2}, "circuit open"),
        ({"listing": 1}, "listing"),
        ({"denials": 2, "full": 1}, "up, requests denied"),
        ({"full": 1}, "up, full: evicts to store"),
    ],
)
def test_state_of_a_tier_is_said(
    gauges: dict[str, int], word: str, serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = serve(page())
    for name, value in gauges.items():
        monkeypatch.setitem(GAUGES_OF_S3, name, value)
    url = serve(page())
    assert main(["report", url]) == OK
    assert f"s3 {word} 1 TiB of 2 TiB 4,000 5.9% 0" in said(capsys)
    assert main(["report", healthy, url]) == OK
    both = f"up on 1; {word} at {url}" if gauges else "up"
    lines = said(capsys)
    assert f"s3 {both} 1 TiB of 2 TiB 8,000 5.9% 0" in lines, "a bucket that both use counts once"
    assert "cpu up 6 GiB of 8 GiB 60,000 44.1% 0" in lines


def test_every_name_of_a_metric_that_is_read_exists() -> None:
    """Or a renamed metric would be reported as 0."""
    for name, reason in BY_TIER.values():
        series = METRICS[name.removesuffix("_total")].series.values()
        assert any(one.values == ((reason,) if reason else ()) for one in series)
    assert set(GAUGES) <= METRICS.keys()
    assert any((*one.values, one.tier) == NEW for one in METRICS["misses"].series.values())


def test_servers_that_answer_are_reported_and_the_others_named(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["http://nobody:1", serve(page()), serve("not here", status=404), serve(page(2))]
    assert main(["report", *urls]) == FAILED
    output = capsys.readouterr()
    assert output.out.startswith("hit rate: 50.0% of 204,000 prompt tokens")
    dead, no_metrics = output.err.splitlines()
    assert dead.startswith(f"nixl-tiers: {urls[0]} does not answer: ")
    assert no_metrics.startswith(f"nixl-tiers: {urls[2]} has no metrics: ")
    assert main(["report", "--json", *urls]) == FAILED
    found = json.loads(capsys.readouterr().out)
    assert list(found["servers"]) == [urls[1], urls[3]]
    assert [sentence.split()[0] for sentence in found["failed"]] == [urls[0], urls[2]]


def test_report_since_an_earlier_one(serve: Serve, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grown, new, restarted = serve(page(), page(4)), serve(page(2)), serve(page(5), page(2))
    saved = tmp_path / "before.json"
    assert main(["report", "--json", grown, restarted]) == OK
    saved.write_text(capsys.readouterr().out)
    assert main(["report", "--since", str(saved), grown]) == OK
    lines = said(capsys)
    assert lines[0] == "hit rate: 50.0% of 204,000 prompt tokens came from tiers, 10.0% from vLLM's own cache"
    assert re.fullmatch(r"since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC: 102,000 tokens and 301.5 s of .*", lines[1])
    assert "cpu up 3 GiB of 4 GiB 90,000 44.1% 0" in lines, "what is now is no difference"
    assert main(["report", "--since", str(saved), "--json", grown, new, restarted]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == (3 + 2 + 2) * 68_000
    assert found["notes"] == [
        f"{new} was not there then: counted from its start",
        f"{restarted} has restarted: counted from its start",
    ]


@pytest.mark.parametrize(
    ("text", "status", "sentence"),
    [
        ("", 200, "is no vLLM server: none of its metrics is vLLM's"),
        ("<html>hello {</html>", 200, "is no vLLM server: what it shows are no metrics"),
        ("not here", 404, "has no metrics: it answers http://"),
        ("vllm:num_requests_running 3\n", 200, "is a vLLM server without nixl_tiers, or one that has not computed"),
    ],
)
def test_other_servers_are_one_sentence(
    serve: Serve, capsys: pytest.CaptureFixture[str], text: str, status: int, sentence: str
) -> None:
    assert main(["report", serve(text, status=status)]) == FAILED
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nixl-tiers: http://s0:8000 ")
    assert sentence in output.err
    assert output.err.count("\n") == 1


def server(tokens: int, started_s: float) -> Tally:
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_s}",
        'nixl_tiers:hit_tokens_total{engine="0",tier="cpu"} ' + str(tokens),
    ]
    page = text_string_to_metric_families("\n".join(lines) + "\n")
    return Tally.of("http://s", [sample for family in page for sample in family.samples])


def gained(before: Tally, now: Tally) -> tuple[float, list[str]]:
    total, notes = Scrapes(2.0, {"http://s": now}).gained(Scrapes(1.0, {"http://s": before}))
    return total.numbers()["tokens"], notes


def test_a_restart_is_known_by_when_the_server_started() -> None:
    """One that had counted more since than before looked like one that went on: 500 tokens were missing."""
    assert gained(server(500, 1000.0), server(800, 1000.0)) == (300, [])
    restarted = ["http://s has restarted: counted from its start"]
    assert gained(server(500, 1000.0), server(800, 2000.0)) == (800, restarted)
    assert gained(server(500, 1000.0), server(100, 2000.0)) == (100, restarted)
    kept = Scrapes(1.0, {"http://s": server(500, 1000.0)}).as_json()
    assert ["process_start_time_seconds", "cpu", "", 1000.0] in kept["servers"]["http://s"], "a file has it, too"
