"""`nixl-tiers report URL`: what it says of a page of metrics, and of servers that have none."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("prometheus_client")

from nixl_tiers.cli import BAD_INPUT, FAILED, OK, main
from nixl_tiers.cli.report import OTHER_NAMESPACES

Serve = Callable[..., str]
LABELS = 'engine="0",model_name="m"'


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
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{LABELS}}} 3",
    ]
    return "\n".join(lines) + "\n"


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[http.server.HTTPServer] = []

    def start(text: str, status: int = 200) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None: ...

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_seconds_that_are_not_known_yet_are_not_called_zero(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    text = f'nixl_tiers:hit_tokens_total{{{LABELS},tier="file"}} 1664\n'
    assert main(["report", serve(text)]) == OK
    (sentence, *_) = capsys.readouterr().out.splitlines()
    assert sentence.startswith("since start: 1,664 tokens saved (seconds count from when a few prompts were computed")


def test_report_says_what_was_saved_lost_and_missed(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", serve(page())]) == OK
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == (
        "since start: 34,000 tokens and 100.5 s of prefill saved, first tokens 82.0 s earlier, 3.5 s lost, "
        "most misses (75 of 100) because: this tier's budget was too small: it was the last to hold it (s3)"
    )
    assert "cpu 30,000 90.5 s 80.0 s 0.0 s 0.0 s" in lines
    assert "s3 4,000 10.0 s 2.0 s 1.0 s 2.5 s" in lines
    assert "all 34,000 100.5 s 82.0 s 1.0 s 2.5 s" in lines
    assert "25 none no tier is known to have held it recently" in lines
    assert lines[-1] == OTHER_NAMESPACES


def test_report_says_what_was_not_stored(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """With `store: adaptive`."""
    more = "\n".join(
        f"# TYPE nixl_tiers:{name}_chunks_total counter\nnixl_tiers:{name}_chunks_total{{{LABELS}}} {count}"
        for name, count in (("not_stored", 1200), ("computed_again", 30))
    )
    assert main(["report", serve(page() + more + "\n")]) == OK
    assert (
        "not stored, as too few come back: 1,200 chunks, of which 30 had to be computed again"
        in capsys.readouterr().out
    )
    assert main(["report", serve(page())]) == OK
    assert "not stored" not in capsys.readouterr().out
    assert main(["report", "--json", serve(page() + more + "\n")]) == OK
    found = json.loads(capsys.readouterr().out)
    assert (found["not_stored"], found["computed_again"]) == (1200, 30)


def test_other_namespaces_are_mentioned_only_where_they_may_explain_misses(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'nixl_tiers:misses_total{{{LABELS},reason="evicted",tier="s3"}} 3\n'
    assert main(["report", serve(text)]) == OK
    assert OTHER_NAMESPACES not in capsys.readouterr().out


def test_servers_are_added_up_and_an_address_may_be_short(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [serve(page()), serve(page(2)).removeprefix("http://"), serve(page(3)) + "/metrics"]
    assert main(["report", "--json", *urls]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["tokens"] == 6 * 34_000
    assert found["tiers"]["s3"] == {
        "tokens": 24_000,
        "saved_first_token_s": 12.0,
        "saved_prefill_s": 60.0,
        "lost_slower_s": 6.0,
        "lost_vain_s": 15.0,
    }
    assert found["misses"][0] == {"reason": "evicted", "tier": "s3", "chunks": 450}


def test_every_name_of_a_metric_that_is_read_exists() -> None:
    """Or a renamed metric would be reported as 0."""
    from nixl_tiers.base.metrics import METRICS
    from nixl_tiers.cli.report import _FIELDS, _SUMS

    for name, reason in [*_FIELDS, *((name, None) for name in _SUMS)]:
        series = METRICS[name.removesuffix("_total")].series.values()
        assert any(one.values == (() if reason is None else (reason,)) for one in series)


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
    assert main(["report", serve(text, status)]) == FAILED
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nixl-tiers: http://127.0.0.1:")
    assert sentence in output.err
    assert output.err.count("\n") == 1


def test_server_that_does_not_run_is_one_sentence(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "http://127.0.0.1:1"]) == FAILED
    assert "does not answer: " in capsys.readouterr().err


@pytest.mark.parametrize("given", ["ftp://server", "http://", "", "http://host:port"])
def test_what_is_no_address_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", given]) in (BAD_INPUT, FAILED)
    assert capsys.readouterr().err.count("\n") == 1
