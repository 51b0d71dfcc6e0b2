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
from nixl_tiers.vllm.replicated import copies_of
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


def test_a_worker_without_vllms_configuration_refuses_storage(
    offloading_config: Callable[..., Any],
) -> None:
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(torch.zeros(2, 8192, dtype=torch.int8), 8192)], [[CanonicalKVCacheRef(0, 8192)]]
    )
    tiers = tiers_config.load(TIERS)
    weights = fingerprint.weights_of(None, tiers)
    made = fingerprint.fingerprint(
        offloading_config(), tiers, geometry_of(offloading_config(), 1), caches, None, weights=weights
    )
    assert "did not give this worker its configuration" in made.note
