"""The namespace: it differs whenever bytes could not be shared, and is the same again otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from nixl_tiers.config import schema as tiers_config
from nixl_tiers.vllm import fingerprint
from nixl_tiers.vllm.fingerprint import Fingerprint
from nixl_tiers.vllm.replicated import Copies, copies_of, told
from nixl_tiers.vllm.spec import geometry_of

CPU = {"type": "cpu", "capacity": "1MiB"}
TIERS = {"tiers": [CPU, {"type": "s3", "bucket": "bucket", "capacity": "1MiB"}]}


class HfConfig(dict[str, Any]):
    _commit_hash: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


def vllm_config(model: str, **changes: Any) -> Any:
    """The parts of vLLM's VllmConfig that count; `changes` are dotted names."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            model_weights="",
            revision=None,
            hf_config_path=None,
            dtype=torch.bfloat16,
            quantization=None,
            quantization_config=None,
            multimodal_config=None,
            max_model_len=8192,
            hf_config=HfConfig(hidden_size=64, rope_parameters=rope, _name_or_path=model, transformers_version="5"),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        compilation_config=SimpleNamespace(static_forward_context={}),
        lora_config=None,
        speculative_config=None,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        owner = config
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return config


@pytest.fixture
def make(
    offloading_config: Callable[..., Any], weights_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Fingerprint]:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def make(
        tiers: dict[str, Any] | None = None, offloading: dict[str, Any] | None = None, page: int = 8192, **changes: Any
    ) -> Fingerprint:
        config = offloading_config(**(offloading or {}))
        checked = tiers_config.load({**TIERS, **(tiers or {})})
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(torch.zeros(2, page, dtype=torch.int8), page)], [[CanonicalKVCacheRef(0, page)]]
        )
        geometry = geometry_of(config, copies_of(config).ranks)
        model = changes.pop("model", str(weights_folder))
        engine = vllm_config(model, **changes)
        weights = fingerprint.weights_of(engine, checked)
        return fingerprint.fingerprint(config, checked, geometry, caches, engine, weights=weights)

    return make


def test_equal_facts_give_equal_fingerprints(make: Callable[..., Fingerprint], weights_folder: Path) -> None:
    """Not the engine's name, its rank, the longest context or where the model is: what long RoPE takes from a context
    shows in layers."""
    known = make()
    assert known == make(offloading={"engine_id": "another", "rank": 0})
    assert known == make(model_config__max_model_len=4096) == make(load_config__load_format="safetensors")
    assert known.note == ""
    assert make(model=str(weights_folder.rename(weights_folder.with_name("moved")))) == known


def of_backend(name: str) -> dict[str, Any]:
    return {"layer": SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name))}


def drafts(commit: str) -> Any:
    config = HfConfig()
    config._commit_hash = commit * 40
    return SimpleNamespace(draft_model_config=SimpleNamespace(model="org/draft", hf_config=config))


