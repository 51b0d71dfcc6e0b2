"""The facts that make up the namespace, collected where they are known: in a worker, from vLLM's own configuration.

Two engines whose facts agree produce interchangeable bytes for equal keys. A fact that cannot be found out is a reason
to refuse storage tiers; nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple

import torch

from nixl_tiers.base.chunk import NAMESPACE_BYTES, Geometry, Namespace
from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.compat import CanonicalKVCaches, OffloadingConfig
from nixl_tiers.vllm.weights import UnknownWeights, identify, resolved_commit

FORMAT_VERSION: Final = 1
_REFUSED_UNLESS: Final = "storage tiers are refused unless"
# vLLM's loaders that read the weight files of the model's folder or snapshot, all of them the same set of files; and
# those that read another set of that folder. Any other loader may take weights from anywhere.
_USUAL_FORMATS: Final = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
_OTHER_FORMATS: Final = {
    *("pt", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state", "runai_streamer_sharded")
}
# Where the configuration came from, not what it is.
_INCIDENTAL: Final = {"_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype"}

# Options that change bytes of equal size, by the part of vLLM's configuration. What is left out changes the size of
# pages, the tokens, or rounding only.
_CACHE: Final = (
    *("kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill", "swa_bounded_replay"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
    *("use_replayssm", "replayssm_buffer_len", "use_kda_recoverssm"),
)
_ATTENTION: Final = ("indexer_kv_dtype", "use_non_causal")
_MULTIMODAL: Final = (
    *("mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "video_pruning_rate", "video_pruning_method"),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"),
)


class Fingerprint(NamedTuple):
    """`digest`: 16 bytes over all facts. `note`: empty, or one sentence: why storage tiers must be refused."""

    digest: bytes
    note: str


def fingerprint(
    config: OffloadingConfig,
    tiers: TiersConfig,
    geometry: Geometry,
    kv_caches: CanonicalKVCaches,
    vllm_config: Any,
    *,
    weights: Fingerprint,
) -> Fingerprint:
    """What this worker publishes. `vllm_config` is vLLM's VllmConfig, or None if unknown; `weights` comes
    from `weights_of`, in this worker or in another of the same engine."""
    facts: dict[str, object] = {"weights": weights.digest.hex()}
    if vllm_config is not None:
        facts |= model_facts(vllm_config, tiers)
    facts |= layout_facts(config, geometry, kv_caches)
    note = weights.note or (refusal(vllm_config, tiers) if vllm_config is not None else "")
    return Fingerprint(Namespace.of(facts).digest, note)


def weights_of(vllm_config: Any, tiers: TiersConfig) -> Fingerprint:
    """Which weights the engine runs, and those of its draft model. May read some GB of files, for seconds; nothing if
    there is no storage tier, because host memory is not shared with any other engine."""
    if not tiers.storage:
        return Fingerprint(bytes(NAMESPACE_BYTES), "")
    try:
        if vllm_config is None:
            raise UnknownWeights("vLLM did not give this worker its configuration")
        model = vllm_config.model_config
        facts: dict[str, object] = {"weights": _weights(model, vllm_config.load_config, tiers.model_id)}
        draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
        if draft is not None and draft.model != model.model:
            facts["draft_weights"] = _weights(draft, vllm_config.load_config, tiers.model_id)
    except UnknownWeights as unknown:
        return Fingerprint(bytes(NAMESPACE_BYTES), f"{_REFUSED_UNLESS} model_id is set, because {unknown}")
    return Fingerprint(Namespace.of(facts).digest, "")


def names_of(vllm_config: Any) -> tuple[str, str]:
    """For people: the model's name in vLLM's metrics, and the commit that its configuration came from, else the
    revision that was asked for."""
    model = getattr(vllm_config, "model_config", None)
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    revision = commit or getattr(model, "revision", None)
    return str(getattr(model, "served_model_name", None) or ""), str(revision or "")


def current_vllm_config() -> Any:
    """vLLM's configuration while it sets up a worker, else None."""
    from vllm.config import get_current_vllm_config_or_none

    return get_current_vllm_config_or_none()


