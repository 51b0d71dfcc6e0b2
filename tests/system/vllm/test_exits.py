"""A real `vllm serve` that gets SIGTERM or SIGKILL while S3 does not answer: it exits as fast as without tiers."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support import vllm_cpu
from tests.support.leaks import MARK, ProcessWatch, process_tree, processes_with_mark, shared_memory_names
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import MotoServer
from tests.support.vllm_server import VllmServer
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

TIMEOUT_S = 300.0
PROMPT = [(17 * i) % 3000 + 100 for i in range(1100)]


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.port) as proxy:
        yield proxy


def serve(place: Path, environment: dict[str, str], tiers: list[dict[str, Any]]) -> VllmServer:
    options = ["--max-model-len", "2048"]
    if tiers:
        options += ["--kv-transfer-config", json.dumps(vllm_cpu.kv_transfer(tiers))]
    root = str(Path(__file__).parents[3])
    environment = {
        **environment,
        "TMPDIR": str(place),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    return VllmServer(vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"), options, environment, place / "log")


def end(server: VllmServer, sent: signal.Signals) -> tuple[int, float, float]:
    """Its exit code, and the seconds until it had ended, and everybody that it had started."""
    process = server._process
    assert process is not None
    everyone = ProcessWatch(process_tree(process.pid))
    begun = time.monotonic()
    # All of a container is killed at once; movers, in sessions of their own, are left to see it for themselves.
    (os.killpg if sent is signal.SIGKILL else os.kill)(process.pid, sent)
    code = process.wait(TIMEOUT_S)
    first_s = time.monotonic() - begun
    assert everyone.wait_for_exit(TIMEOUT_S), server.log_tail()
    return code, first_s, time.monotonic() - begun


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL], ids=lambda sent: sent.name)
def test_a_server_whose_s3_does_not_answer_exits_in_time(
    sent: signal.Signals, moto: MotoServer, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shared = shared_memory_names()
    off, on = (tmp_path_factory.mktemp(name) for name in ("off", "on"))  # short names: vLLM makes sockets there
    with serve(off, {}, []) as server:
        server.start(lambda: None)
        server.ask(PROMPT, 4)
        off_code, off_s, off_all_s = end(server, sent)

    mark = uuid.uuid4().hex
    s3 = {"type": "s3", "bucket": moto.make_bucket(f"exits-{mark}"), "endpoint": proxy.endpoint, "capacity": "1GiB"}
    tiers = [{"type": "cpu", "capacity": "256MiB"}, s3]
    with serve(on, {**moto.env, MARK: mark}, tiers) as server:
        server.start(lambda: None)

        def is_up() -> bool:
            server.poke()
            page = server.metrics()
            return page.total("nixl_tiers:up", tier="s3") == 1 and not page.total("nixl_tiers:listing", tier="s3")

        until(is_up, "the s3 tier", timeout_s=TIMEOUT_S)
        proxy.inject(ProxyFault(FaultKind.BLACK_HOLE))
        server.ask(PROMPT, 4)
        until(lambda: proxy.injected[FaultKind.BLACK_HOLE], "an upload to be swallowed", timeout_s=TIMEOUT_S)
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
