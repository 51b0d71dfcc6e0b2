"""NixlTiersConnector: a load that could not be copied is computed, on a real engine; and what it refuses."""

from __future__ import annotations

import pickle
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from nixl_tiers.vllm import compat, plugin, replicated
from nixl_tiers.vllm.chains import Arrivals
from nixl_tiers.vllm.connector import NixlTiersConnector, refuse
from nixl_tiers.vllm.replicated import Copies

VLLMS = "nixl_tiers.vllm.connector.OffloadingConnector."


def config_of(policy: str) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"spec_name": "NixlTiersSpec"}, kv_load_failure_policy=policy
        ),
        scheduler_config=SimpleNamespace(policy="fcfs", max_num_batched_tokens=2048, long_prefill_token_threshold=512),
        parallel_config=SimpleNamespace(rank=0, tensor_parallel_size=4),
    )


def test_manager_and_spec_are_told_at_once_what_vllms_own_connector_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    manager = SimpleNamespace(times_are_published=told.append, windows_are_known=told.append)
    groups = [SimpleNamespace(group_idx=1 + n, sliding_window_size_in_chunks=n or None) for n in (0, 3)]
    scheduler = SimpleNamespace(config=SimpleNamespace(kv_group_configs=groups))
    monkeypatch.setattr(NixlTiersConnector, "_manager", manager)

    def init(self: Any, *_: Any) -> None:
        told.append(replicated._told.get())
        vars(self).update(connector_scheduler=scheduler, _bounding_group_ids=())

    monkeypatch.setattr(VLLMS + "__init__", init)
    NixlTiersConnector(config_of("recompute"), None, SimpleNamespace(kv_cache_groups=groups, kv_tp_replicas=4))
    most_tokens_of_a_prompt_in_a_step, windows = 512, {1: None, 4: 3}
    assert told == [Copies(4, declared=True), most_tokens_of_a_prompt_in_a_step, windows]
    assert replicated._told.get() is None


