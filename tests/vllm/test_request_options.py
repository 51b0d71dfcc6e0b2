"""What a request may ask of the tiers in its kv_transfer_params, as it arrives in vLLM's own connector."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.hints import AtEnd, Hints, Verb
from nixl_tiers.vllm.manager import NixlTiersManager
from nixl_tiers.vllm.request_options import RequestOptions, RequestOptionsReader, Scope
from tests.support.vllm_scheduler import BLOCK, ConnectorScheduler
from tests.support.waiting import until

GEOMETRY = Geometry(cells=1, cell_payload=8192)
STEP = ScheduleEndContext((), ())
ALL = RequestOptions()
FILE, S3 = 0, 1


def options_of(own: Any, **params: Any) -> RequestOptions:
    reader = RequestOptionsReader(["file", "s3"], ["LOCAL", "REMOTE"])
    return reader.read(ReqContext("r", kv_transfer_params={**params, "nixl_tiers": own}))


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (None, ALL),
        ({}, ALL),
        ({"store": "all", "load": "all"}, ALL),
        ({"store": "host"}, RequestOptions(store=Scope.HOST)),
        ({"store": "none"}, RequestOptions(store=Scope.NONE)),
        ({"load": "host"}, RequestOptions(tiers=frozenset())),
        ({"load": "none"}, RequestOptions(loads=False)),
        ({"load": ["s3"]}, RequestOptions(tiers=frozenset({S3}))),
        ({"load": ["cpu", "file", "s3"]}, RequestOptions(tiers=frozenset({FILE, S3}))),
        ({"load": []}, RequestOptions(tiers=frozenset())),
        ({"store": "none", "load": "none"}, RequestOptions(store=Scope.NONE, loads=False)),
    ],
)
def test_options_of_a_request(own: Any, options: RequestOptions, caplog: pytest.LogCaptureFixture) -> None:
    assert options_of(own) == options
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("own", "options", "sentence"),
    [
        ("none", RequestOptions(store=Scope.NONE), 'is "none", not a table: nothing of such requests is stored'),
        ([], RequestOptions(store=Scope.NONE), "is a list, not a table: nothing of such requests is stored"),
        (
            {"stroe": "none"},
            RequestOptions(store=Scope.NONE),
            'has the unknown field "stroe": nothing of such requests is',
        ),
        (
            {"store": "None"},
            RequestOptions(store=Scope.NONE),
            'has store "None", not "all", "host" or "none": nothing of them',
        ),
        ({"store": None}, RequestOptions(store=Scope.NONE), "has store None, not"),
        ({"store": ["all"]}, RequestOptions(store=Scope.NONE), "has store a list, not"),
        ({"store": "x" * 99}, RequestOptions(store=Scope.NONE), "has store that value, not"),
        ({"load": "nothing"}, ALL, 'has load "nothing", not "all", "host", "none" or a list of tiers: they load from'),
        ({"load": {}}, ALL, "has load a dict, not"),
        (
            {"load": ["nvme", "s3", 3]},
            RequestOptions(tiers=frozenset({S3})),
            'has "nvme" in load, and the tiers are cpu, file, s3: nothing is loaded from it',
        ),
        ({"load": [["s3"]]}, RequestOptions(tiers=frozenset()), "has a list in load"),
    ],
)
def test_options_that_cannot_be_understood(
    own: Any, options: RequestOptions, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They store nothing, which they may have been meant to forbid, and load, since every hit has the right bytes."""
    assert options_of(own) == options
    (message,) = caplog.messages
    assert message.startswith('nixl_tiers: "nixl_tiers" in kv_transfer_params of a request ' + sentence)


def test_each_kind_of_wrong_wish_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = RequestOptionsReader([], [])
    for value in (1, 2, 3):
        reader.read(ReqContext("r", kv_transfer_params={"nixl_tiers": {"store": value, "load": value}}))
    assert len(caplog.messages) == 2


def test_example_in_the_guide_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/requests.md").read_text()
    bodies = re.findall(r"```bash\ncurl \S+/v1/completions .*? -d '(.*?)'\n```", guide, re.DOTALL)
    requests = [CompletionRequest.model_validate_json(body) for body in bodies]
    params = [request.kv_transfer_params for request in requests]
    reader = RequestOptionsReader(["file", "s3"], ["LOCAL", "REMOTE"])
    options = [reader.read(ReqContext("r", kv_transfer_params=each)) for each in params]
    agent = Hints(at_end=(AtEnd(Verb.RETAIN, 120, False), AtEnd(Verb.PREFETCH, 30, False)))
    assert options == [RequestOptions(store=Scope.HOST, tiers=frozenset({FILE})), RequestOptions(hints=agent)]
    assert caplog.messages == []


@pytest.mark.parametrize("own", [None, {}, {"load": "all"}, {"load": ["file"]}])
def test_what_another_connector_brings_comes_from_no_storage_tier(own: Any) -> None:
    """A request of an engine that decodes what another one has prefilled."""
    params = {"do_remote_prefill": True, "nixl_tiers": own}
    reader = RequestOptionsReader(["file"], ["LOCAL"])
    assert reader.read(ReqContext("r", kv_transfer_params=params)).tiers == frozenset()
    assert reader.read(ReqContext("r", kv_transfer_params={"do_remote_prefill": False})) == ALL


