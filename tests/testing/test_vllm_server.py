"""The server as a child process: however it ends, none of its processes is left. Its metrics, as sums over series."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.support import vllm_cpu, vllm_server
from tests.support.vllm_server import MetricsPage, ServerFailure, VllmServer

# Answers /health; its child in another session ignores SIGTERM and would outlive it; optionally it ignores it, too.
FAKE_SERVER = """
import http.server, json, os, signal, subprocess, sys
port, ignores, pids = int(sys.argv[1]), sys.argv[2] == "ignores SIGTERM", sys.argv[3]
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", ignore], start_new_session=True)
if ignores:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(pids, "w").write(f"{os.getpid()} {child.pid}")
EVENTS = [
    {"choices": [{"token_ids": [5, 6]}]},
    {"choices": [{"token_ids": [7]}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}},
]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"plain_total 3\\n")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(500 if self.path == "/tokenize" else 200); self.end_headers()
        for event in EVENTS:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

PAGE = """# HELP nixl_tiers:read_bytes_total Bytes read from this tier.
# TYPE nixl_tiers:read_bytes_total counter
nixl_tiers:read_bytes_total{engine="0",model_name="m",tier="file"} 1.5e+06
nixl_tiers:read_bytes_total{engine="1",model_name="m",tier="file"} 2
nixl_tiers:read_bytes_total{engine="0",model_name="m",tier="s3"} 7.0 1700000000
nixl_tiers:odd{path="C:\\\\a\\"b},c=\\"x",tier="cpu"} +Inf
plain_total 3
"""


def fake_server(monkeypatch: pytest.MonkeyPatch, folder: Path, behaviour: str) -> VllmServer:
    def command(_model: Path, *options: str) -> list[str]:
        port = options[options.index("--port") + 1]
        return [sys.executable, "-c", FAKE_SERVER, port, behaviour, str(folder / "pids")]

    monkeypatch.setattr(vllm_cpu, "serve_command", command)
    return VllmServer(folder / "model", [], {}, folder / "log")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("behaviour", ["obeys SIGTERM", "ignores SIGTERM"])
def test_stop_ends_all_processes_of_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, behaviour: str) -> None:
    monkeypatch.setattr(vllm_server, "STOP_S", 0.5)
    monkeypatch.setattr(vllm_server, "ORPHAN_TIMEOUT_S", 0.2)
    with fake_server(monkeypatch, tmp_path, behaviour) as server:
        server.start(lambda: None)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(runs, pids))
    assert not any(map(runs, pids))


def test_answer_is_read_from_the_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_server, "ORPHAN_TIMEOUT_S", 0.0)
    with fake_server(monkeypatch, tmp_path, "obeys SIGTERM") as server:
        server.start(lambda: None)
        answer = server.ask([1, 2, 3], 3)
        assert (answer.token_ids, answer.prompt_tokens, answer.cached_tokens) == ((5, 6, 7), 9, 8)
        assert answer.ttft_s > 0
        assert server.metrics().total("plain_total") == 3
        with pytest.raises(ServerFailure, match="POST /tokenize answered 500"):
            server.tokenize("text")


def test_failed_start_reports_the_end_of_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('no such weights')"]
    monkeypatch.setattr(vllm_cpu, "serve_command", lambda *_: failing)
    with (
        VllmServer(tmp_path, [], {}, tmp_path / "log") as server,
        pytest.raises(ServerFailure, match=r"(?s)ended with code 1.*no such weights"),
    ):
        server.start(lambda: None)


def test_other_processes_are_not_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_server, "ORPHAN_TIMEOUT_S", 0.0)
    other = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    try:
        with fake_server(monkeypatch, tmp_path, "obeys SIGTERM") as server:
            server.start(lambda: None)
        time.sleep(0)
        assert runs(other)
    finally:
        os.kill(other, 9)
        os.waitpid(other, 0)


def test_total_sums_all_series_with_these_labels() -> None:
    page = MetricsPage(PAGE)
    assert page.total("nixl_tiers:read_bytes_total", tier="file") == 1_500_002
    assert page.total("nixl_tiers:read_bytes_total", tier="file", engine="1") == 2
    assert page.total("nixl_tiers:read_bytes_total") == 1_500_009
    assert page.total("plain_total") == 3


def test_total_of_missing_series_is_zero() -> None:
    assert MetricsPage(PAGE).total("nixl_tiers:read_bytes_total", tier="cpu") == 0
    assert MetricsPage("").total("plain_total") == 0


def test_label_values_are_unescaped() -> None:
    odd = next(sample for sample in MetricsPage(PAGE).samples if sample.name == "nixl_tiers:odd")
    assert odd.labels == {"path": 'C:\\a"b},c="x', "tier": "cpu"}
