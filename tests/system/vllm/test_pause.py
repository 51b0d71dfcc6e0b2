"""A real `vllm serve` that is paused, put to sleep and woken while a request waits for an S3 that never answers."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.support import vllm_cpu
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import MotoServer
from tests.support.vllm_server import Answer, ServerFailure, VllmServer
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

WAIT_S = 120.0  # of a request for storage: what an operation that waited for it would need, and more than any needs
TIMEOUT_S = 120.0
PROMPT = [(17 * i) % 3000 + 100 for i in range(600)]
FILLERS = [[(19 * i + 701 * n) % 3000 + 101 for i in range(600)] for n in range(1, 4)]
CHUNKS = 4  # of each of them; the host has room for eight

PAUSES = [
    ("/pause?mode=abort", "/resume"),
    ("/pause?mode=keep", "/resume"),
    ("/sleep?level=0", "/wake_up"),
    ("/sleep?level=1&mode=abort", "/wake_up"),
]


@pytest.fixture
def proxy(moto: MotoServer) -> Iterator[FaultProxy]:
    with FaultProxy(moto.port) as proxy:
        yield proxy


@pytest.fixture
def server(moto: MotoServer, proxy: FaultProxy, tmp_path: Path) -> Iterator[VllmServer]:
    model = vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
    bucket = moto.make_bucket(f"pause-{os.getpid()}")
    tiers = [
        {"type": "cpu", "capacity": "48MiB"},
        {"type": "s3", "bucket": bucket, "endpoint": proxy.endpoint, "capacity": "16GiB"},  # so that a window holds all
    ]
    options = ["--max-model-len", "2048", "--dtype", "float32", "--enable-prompt-tokens-details"]
    options += ["--kv-transfer-config", json.dumps(vllm_cpu.kv_transfer(tiers, wait_s=WAIT_S))]
    root = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": paths, **moto.env}
    with VllmServer(model, options, environment, tmp_path / "log") as server:
        server.start(lambda: None)
        yield server


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

    until(lambda: now("breaker") == 0, "S3 to be in use", TIMEOUT_S)
    answer = server.ask(PROMPT, 4)
    until(lambda: now("chunks") >= CHUNKS, "S3 to hold the prompt", TIMEOUT_S)
    for filler in FILLERS:
        server.ask(filler, 1)
    assert server.reset_prefix_cache()
    return answer.token_ids


def test_pausing_and_sleeping_wait_for_no_storage(server: VllmServer, proxy: FaultProxy) -> None:
    cold = leave_in_s3(server)
    for pause, resume in PAUSES:
        assert leave_in_s3(server) == cold
        struck = proxy.injected[FaultKind.BLACK_HOLE]
        proxy.inject(ProxyFault(FaultKind.BLACK_HOLE, methods=frozenset({"GET"})))
        asking = Asking(server)
        until(
            lambda before=struck: proxy.injected[FaultKind.BLACK_HOLE] > before,
            "a promotion to be under way",
            TIMEOUT_S,
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
        asking.join(WAIT_S + TIMEOUT_S)
        assert not asking.is_alive()
        if asking.answer is not None and len(asking.answer.token_ids) == len(cold):
            assert asking.answer.token_ids == cold
    assert leave_in_s3(server) == cold
    again = server.ask(PROMPT, 4)
    assert again.token_ids == cold
    assert again.cached_tokens == 512