def refusal(vllm_config: Any, tiers: TiersConfig) -> str:
    """Why storage tiers must be refused although the weights are known: one sentence, or empty."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if compat.block_hash_seed(algorithm) is None:
        return (
            f"{_REFUSED_UNLESS} PYTHONHASHSEED is set, because prefix_caching_hash_algo {algorithm} "
            "hashes differently in every process without it"
        )
    if vllm_config.lora_config is not None and not tiers.lora_storage:
        return (
            f"{_REFUSED_UNLESS} lora_storage is true, because LoRA is enabled and a block's hash knows "
            "an adapter's name but not its weights"
        )
    return ""


def model_facts(vllm_config: Any, tiers: TiersConfig) -> dict[str, object]:
    """Everything about the model and the engine's options that changes the KV bytes, but for the weights and for what
    only the layers show (`layers.py`)."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    return {
        "model_config": _digest(_plain(getattr(model, "hf_config", None))),
        "dtype": model.dtype,
        "quantization": model.quantization,
        "quantization_config": _digest(getattr(model, "quantization_config", None)),
        "multimodal": _digest(_fields(getattr(model, "multimodal_config", None), _MULTIMODAL)),
        "cache_dtype": cache.cache_dtype,
        "cache": _digest(_fields(cache, _CACHE)),
        "attention_options": _digest(_fields(getattr(vllm_config, "attention_config", None), _ATTENTION)),
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": compat.block_hash_seed(str(cache.prefix_caching_hash_algo)),
        "attention": _attention(vllm_config),
        "interleave": parallel.cp_kv_cache_interleave_size,
        "salt": tiers.salt,
    }


def layout_facts(config: OffloadingConfig, geometry: Geometry, kv_caches: CanonicalKVCaches) -> dict[str, object]:
    """How the bytes lie: what another engine must agree on to read this engine's rows."""
    version = compat.version()
    parallel = config.parallel
    # Ranks that share a cell count as one: rows of MLA are the same at every tensor-parallel size, but for rounding.
    copies = parallel.world_size // geometry.cells
    return {
        "format": FORMAT_VERSION,
        # The bytes inside a page belong to vLLM, which does not number their format.
        "vllm": "development" if version is None else f"{version[0]}.{version[1]}",
        "kv_dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "device": _device(kv_caches),
        "geometry": (geometry.cells, geometry.cell_payload, geometry.sub_blocks),
        "pages": [[ref.page_size_bytes for ref in refs] for refs in kv_caches.group_data_refs],
        "groups": [(group.tokens_per_block, *group.layer_names) for group in config.groups],
        "group_ids": compat.group_ids(config),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "parallel": [
            *(parallel.world_size // copies, parallel.tp_size // copies),
            *(parallel.pp_size, parallel.pcp_size, parallel.dcp_size),
        ],
    }


def _weights(model: Any, load_config: Any, model_id: str | None) -> str:
    if model_id is not None:
        return f"id:{model_id}"
    load_format = str(load_config.load_format)
    if load_format == "dummy":
        raise UnknownWeights("the weights are random (load_format dummy)")
    if load_format not in _USUAL_FORMATS | _OTHER_FORMATS:
        raise UnknownWeights(f"load_format {load_format} may take the weights from elsewhere than the model's files")
    if getattr(model, "model_weights", ""):
        raise UnknownWeights(f"the weights are streamed from {model.model_weights}")
    name = str(model.model)
    elsewhere = getattr(model, "hf_config_path", None) not in (None, name)
    commit = None if elsewhere else getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    revision, cache = getattr(model, "revision", None), getattr(load_config, "download_dir", None)
    known = identify(name, resolved_commit(name, revision, commit, cache))
    return known if load_format in _USUAL_FORMATS else f"{load_format}:{known}"


def _attention(vllm_config: Any) -> list[str]:
    """The attention backends in use: each arranges the inside of a page in its own way."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends = [layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")]
    return sorted({str(backend.get_name()) for backend in backends})


def _device(kv_caches: CanonicalKVCaches) -> str:
    """The kind of device; for CPUs with the instruction sets by which vLLM arranges the inside of a page."""
    kind = kv_caches.tensors[0].tensor.device.type
    if kind != "cpu":
        return str(kind)
    probes = ("_is_amx_tile_supported", "_is_avx512_supported")
    extensions = [probe for probe in probes if getattr(torch.cpu, probe, bool)()]
    return "-".join((platform.machine(), *extensions))


def _fields(config: Any, names: Sequence[str]) -> dict[str, object]:
    """Those fields of one of vLLM's configurations; None where this vLLM has no such field."""
    return {name: getattr(config, name, None) for name in names}


def _plain(hf_config: Any) -> Mapping[str, Any]:
    """The model's configuration as vLLM uses it, overrides applied, without the fields about its origin."""
    fields = hf_config.to_dict() if hasattr(hf_config, "to_dict") else {}
    return {name: value for name, value in fields.items() if name not in _INCIDENTAL}


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=_text)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).hexdigest()


def _text(value: object) -> object:
    """Values that JSON cannot represent. The order of a set differs between processes."""
    return sorted(map(str, value)) if isinstance(value, AbstractSet) else str(value)
