"""A real `vllm serve` with tiers: its metrics, what it costs while idle, how it pauses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers import cli
from tests.support import vllm_cpu
from tests.support.file_tier import file_tier
from tests.support.leaks import (
    MARK,
    ProcessWatch,
    command_line,
    process_tree,
    processes_with_mark,
    shared_memory_names,
)
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import MotoServer
from tests.support.vllm_server import Answer, MetricsPage, ServerFailure, VllmServer
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HOST_ROWS = 8  # about 2.8 MiB each: little more than one prompt
IDLE_S = 5.0
IDLE_SHARE = 0.05  # of one core, for all processes of the server together


@contextmanager
def serve(
    place: Path, tiers: list[dict[str, Any]], *more: str, env: Mapping[str, str] | None = None, **fields: Any
) -> Iterator[VllmServer]:
    """`fields`: beside the tiers. Without tiers, vLLM alone."""
    model = vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
    transfer = ["--kv-transfer-config", json.dumps(vllm_cpu.kv_transfer(tiers, **fields))] if tiers else []
    options = ["--max-model-len", "2048", "--enable-prompt-tokens-details", *transfer, *more]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": paths, **(env or {})}
    with VllmServer(model, options, environment, place / "log") as server:
        server.start(nothing)
        yield server


@contextmanager
def serve_from_files(place: Path, *more: str, host: str) -> Iterator[VllmServer]:
    # What this user has measured before about staging would be lines in the log.
    file = file_tier(place / "kv", "256MiB", type="tests.mover.stub_tiers:DecidedConfig", staged=False)
    model = vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
    names = ["--served-model-name", "served", str(model)]  # the first: that of metrics
    with serve(place, [{"type": "cpu", "capacity": host}, file], *names, *more) as server:
        yield server


def processor_s(pids: Iterable[int]) -> float:
    """Processor time that these processes have used so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def file_tier_fails_while_idle(server: VllmServer, tmp_path: Path) -> None:
    """No request is sent: the engine does not step. Its file tier's mover dies, and cannot open the tier again."""
    movers = movers_of(server)
    (tmp_path / "kv").rename(tmp_path / "gone")
    (tmp_path / "kv").write_text("no directory")
    for mover in movers:
        os.kill(mover, signal.SIGKILL)

    def has_failed() -> bool:
        page = server.metrics()
        return not page.total("nixl_tiers:up", tier="file") and page.total("nixl_tiers:breaker", tier="file") == 2

    until(has_failed, "the failure to show at /metrics", timeout_s=300)
    page = server.metrics()
    (up,) = (sample for sample in page.samples if sample.name == "nixl_tiers:up")
    assert {name: up.labels[name] for name in ("model_name", "engine")} == labels_of_vllm(page)


def labels_of_vllm(page: MetricsPage) -> dict[str, str]:
    """vLLM's own labels of this server's one engine."""
    (running, *_) = (sample for sample in page.samples if sample.name == "vllm:num_requests_running")
    return {name: running.labels[name] for name in ("model_name", "engine")}


def test_several_api_servers_show_each_gauge_once_and_as_it_is_now(tmp_path: Path) -> None:
    with serve_from_files(tmp_path, "--api-server-count", "2", host="128MiB") as server:
        shows_each_gauge_once(server, tmp_path)


def shows_each_gauge_once(server: VllmServer, tmp_path: Path) -> None:
    prompt = [(13 * i) % 3000 + 100 for i in range(300)]
    for _ in range(8):  # over both API servers
        server.ask(prompt, 2)

    def shows_gauges() -> bool:
        return server.metrics().total("nixl_tiers:up", tier="file") == 1

    until(shows_gauges, "gauges", timeout_s=300)
    for _ in range(8):
        samples = [sample for sample in server.metrics().samples if sample.name.startswith("nixl_tiers:")]
        assert len({(s.name, tuple(sorted(s.labels.items()))) for s in samples}) == len(samples)
        assert not [sample for sample in samples if "pid" in sample.labels]
        (up,) = (sample for sample in samples if sample.name == "nixl_tiers:up")
        assert up.labels == {**labels_of_vllm(server.metrics()), "tier": "file"}
        (info,) = (sample for sample in samples if sample.name == "nixl_tiers:info")
        assert info.labels["places"] == f"file: {tmp_path / 'kv'}"
    page = server.metrics()
    assert page.total("nixl_tiers:added_chunks_total", tier="cpu", reason="stored") == 2
    assert page.total("nixl_tiers:misses_total", reason="never_stored") == 2
    file_tier_fails_while_idle(server, tmp_path)


def prompt_of(seed: int) -> list[int]:
    """600 tokens, 4 whole blocks."""
    return [(seed * i) % 3000 + 100 for i in range(600)]


def movers_of(server: VllmServer) -> list[int]:
    assert server._process is not None
    return [pid for pid, line in process_tree(server._process.pid).items() if "nixl_tiers/mover" in line]