def test_the_manager_is_told_of_a_request_before_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its salt, what vLLM has of it, and the most that vLLM could load."""
    connector = object.__new__(NixlTiersConnector)
    connector._anticipates = False
    told: list[Any] = []
    connector._manager = SimpleNamespace(
        salt_of=lambda *of: told.append(("salt", *of)),
        began_at=lambda *of: told.append(("began", *of)),
        bound_load=lambda *of: told.append(("bound", *of)),
    )
    monkeypatch.setattr(VLLMS + "on_new_request", lambda self, request: told.append("new"))
    monkeypatch.setattr(VLLMS + "_max_loadable_tokens", lambda *_: 96)

    def look_up(request: Any, computed: int, *, max_num_new_tokens: int) -> tuple[int, bool]:
        told.append("look-up")
        return max_num_new_tokens, True

    connector.connector_scheduler = SimpleNamespace(get_num_new_matched_tokens=look_up)
    for salt in ("pepper", None):
        connector.on_new_request(SimpleNamespace(request_id="r", cache_salt=salt))
    assert connector.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 32) == (96, True)
    assert told[:4] == ["new", ("salt", "r", "pepper"), "new", ("salt", "r", None)]
    assert sorted(told[4:6]) == [("began", "r", 32), ("bound", "r", 96)]
    assert told[6:] == ["look-up"]


@pytest.mark.parametrize(("parents", "warned"), [("recompute", False), ("fail", True)])
def test_what_happens_to_failed_loads_is_up_to_the_parent_connector(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parents: str, warned: bool
) -> None:
    """MultiConnector gives each connector a configuration of its own, and vLLM goes by the one of MultiConnector."""
    parent, child = config_of(parents), config_of("fail" if parents == "recompute" else "recompute")
    monkeypatch.setattr(
        VLLMS + "__init__",
        lambda self, *_: vars(self).update(connector_scheduler=None, connector_worker=object(), _bounding_group_ids=()),
    )
    with set_current_vllm_config(parent):
        NixlTiersConnector(child, None, SimpleNamespace(kv_cache_groups=(), kv_tp_replicas=4))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    for sentence in said:
        assert "kv_load_failure_policy is fail" in sentence
        assert "under MultiConnector: beside its name" in sentence


def test_failed_requests_are_reported_once_in_the_step_in_which_they_ended() -> None:
    """The connector between a worker that keeps failed loads to itself and vLLM's own part of it, both played."""
    connector = object.__new__(NixlTiersConnector)
    jobs = {4: "four", 5: "five", 6: "six"}
    connector._loading = {}
    connector._connector_metadata = SimpleNamespace(
        load_jobs={job: SimpleNamespace(req_id=name) for job, name in jobs.items()}
    )
    ended: list[set[str]] = [{"five"}, set(), {"four", "six"}]
    failed = [{5}, set(), {4}]
    flushed: list[None] = []
    worker = SimpleNamespace(
        take_failed_loads=lambda: failed.pop(0), flush=lambda: flushed.append(None), unmark_loads=lambda: None
    )
    connector._worker = worker
    connector.connector_worker = SimpleNamespace(
        start_kv_transfers=lambda metadata: None, get_finished=lambda finished: (set(), ended.pop(0))
    )
    # vLLM checks that the metadata is of its own class; that part is not what is tested here.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VLLMS + "start_load_kv", lambda *_, **__: None)
        patch.setattr(
            VLLMS + "get_finished",
            lambda self, finished: self.connector_worker.get_finished(finished),
        )
        connector.start_load_kv(None)
        assert flushed == [None], "stores that this vLLM submits with the loads begin too"
        steps = [connector.get_transfer_results(set()) for _ in range(3)]
    assert [step.failed_recving for step in steps] == [{"five"}, set(), {"four"}]
    assert [step.finished_recving for step in steps] == [{"five"}, set(), {"four", "six"}]
    assert connector._loading == {}


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (
            {"spec_name": "CPUOffloadingSpec"},
            "spec_name: NixlTiersConnector needs NixlTiersSpec, not CPUOffloadingSpec",
        ),
        ({}, "spec_name: NixlTiersConnector needs NixlTiersSpec, not None"),
        ({"spec_name": "NixlTiersSpec", "sync_load_budget_bytes": 1}, "sync_load_budget_bytes makes loads that are "),
    ],
)
def test_configurations_that_cannot_recompute_are_refused(extra: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        refuse(extra)


BAD = {"spec_name": "NixlTiersSpec", "tiers": [{"type": "cpu", "capacity": "64GiB", "capasity": 1}]}


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (BAD, r"tiers\[0\].capasity: unknown field"),
        ({"spec_name": "NixlTiersSpec", "config": "/no/tiers.yaml"}, "/no/tiers.yaml: cannot be read"),
        ({"spec_name": "CPUOffloadingSpec"}, "spec_name: NixlTiersConnector needs NixlTiersSpec"),
    ],
)
@pytest.mark.parametrize("multi", [False, True])
def test_a_bad_configuration_is_refused_while_vllm_makes_its_own(
    extra: dict[str, Any], sentence: str, multi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process is started, let alone the weights loaded: where vLLM asks which CUDA graphs a connector can
    do with, as it does wherever it makes full ones."""
    plugin.register()
    mine = {"kv_connector": "NixlTiersConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    whole = {**mine, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [mine]}}
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda *_: True)
    with pytest.raises(ValueError, match=sentence):
        VllmConfig(
            kv_transfer_config=KVTransferConfig(**whole if multi else mine),
            compilation_config=CompilationConfig(cudagraph_mode="FULL", mode=0),
        )


def test_workers_are_sent_the_number_of_the_step_beside_what_vllm_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """And publish its time by it: both ends of NixlTiersConnector, between them vLLM's own part, played."""
    connector = object.__new__(NixlTiersConnector)
    connector._prepares_first = False
    connector._arrivals = Arrivals()
    connector._arrivals.add("ended", (0.0,))
    meta = OffloadingConnectorMetadata(load_jobs={1: "load"}, store_jobs={}, jobs_to_flush={3})
    asked: list[str] = []
    began: list[tuple[str, int]] = []
    manager = SimpleNamespace(
        scheduled=lambda requests: 41 + len(requests),
        began=began.extend,
        in_doubt=True,
        anticipate=lambda request, *_: asked.append(request),
    )
    calls: list[object] = []
    clock = SimpleNamespace(begin=calls.append, end=lambda: calls.append("end"))
    worker = SimpleNamespace(step_clock=clock, flush=lambda: calls.append("flush"))
    connector._manager = manager
    connector._worker = worker
    monkeypatch.setattr(VLLMS + "build_connector_meta", lambda self, output: meta)
    monkeypatch.setattr(VLLMS + "handle_preemptions", lambda self, metadata: calls.append("stores"))
    monkeypatch.setattr(VLLMS + "wait_for_save", lambda self: None)
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["b", "c"], num_computed_tokens=[48, 16], resumed_req_ids={"b"}),
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens={"a": 64, "b": 1, "c": 1},
    )
    sent = pickle.loads(pickle.dumps(connector.build_connector_meta(output)))
    assert (sent.load_jobs, sent.store_jobs, sent.jobs_to_flush, sent.step) == ({1: "load"}, {}, {3}, 44)
    assert asked == ["ended"], "at each step some may be next in line that were not before"
    assert isinstance(sent, OffloadingConnectorMetadata)
    connector.handle_preemptions(sent)
    connector.wait_for_save()
    assert (began, calls) == ([("a", 0), ("b", 48)], ["stores", "flush", 44, "end"])