DIFFERENCES: list[dict[str, Any]] = [
    {},
    {"model_config__dtype": torch.float16},
    {"model_config__quantization": "fp8"},
    {"model_config__quantization_config": {"bits": 4}},
    {"model_config__hf_config": HfConfig(hidden_size=64, rope_parameters={"rope_theta": 5e5})},
    {"cache_config__cache_dtype": "fp8_e4m3"},
    {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
    {"cache_config__mamba_cache_dtype": "float16"},
    {"cache_config__mamba_ssm_cache_dtype": "float16"},
    {"cache_config__kv_cache_dtype_skip_layers": ["5"]},
    {"attention_config": SimpleNamespace(indexer_kv_dtype="fp8")},
    {"compilation_config__static_forward_context": of_backend("FLASH_ATTN")},
    {"compilation_config__static_forward_context": of_backend("FLASHINFER")},
    {"parallel_config__cp_kv_cache_interleave_size": 16},
    {"speculative_config": drafts("0")},
    {"speculative_config": drafts("1")},
    {"load_config__load_format": "pt"},
    {"load_config__load_format": "mistral"},
    {"model_config__multimodal_config": SimpleNamespace(mm_processor_kwargs={"fps": 1})},
    {"model_config__multimodal_config": SimpleNamespace(video_pruning_rate=0.5)},
    {"model_config__multimodal_config": SimpleNamespace(video_pruning_method="vidcom2")},
    {"tiers": {"salt": "tenant"}},
    {"tiers": {"model_id": "mine"}},
    {"offloading": {"world_size": 2}},
    {"offloading": {"world_size": 2, "pp_size": 2}},
    {"offloading": {"world_size": 2, "pcp_size": 2}},
    {"offloading": {"world_size": 2, "dcp_size": 2}},
    {"offloading": {"blocks_per_chunk": 2}},
    {"offloading": {"groups": 2}},
    {"offloading": {"block_bytes": 16384}},
    {"offloading": {"kv_cache_layout": "BLHNC"}},
    {"offloading": {"dtype": "float16"}},
    {"offloading": {"hash_tokens": 16}},
    {"page": 4096},
]


def test_options_that_change_the_bytes_change_the_namespace(
    make: Callable[..., Fingerprint], weights_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two of them have one."""
    seen: dict[bytes, object] = {}
    for difference in DIFFERENCES:
        made = make(**difference)
        assert made.note == ""
        assert seen.setdefault(made.digest, difference) is difference
    named = make(tiers={"model_id": "mine"})
    with monkeypatch.context() as newer:
        newer.setattr(fingerprint.compat, "version", lambda: (0, 99))
        assert make().digest not in seen
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert make().digest not in seen
    monkeypatch.delenv("PYTHONHASHSEED")
    with (weights_folder / "model-1.safetensors").open("ab") as file:
        file.write(b"more")
    assert make().digest not in seen
    assert make(tiers={"model_id": "mine"}) == named


def test_tensor_parallel_sizes_with_the_same_rows_share_a_namespace(make: Callable[..., Fingerprint]) -> None:
    """With MLA a row has one cell at every size; with two KV heads it has two, from two ranks on."""
    alone = make()
    assert [make(offloading={"world_size": size, "replicated_layout": True}) for size in (2, 8)] == [alone] * 2
    two = make(offloading={"world_size": 2})
    with told(Copies(4, declared=True)):
        assert make(offloading={"world_size": 8}) == two
    assert len({alone, two, make(offloading={"world_size": 8})}) == 3


def test_vllm_has_these_options() -> None:
    """Under another name they would count no more."""
    from vllm.config import AttentionConfig, CacheConfig, MultiModalConfig

    for config, names in (
        (CacheConfig, fingerprint._CACHE),
        (AttentionConfig, fingerprint._ATTENTION),
        (MultiModalConfig, fingerprint._MULTIMODAL),
    ):
        assert set(names) <= set(config.__dataclass_fields__)


def test_a_revision_is_identified_by_its_commit(make: Callable[..., Fingerprint]) -> None:
    def of(revision: str | None, commit: str | None, **changes: Any) -> Fingerprint:
        config = HfConfig(hidden_size=64)
        config._commit_hash = commit
        return make(model="org/name", model_config__hf_config=config, model_config__revision=revision, **changes)

    old, new = "0" * 40, "1" * 40
    assert of("main", old) == of("v1", old) == of(None, old) == of(old, None)
    assert of("main", old).note == ""
    assert of("main", new).digest != of("main", old).digest
    assert "unless model_id is set" in of("main", old, model_config__hf_config_path="org/other").note


def test_without_storage_tiers_no_weights_are_read(
    make: Callable[..., Fingerprint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "identify", lambda *_: pytest.fail("read"))
    made = make(tiers={"tiers": [CPU]})
    assert made.note == ""
    assert make(tiers={"tiers": [CPU]}, load_config__load_format="dummy") == made


def test_sets_in_a_configuration_are_digested_in_order() -> None:
    names = [f"layer.{n}" for n in range(9)]
    assert fingerprint._digest({"skip": set(names)}) == fingerprint._digest({"skip": names})
    assert fingerprint._digest({"skip": frozenset(names)}) != fingerprint._digest({"skip": set(names[1:])})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "org/name"}, "unless model_id is set, because neither a directory nor the commit"),
        ({"load_config__load_format": "dummy"}, "unless model_id is set, because the weights are random"),
        ({"load_config__load_format": "tensorizer"}, "because load_format tensorizer may take the weights from else"),
        ({"load_config__load_format": "of_a_plugin"}, "because load_format of_a_plugin may take the weights from else"),
        ({"model_config__model_weights": "s3://b/m"}, "unless model_id is set, because the weights are streamed"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "unless PYTHONHASHSEED is set"),
        ({"lora_config": object()}, "unless lora_storage is true"),
    ],
)
def test_unknown_facts_give_a_note(make: Callable[..., Fingerprint], changes: dict[str, Any], sentence: str) -> None:
    note = make(**changes).note
    assert note.startswith("storage tiers are refused unless")
    assert sentence in note
    assert len(note.encode()) <= 400


def test_a_worker_without_vllms_configuration_refuses_storage() -> None:
    note = fingerprint.weights_of(None, tiers_config.load(TIERS)).note
    assert note.startswith("storage tiers are refused unless")
    assert "did not give this worker its configuration" in note
