"""`nixl-tiers bench URL` against a server that has vLLM's endpoints, a cache of two prefixes, and a tier below it."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from nixl_tiers.cli import BAD_INPUT, FAILED, OK, main, sources
from nixl_tiers.cli.bench import OUTPUT_TOKENS, SUFFIX_TOKENS, percentile

LABELS = 'engine="0",model_name="m"'
TOKENS = 64


@dataclass
class Server:
    """`dies_after` so many prompts, in the middle of an answer. `ours`: with nixl_tiers, else vLLM's own host memory.
    `details`: it says how many tokens were cached. `late`: metrics show an answer only at so many scrapes after it."""

    url: str = ""
    own: int = 2  # prefixes in its own cache
    below: int = 100  # in the tier below
    ours: bool = True
    details: bool = True
    dies_after: int = 1000
    late: int = 0
    others: int = 0  # tokens of prompts of others, beside each
    asked: list[list[int]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    keys: set[str | None] = field(default_factory=set)
    held: dict[str, list[tuple[int, ...]]] = field(default_factory=lambda: {"gpu": [], "below": []})
    lock: threading.Lock = field(default_factory=threading.Lock)
    shown: str = ""
    stale: int = 0

    def answer(self, prompt: list[int]) -> int:
        """How many tokens were cached."""
        with self.lock:
            prefix = tuple(prompt[:-SUFFIX_TOKENS])
            source = next((name for name, held in self.held.items() if prefix in held), "")
            for name, most in (("gpu", self.own), ("below", self.below)):
                self.held[name] = [*(each for each in self.held[name] if each != prefix), prefix][-most:]
            cached = len(prefix) if source else 0
            self.counts["prompt"] += len(prompt) + self.others
            self.counts["cached"] += cached
            self.counts[source] += cached
            self.stale = self.late
            return cached

    def page(self) -> str:
        with self.lock:
            self.stale -= 1
            if self.stale < 0:
                source = "external_unspecified" if self.ours else "host"
                ours = f'nixl_tiers:hit_tokens_total{{tier="s3",{LABELS}}} {self.counts["below"]}'
                self.shown = "\n".join(
                    [
                        f"vllm:prompt_tokens_total{{{LABELS}}} {self.counts['prompt']}",
                        f"vllm:prompt_tokens_cached_total{{{LABELS}}} {self.counts['cached']}",
                        f"vllm:prefix_cache_hits_total{{{LABELS}}} {self.counts['gpu']}",
                        f'{BY_SOURCE}{{source="device",{LABELS}}} {self.counts["gpu"]}',
                        f'{BY_SOURCE}{{source="{source}",{LABELS}}} {self.counts["below"]}',
                        *([ours] if self.ours else []),
                        f'vllm:cache_config_info{{num_gpu_blocks="{8 * self.own}",block_size="16"}} 1',
                    ]
                )
            return self.shown + "\n"


BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
Start = Callable[..., Server]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(sources, "POLL_S", 0.001)
    monkeypatch.setattr(sources, "SETTLE_S", 300.0)  # however busy the machine is
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    running: list[http.server.HTTPServer] = []

    def begin(**options: Any) -> Server:
        server = Server(**options)
        listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler(server))
        running.append(listening)
        threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
        server.url = f"http://127.0.0.1:{listening.server_port}"
        return server

    yield begin
    for each in running:
        each.shutdown()
        each.server_close()


def handler(server: Server) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = {"data": [{"id": "m", "max_model_len": 512}, {"id": "adapter"}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write((server.page() if self.path == "/metrics" else json.dumps(models)).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.keys.add(self.headers["Authorization"])
            if asked["model"] == "adapter":
                self.send_error(400)
                return
            with server.lock:
                server.asked.append(asked["prompt"])
                dies = len(server.asked) > server.dies_after
            self.send_response(200)
            self.end_headers()
            for token in range(asked["max_tokens"]):
                self.event({"choices": [{"text": "x", "token_ids": [token]}]})
                if dies:
                    self.close_connection = True
                    return
            cached = server.answer(asked["prompt"])
            details = {"prompt_tokens_details": {"cached_tokens": cached}} if server.details else {}
            self.event({"choices": [], "usage": {"prompt_tokens": len(asked["prompt"]), **details}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        def log_message(self, *_: object) -> None: ...

    return Handler


def bench(server: Server, *options: str) -> int:
    return main(["bench", server.url, "--tokens", str(TOKENS), "--seed", "1", *options])


def numbers(capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Requests by source."""
    found = json.loads(capsys.readouterr().out)
    return {source: each["requests"] for source, each in found["sources"].items()}