@pytest.mark.parametrize("written", ["new_block_ids_to_zero", "kv_cache_block_copies"])
@pytest.mark.parametrize(("v2", "flushed", "spoiled"), [(True, {3, 4}, ["key"]), (True, set(), []), (False, {3}, [])])
def test_stores_whose_blocks_a_step_may_have_written_to_are_spoiled(
    v2: bool, flushed: set[int], spoiled: list[str], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The V2 model runner zeroes and copies blocks before it waits for the stores from them, and before the last step's
    are submitted. The same in vLLM's own connector; no report of it was found."""
    connector = object.__new__(NixlTiersConnector)
    connector._arrivals = Arrivals()
    connector._prepares_first = compat.prepares_first(SimpleNamespace(use_v2_model_runner=v2))
    found: list[str] = []
    connector._manager = SimpleNamespace(scheduled=lambda _: 1, in_doubt=False, spoil=found.extend)
    store, load = SimpleNamespace(is_store=True, keys={"key"}), SimpleNamespace(is_store=False, keys={"loaded"})
    connector.connector_scheduler = SimpleNamespace(_jobs={3: store, 4: load, 5: store})
    meta = OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=flushed)
    monkeypatch.setattr(VLLMS + "build_connector_meta", lambda *_: meta)
    prepared = dict.fromkeys(["new_block_ids_to_zero", "kv_cache_block_copies"])
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    step = {"scheduled_new_reqs": [], "scheduled_cached_reqs": cached, "num_scheduled_tokens": {}}
    connector.build_connector_meta(SimpleNamespace(**step, **prepared))
    assert found == []
    connector.build_connector_meta(SimpleNamespace(**step, **(prepared | {written: [1]})))
    assert found == spoiled


def test_vllm_has_what_that_goes_by() -> None:
    assert {"new_block_ids_to_zero", "kv_cache_block_copies"} <= {each.name for each in fields(SchedulerOutput)}
    assert isinstance(VllmConfig.use_v2_model_runner, property)
    assert {"keys", "is_store"} <= {each.name for each in fields(TransferJobStatus)}
