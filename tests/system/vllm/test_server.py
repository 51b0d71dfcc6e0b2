"""A real `vllm serve` with tiers: its metrics, what it costs while idle, how it pauses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from demo import vllm_cpu
from nixl_tiers import cli
from tests.support.file_tier import file_tier
from tests.support.leaks import MARK, ProcessWatch, process_tree, processes_with_mark, shared_memory_names
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import MotoServer
from tests.support.vllm_server import Answer, MetricsPage, ServerFailure, VllmServer
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HOST_ROWS = 8  # about 2.8 MiB each: little more than one prompt
IDLE_S = 5.0
IDLE_SHARE = 0.05  # of one core, for all processes of the server together
PROMPT = [(17 * i) % 3000 + 100 for i in range(600)]
CHUNKS = 4  # of it


@contextmanager
def serve(
    place: Path, tiers: list[dict[str, Any]], *more: str, env: Mapping[str, str] | None = None, **fields: Any
) -> Iterator[VllmServer]:
    """`fields`: beside the tiers."""
    model = vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
    transfer = json.dumps(vllm_cpu.kv_transfer(tiers, **fields))
    names = ["--served-model-name", "served", str(model)]  # the first: that of metrics
    options = ["--max-model-len", "2048", "--enable-prompt-tokens-details", "--kv-transfer-config", transfer, *names]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": paths, **(env or {})}
    with VllmServer(model, [*options, *more], environment, place / "log") as server:
        server.start(lambda: None)
        yield server


def everyone(server: VllmServer) -> dict[int, str]:
    """The processes of a server, with its movers."""
    assert server._process is not None
    return process_tree(server._process.pid)


def movers_of(server: VllmServer) -> list[int]:
    return [pid for pid, line in everyone(server).items() if "nixl_tiers/mover" in line]


def exits(server: VllmServer, within_s: float) -> None:
    """On SIGTERM, with everybody that it has started."""
    assert server._process is not None
    watch, begun = ProcessWatch(everyone(server)), time.monotonic()
    server._process.terminate()
    assert server._process.wait(300) == 0, server.log_tail()
    assert watch.wait_for_exit(300), server.log_tail()
    assert time.monotonic() - begun < within_s


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


def counts_hits(server: VllmServer, tmp_path: Path) -> None:
    cold = server.ask(PROMPT, 4)
    assert server.reset_prefix_cache()
    warm = server.ask(PROMPT, 4)
    assert warm.token_ids == cold.token_ids
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 512)
    deadline = time.monotonic() + 300
    page = server.metrics()
    # An answer may be read before its step's numbers have come to the server, and rows of a job end before the job.
    while not (page.total("nixl_tiers:store_seconds_count", tier="file") and page.total("nixl_tiers:hits_total")):
        assert time.monotonic() < deadline, "nothing reached the file tier, or no hit was counted"
        server.poke()
        page = server.metrics()
    assert page.total("nixl_tiers:hits_total", tier="cpu") == CHUNKS
    assert page.total("nixl_tiers:hit_tokens_total", tier="cpu") == 512
    assert page.total("nixl_tiers:misses_total", reason="never_stored") == 2 + CHUNKS
    assert page.total("nixl_tiers:written_bytes_total", tier="file") > 0
    assert page.total("nixl_tiers:up", tier="file") == 1
    assert page.total("nixl_tiers:capacity_bytes", tier="cpu") == (HOST_ROWS * 3) << 20
    assert page.total("vllm:prompt_tokens_cached_by_source_total", source="host") == 512

    log = server._log.read_text()
    # Of each tier one line, in vLLM's format, one that this prefill speed is for trials, and nothing else.
    lines = re.findall(r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] nixl_tiers: (\w+ tier|the \w+ tier)", log)
    assert lines == ["cpu tier", "the file tier"]
    assert f"the file tier ({tmp_path / 'kv'}, 256 MiB) is up, 0 rows found" in log
    assert [log.count(f"nixl_tiers: {each}") for each in ("", "prefill_tokens_per_s: with 1 ")] == [3, 1], log


def idles_without_cpu(server: VllmServer) -> None:
    assert movers_of(server)

    # vLLM's processes spin for a while after the last step, and pages are still being supplied: wait for the quiet.
    def share() -> float:
        before = processor_s(everyone(server))
        time.sleep(IDLE_S)
        return (processor_s(everyone(server)) - before) / IDLE_S

    until(lambda: share() < IDLE_SHARE, "the server to be idle", timeout_s=300)


def test_several_api_servers_show_each_gauge_once_and_as_it_is_now(tmp_path: Path) -> None:
    # What this user has measured before about staging would be lines in the log.
    file = file_tier(tmp_path / "kv", "256MiB", type="tests.mover.stub_tiers:DecidedConfig", staged=False)
    tiers = [{"type": "cpu", "capacity": f"{HOST_ROWS * 3}MiB"}, file]
    with serve(tmp_path, tiers, "--api-server-count", "2") as server:
        shows_each_gauge_once(server, tmp_path)
        counts_hits(server, tmp_path)
        assert cli.main(["report", server.url]) == 0
        idles_without_cpu(server)
        file_tier_fails_while_idle(server, tmp_path)
        exits(server, within_s=300)


# --- S3 that does not answer ---

WAIT_S = 120.0  # of a request for storage: what an operation that waited for it would need, and more than any needs
FILLERS = [[(19 * i + 701 * n) % 3000 + 101 for i in range(600)] for n in range(1, 4)]  # the host has room for two
PAUSES = [
    ("/pause?mode=abort", "/resume"),
    ("/pause?mode=keep", "/resume"),
    ("/sleep?level=0", "/wake_up"),
    ("/sleep?level=1&mode=abort", "/wake_up"),
]
BLACK_HOLE = FaultKind.BLACK_HOLE


def asked(server: VllmServer) -> Answer | None:
    """None where it was aborted."""
    try:
        return server.ask(PROMPT, 4)
    except ServerFailure:
        return None


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
def test_pausing_and_sleeping_wait_for_no_storage(moto: MotoServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nor does the end of the server."""
    place, mark, shared = tmp_path_factory.mktemp("s3"), uuid.uuid4().hex, shared_memory_names()  # short: for sockets
    with FaultProxy(moto.port) as proxy, ThreadPoolExecutor(1) as thread:
        bucket = moto.make_bucket(f"pause-{os.getpid()}")
        # So large that a window holds all.
        s3 = {"type": "s3", "bucket": bucket, "endpoint": proxy.endpoint, "capacity": "16GiB"}
        tiers, env = [{"type": "cpu", "capacity": "48MiB"}, s3], {**moto.env, MARK: mark, "TMPDIR": str(place)}
        with serve(place, tiers, "--dtype", "float32", env=env, wait_s=WAIT_S) as server:
            cold = leave_in_s3(server)
            for pause, resume in PAUSES:
                assert leave_in_s3(server) == cold
                struck = proxy.injected[BLACK_HOLE]
                proxy.inject(ProxyFault(BLACK_HOLE, methods=frozenset({"GET"})))
                asking = thread.submit(asked, server)
                until(lambda struck=struck: proxy.injected[BLACK_HOLE] > struck, "a promotion to be under way")
                began = time.monotonic()
                server._send("POST", pause)
                server._send("POST", resume)
                # However long they take: S3 has not answered, and the request's own wait is not over.
                assert time.monotonic() - began < WAIT_S / 2
                proxy.clear()
                answer = asking.result(WAIT_S + 120.0)
                if answer is not None and len(answer.token_ids) == len(cold):
                    assert answer.token_ids == cold
            assert leave_in_s3(server) == cold
            again = server.ask(PROMPT, 4)
            assert (again.token_ids, again.cached_tokens) == (cold, 512)

            proxy.inject(ProxyFault(BLACK_HOLE))
            struck = proxy.injected[BLACK_HOLE]
            server.ask([token + 1 for token in PROMPT], 4)
            until(lambda: proxy.injected[BLACK_HOLE] > struck, "an upload to be swallowed", timeout_s=300.0)
            assert movers_of(server)
            # A mover gives what it is writing a second. What S3 is waited for would be minutes.
            exits(server, within_s=60)
    assert processes_with_mark(mark) == {}
    assert shared_memory_names() <= shared
    assert not [path for path in place.rglob("*") if "nixl" in path.name or "tiers" in path.name]