def nothing() -> None:
    pass


def test_a_server_counts_hits_idles_without_cpu_and_exits_on_sigterm(tmp_path: Path) -> None:
    with serve_from_files(tmp_path, host=f"{HOST_ROWS * 3}MiB") as server:
        counts_hits(server, tmp_path)
        assert cli.main(["report", server.url]) == 0
        everyone = idles_without_cpu(server)
        file_tier_fails_while_idle(server, tmp_path)
        exits_on_sigterm(server, everyone)


def counts_hits(server: VllmServer, tmp_path: Path) -> None:
    prompt = prompt_of(17)
    cold = server.ask(prompt, 4)
    assert server.reset_prefix_cache()
    warm = server.ask(prompt, 4)
    assert warm.token_ids == cold.token_ids
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 512)
    deadline = time.monotonic() + 300
    page = server.metrics()
    # An answer may be read before its step's numbers have come to the server, and rows of a job end before the job.
    while not (page.total("nixl_tiers:store_seconds_count", tier="file") and page.total("nixl_tiers:hits_total")):
        assert time.monotonic() < deadline, "nothing reached the file tier, or no hit was counted"
        server.poke()
        page = server.metrics()
    assert page.total("nixl_tiers:hits_total", tier="cpu") == 4
    assert page.total("nixl_tiers:hit_tokens_total", tier="cpu") == 512
    assert page.total("nixl_tiers:misses_total", reason="never_stored") == 4
    assert page.total("nixl_tiers:written_bytes_total", tier="file") > 0
    assert page.total("nixl_tiers:up", tier="file") == 1
    assert page.total("nixl_tiers:capacity_bytes", tier="cpu") == (HOST_ROWS * 3) << 20
    assert page.total("vllm:prompt_tokens_cached_by_source_total", source="host") == 512

    log = server._log.read_text()
    # Of each tier one line, in vLLM's format, and nothing else while all is well.
    lines = re.findall(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] nixl_tiers: (\w+ tier|the \w+ tier)", log)
    assert lines == ["cpu tier", "the file tier"]
    assert f"the file tier ({tmp_path / 'kv'}, 256 MiB) is up, 0 rows found" in log
    assert log.count("nixl_tiers: ") == 2, [line for line in log.splitlines() if "nixl_tiers: " in line]


def idles_without_cpu(server: VllmServer) -> dict[int, str]:
    """Returns its processes."""
    assert server._process is not None
    everyone = process_tree(server._process.pid)
    assert any("nixl_tiers/mover" in line for line in everyone.values())
    # vLLM's processes spin for a while after the last step, and pages are still being supplied: wait for the quiet.
    deadline = time.monotonic() + 300
    share = 1.0
    while share >= IDLE_SHARE and time.monotonic() < deadline:
        before = processor_s(everyone)
        time.sleep(IDLE_S)
        share = (processor_s(everyone) - before) / IDLE_S
    assert share < IDLE_SHARE
    return everyone


def exits_on_sigterm(server: VllmServer, everyone: Mapping[int, str]) -> None:
    assert server._process is not None
    server._process.terminate()
    assert server._process.wait(300) is not None
    deadline = time.monotonic() + 120
    while any(command_line(pid) == line for pid, line in everyone.items()):
        assert time.monotonic() < deadline, "a process outlived the server"
        time.sleep(0.05)


# --- S3 that does not answer ---


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.port) as proxy:
        yield proxy


def end(server: VllmServer, sent: signal.Signals) -> tuple[int, float, float]:
    """Its exit code, and the seconds until it had ended, and everybody that it had started."""
    process = server._process
    assert process is not None
    everyone = ProcessWatch(process_tree(process.pid))
    begun = time.monotonic()
    # All of a container is killed at once; movers, in sessions of their own, are left to see it for themselves.
    (os.killpg if sent is signal.SIGKILL else os.kill)(process.pid, sent)
    code = process.wait(300.0)
    first_s = time.monotonic() - begun
    assert everyone.wait_for_exit(300.0), server.log_tail()
    return code, first_s, time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name)