def test_a_tier_must_be_allowed_by_both_parameters() -> None:
    local = [{"locality": "LOCAL"}]
    rig = Rig()
    try:
        for own, tiers in (({}, {FILE}), ({"load": ["s3"]}, set()), ({"load": ["file", "s3"]}, {FILE})):
            rig.scheduler.request("r", [], {"kv_load_tiers": local, "nixl_tiers": own})
            context = rig.scheduler.scheduler._req_status["r"].req_context
            assert RequestOptionsReader(["file", "s3"], ["LOCAL", "REMOTE"]).read(context).tiers == tiers
    finally:
        rig.manager.shutdown()


class Rig:
    """A manager in vLLM's connector, over host memory and these storage tiers; the test acts as the workers."""

    def __init__(self, *storage: dict[str, Any], rows: int = 64) -> None:
        config = schema.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}, *storage]})
        self.region = HostRegion.create(GEOMETRY, rows)
        self.coordinator = Coordinator.open(config, Namespace.of({"test": "options"}), self.region, ready_s=60.0)
        self.manager = NixlTiersManager(self.coordinator, config, (0,), None)
        self.scheduler = ConnectorScheduler(self.manager)
        self._keys: dict[str, list[Any]] = {}

    def keys(self, name: str) -> list[Any]:
        """Of a request that has run."""
        return self._keys[name]

    def run(self, name: str, hashes: list[bytes], params: dict[str, Any] | None = None) -> int:
        """A request that loads what it can, computes and stores the rest, and ends: how many tokens it loaded."""
        request = self.scheduler.request(name, hashes, params)
        tokens: int | None = None

        def looked_up() -> bool:
            nonlocal tokens
            tokens = self.scheduler.matched(request)
            self.manager.on_schedule_end(STEP)
            return tokens is not None

        until(looked_up, "the look-up")
        context = self.scheduler.scheduler._req_status[name].req_context
        if tokens:
            keys = self.scheduler.scheduler._req_status[name].group_states[0].offload_keys[: tokens // BLOCK]
            self.manager.prepare_load(keys, context)
            self.manager.complete_load(keys, context)
        for spec in self.scheduler.store(request):
            self.region.mark(spec.rows, 0, spec.store_seq, True)
        for job in self.scheduler.scheduler._jobs.values():
            self.manager.complete_store(job.keys, context)
        self.scheduler.scheduler._jobs.clear()
        self._keys[name] = list(self.scheduler.scheduler._req_status[name].group_states[0].offload_keys)
        self.manager.on_request_finished(context)
        self.manager.on_schedule_end(STEP)
        return tokens or 0


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.manager.shutdown()


def hashes_of(count: int, prompt: int = 0) -> list[bytes]:
    return [bytes([prompt, number]) * 16 for number in range(count)]


def test_a_request_that_loads_nothing_misses_what_host_memory_holds(rig: Rig) -> None:
    prompt = hashes_of(4)
    assert rig.run("first", prompt) == 0
    assert rig.run("computes", prompt, {"nixl_tiers": {"load": "none"}}) == 0
    assert rig.run("host", prompt, {"nixl_tiers": {"load": "host"}}) == 4 * BLOCK
    assert rig.run("again", prompt) == 4 * BLOCK


def test_a_request_that_stores_nothing_leaves_nothing_in_host_memory(rig: Rig) -> None:
    prompt = hashes_of(4)
    assert rig.run("first", prompt, {"nixl_tiers": {"store": "none"}}) == 0
    assert rig.coordinator.counters()["cpu"]["used_bytes"] == 0
    assert rig.run("again", prompt) == 0
    assert rig.run("third", prompt) == 4 * BLOCK


@pytest.mark.parametrize(("store", "stays"), [("host", True), ("all", False)])
def test_what_a_request_keeps_in_host_memory_is_written_to_no_tier(rig: Rig, store: str, stays: bool) -> None:
    rig.run("r", hashes_of(2), {"nixl_tiers": {"store": store}})
    with rig.coordinator.core() as core:
        assert [row.host_only for row in core.host.index.values()] == [stays, stays]


def test_vllms_limits_of_tokens_are_kept(rig: Rig) -> None:
    prompt = hashes_of(8)
    assert rig.run("first", prompt, {"max_offload_tokens": 5 * BLOCK + 1}) == 0
    assert rig.run("all", prompt, {"max_offload_tokens": 0}) == 5 * BLOCK
    assert rig.run("two", prompt, {"max_load_tokens": 2 * BLOCK + 3, "max_offload_tokens": 0}) == 2 * BLOCK
    assert rig.run("none", prompt, {"max_load_tokens": 0, "max_offload_tokens": 0}) == 0
    assert rig.run("nonsense", prompt, {"max_load_tokens": "2", "max_offload_tokens": -1}) == 5 * BLOCK
    assert rig.run("last", prompt) == 8 * BLOCK