@pytest.mark.parametrize("details", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_times_are_told_apart_by_source(
    ours: bool, details: bool, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """More prefixes than the own cache holds come from the tier, fewer from the own cache."""
    assert bench(start(ours=ours, details=details), "--prefixes", "3", "--rounds", "3", "--json") == OK
    assert numbers(capsys) == {"computed": 3, "s3" if ours else "cpu": 6}
    assert bench(start(ours=ours, details=details), "--prefixes", "2", "--rounds", "2", "--json") == OK
    assert numbers(capsys) == {"computed": 2, "gpu": 2}


def test_counters_that_come_late_are_waited_for(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """Also for those of the first request, which is not measured."""
    assert bench(start(late=3, details=False), "--prefixes", "3", "--rounds", "2", "--json") == OK
    assert numbers(capsys) == {"computed": 3, "s3": 3}


def test_prompts_share_prefixes_and_nothing_else(start: Start) -> None:
    one, same, other = start(), start(), start()
    assert bench(one, "--prefixes", "2", "--rounds", "2") == OK
    assert bench(same, "--prefixes", "2", "--rounds", "1") == OK
    assert main(["bench", other.url, "--prefixes", "2", "--rounds", "1"]) == OK
    _, *prompts = one.asked  # the first one is short, and not measured
    assert len({tuple(prompt) for prompt in prompts}) == 4
    starts = [prompt[:TOKENS] for prompt in prompts]
    assert (starts[:2], starts[0] == starts[1]) == (starts[2:], False)
    assert [prompt[:TOKENS] for prompt in same.asked[1:]] == starts[:2]
    assert [len(prompt) for prompt in other.asked[1:]] == [512 - OUTPUT_TOKENS] * 2, "all that the model takes"


def test_table_says_from_where_how_fast_and_how_many(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(start(), "--prefixes", "3", "--rounds", "2") == OK
    about, columns, computed, s3, rates = capsys.readouterr().out.splitlines()
    assert about == f"m, prompts of {TOKENS + SUFFIX_TOKENS} tokens, 3 prefixes, 1 at a time, seed 1"
    assert columns.split() == ["from", "requests", "first", "token,", "p50", "p99"]
    assert [line.split()[:2] for line in (computed, s3)] == [["computed", "3"], ["s3", "3"]]
    assert rates.startswith("requests a second, round by round: ")
    assert bench(start(own=4), "--prefixes", "2", "--rounds", "2") == OK
    assert capsys.readouterr().out.splitlines()[-1] == (
        "vLLM's own cache has room for all of it (512 tokens): more --prefixes ask the tiers"
    )


@pytest.mark.parametrize("details", [True, False])
def test_several_at_once_are_told_apart_by_what_the_answers_say(
    details: bool, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(details=details)
    assert bench(server, "--prefixes", "4", "--rounds", "2", "--at-once", "4", "--json") == OK
    assert numbers(capsys) == ({"computed": 4, "cached": 4} if details else {"unknown": 8})


def test_source_is_not_guessed_while_others_ask(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench(start(others=7), "--prefixes", "3", "--rounds", "2", "--json") == OK
    assert numbers(capsys) == {"computed": 3, "cached": 3}
    monkeypatch.setattr(sources, "SETTLE_S", 0.01)
    assert bench(start(late=10**6), "--prefixes", "3", "--rounds", "2", "--json") == OK
    assert numbers(capsys) == {"computed": 3, "cached": 3}, "nor where counters never agree"


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_what_was_measured_before_a_server_dies_is_printed(
    at_once: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(dies_after=6)
    assert bench(server, "--prefixes", "4", "--rounds", "3", "--json", "--at-once", at_once) == FAILED
    output = capsys.readouterr()
    found = json.loads(output.out)
    # One that is answered beside the last may be on its way.
    assert sum(map(len, found["rounds"])) in {5, 6 - int(at_once)}
    assert found["error"] == "the server ended the response before its last token"
    assert output.err == f"nixl-tiers: {found['error']}\n"


def test_picture_and_json_are_written(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    assert bench(start(), "--rounds", "2", "--out", str(tmp_path / "out")) == OK
    assert (tmp_path / "out/ttft.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out/bench.json").read_text())["sources"].keys() == {"computed", "s3"}
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench(start(), "--rounds", "1", "--out", str(tmp_path / "two")) == OK
    assert capsys.readouterr().err == (
        f"nixl-tiers: without matplotlib there is no picture, only {tmp_path}/two/bench.json\n"
    )
    assert [file.name for file in (tmp_path / "two").iterdir()] == ["bench.json"]


def test_key_is_taken_from_the_environment(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    assert bench(server, "--rounds", "1", "--json") == OK
    assert server.keys == {"Bearer secret-1"}
    assert "secret-1" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--model", "none"], BAD_INPUT, "--model: {} serves m, adapter, not none"),
        (
            ["--tokens", "500"],
            BAD_INPUT,
            f"--tokens: m takes prefixes of at most {512 - SUFFIX_TOKENS - OUTPUT_TOKENS} t",
        ),
        (["--model", "adapter"], FAILED, "POST /v1/completions answered 400: "),
        (["--out", "/proc/nowhere"], BAD_INPUT, "--out: /proc/nowhere cannot be made (No such file or directory)"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    options: list[str], code: int, sentence: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start()
    assert bench(server, *options) == code
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert output.err.startswith(f"nixl-tiers: {sentence.format(server.url)}")


def test_other_servers_are_one_sentence(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http://127.0.0.1:1"]) == FAILED
    assert capsys.readouterr().err.startswith("nixl-tiers: http://127.0.0.1:1 does not answer: ")
    server = start()
    server.page = lambda: "plain_total 3\n"  # type: ignore[method-assign]
    assert main(["bench", server.url]) == FAILED
    assert capsys.readouterr().err == f"nixl-tiers: {server.url} is no vLLM server: none of its metrics is vLLM's\n"
    assert server.asked == []


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 201)]
    assert (percentile(values, 0.5), percentile(values, 0.99)) == (100.0, 198.0)
    assert (percentile(values[:3], 0.5), percentile(values[:3], 0.99)) == (2.0, 3.0)