def test_a_server_whose_s3_does_not_answer_exits_in_time(
    sent: signal.Signals, moto: MotoServer, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shared, prompt = shared_memory_names(), [(17 * i) % 3000 + 100 for i in range(1100)]
    off, on = (tmp_path_factory.mktemp(name) for name in ("off", "on"))  # short names: vLLM makes sockets there
    with serve(off, [], env={"TMPDIR": str(off)}) as server:
        server.ask(prompt, 4)
        off_code, off_s, off_all_s = end(server, sent)

    mark = uuid.uuid4().hex
    s3 = {"type": "s3", "bucket": moto.make_bucket(f"exits-{mark}"), "endpoint": proxy.endpoint, "capacity": "1GiB"}
    tiers = [{"type": "cpu", "capacity": "256MiB"}, s3]
    with serve(on, tiers, env={**moto.env, MARK: mark, "TMPDIR": str(on)}) as server:

        def is_up() -> bool:
            server.poke()
            page = server.metrics()
            return page.total("nixl_tiers:up", tier="s3") == 1 and not page.total("nixl_tiers:listing", tier="s3")

        until(is_up, "the s3 tier", timeout_s=300.0)
        proxy.inject(ProxyFault(FaultKind.BLACK_HOLE))
        server.ask(prompt, 4)
        until(lambda: proxy.injected[FaultKind.BLACK_HOLE], "an upload to be swallowed", timeout_s=300.0)
        assert server._process is not None
        assert any("nixl_tiers/mover" in line for line in process_tree(server._process.pid).values())
        code, on_s, on_all_s = end(server, sent)
        assert processes_with_mark(mark) == {}
    print(f"{sent.name}: off {off_s:.2f} s, all of it {off_all_s:.2f} s; on {on_s:.2f} s, all of it {on_all_s:.2f} s")
    assert code == off_code
    # A mover gives what it is writing a second. What S3 is waited for would be minutes.
    assert on_all_s < 3 * off_all_s + 30
    assert shared_memory_names() <= shared
    assert not [path for path in on.rglob("*") if "nixl" in path.name or "tiers" in path.name]


WAIT_S = 120.0  # of a request for storage: what an operation that waited for it would need, and more than any needs
PROMPT = [(17 * i) % 3000 + 100 for i in range(600)]
FILLERS = [[(19 * i + 701 * n) % 3000 + 101 for i in range(600)] for n in range(1, 4)]
CHUNKS = 4  # of each of them; the host has room for eight

PAUSES = [
    ("/pause?mode=abort", "/resume"),
    ("/pause?mode=keep", "/resume"),
    ("/sleep?level=0", "/wake_up"),
    ("/sleep?level=1&mode=abort", "/wake_up"),
]


class Asking(threading.Thread):
    """One request under way; afterwards its answer, or None where it was aborted."""

    def __init__(self, server: VllmServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.answer: Answer | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._server.ask(PROMPT, 4)
        except ServerFailure:
            self.answer = None


def leave_in_s3(server: VllmServer) -> tuple[int, ...]:
    """Have the chunks of PROMPT nowhere but in S3, and that ready to give them. Returns what the prompt's answer is.

    A pause and a sleep are resets: what was stored before is not a hit any more.
    """

    def now(name: str) -> float:
        server.poke()
        return server.metrics().total(f"nixl_tiers:{name}", tier="s3")

    until(lambda: now("breaker") == 0, "S3 to be in use", 120.0)
    answer = server.ask(PROMPT, 4)
    until(lambda: now("chunks") >= CHUNKS, "S3 to hold the prompt", 120.0)
    for filler in FILLERS:
        server.ask(filler, 1)
    assert server.reset_prefix_cache()
    return answer.token_ids


@pytest.mark.slow
def test_pausing_and_sleeping_wait_for_no_storage(moto: MotoServer, proxy: FaultProxy, tmp_path: Path) -> None:
    bucket = moto.make_bucket(f"pause-{os.getpid()}")
    # So large that a window holds all.
    s3 = {"type": "s3", "bucket": bucket, "endpoint": proxy.endpoint, "capacity": "16GiB"}
    tiers, exact = [{"type": "cpu", "capacity": "48MiB"}, s3], ("--dtype", "float32")
    with serve(tmp_path, tiers, *exact, env=moto.env, wait_s=WAIT_S) as server:
        waits_for_no_storage(server, proxy)


def waits_for_no_storage(server: VllmServer, proxy: FaultProxy) -> None:
    cold = leave_in_s3(server)
    for pause, resume in PAUSES:
        assert leave_in_s3(server) == cold
        struck = proxy.injected[FaultKind.BLACK_HOLE]
        proxy.inject(ProxyFault(FaultKind.BLACK_HOLE, methods=frozenset({"GET"})))
        asking = Asking(server)
        until(
            lambda before=struck: proxy.injected[FaultKind.BLACK_HOLE] > before,
            "a promotion to be under way",
            120.0,
        )
        took = []
        for path in (pause, resume):
            began = time.monotonic()
            server._send("POST", path)
            took.append(time.monotonic() - began)
            assert proxy.injected[FaultKind.BLACK_HOLE] > struck  # still black
        # However long they take: S3 has not answered, and the request's own wait is not over.
        print(f"{pause}: {took[0]:.3f} s, {resume}: {took[1]:.3f} s")
        assert sum(took) < WAIT_S / 2
        proxy.clear()
        asking.join(WAIT_S + 120.0)
        assert not asking.is_alive()
        if asking.answer is not None and len(asking.answer.token_ids) == len(cold):
            assert asking.answer.token_ids == cold
    assert leave_in_s3(server) == cold
    again = server.ask(PROMPT, 4)
    assert again.token_ids == cold
    assert again.cached_tokens == 512
