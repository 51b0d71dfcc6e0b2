"""What vLLM keeps for each layer of models: builds their layers, without weights and without an engine.

    python model_layers.py PLAN RESULT        both JSON files

Plan: [[directory of a config.json, {"kv_cache_dtype": ...}, tensor-parallel ranks], ...]. Result: for each of them
{"layers": [[bytes of a token on one rank, window or null], ...], "groups": [layers of each KV group, ...]}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import vllm_cpu


def layers(directory: str, options: dict[str, Any], ranks: int) -> dict[str, Any]:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    except ImportError:  # its place since 0.33
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

    with built(directory, options, ranks) as config:
        context = config.compilation_config.static_forward_context
        made = {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}
        specs = {name: spec for name, layer in made.items() if (spec := layer.get_kv_cache_spec(config))}
        # Workers and the engine's core agree on one. All pages of a model are of one size here: any will do.
        config.cache_config.kv_cache_layout = "LBNHC"
        kept = [[s.page_size_bytes // s.block_size, getattr(s, "sliding_window", None)] for s in specs.values()]
        groups = [len(group.layer_names) for group in get_kv_cache_groups(config, specs)]
    return {"layers": kept, "groups": groups}


@contextmanager
def built(directory: str, options: dict[str, Any], ranks: int) -> Iterator[Any]:
    """vLLM's configuration for the model, while that of the first rank is there."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(model=directory, skip_tokenizer_init=True, enforce_eager=True, **options)
    config = arguments.create_engine_config()
    rotary_embedding._ROPE_DICT.clear()  # of the model before
    numbers = torch.get_default_dtype()
    with tempfile.TemporaryDirectory() as place, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{place}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        # The layers ask the group for its size and make their own part, without the others.
        parallel_state.get_tp_group().world_size = ranks
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                model = initialize_model(config)
        finally:
            torch.set_default_dtype(numbers)
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
        yield config
        del model


def main() -> None:
    vllm_cpu.supply_metadata()
    os.environ.update(vllm_cpu.environment())
    from vllm.model_executor.models import registry

    plan, result = map(Path, sys.argv[1:])
    # Instead of in a process of its own for each model, which takes seconds.
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    plans = json.loads(plan.read_text())
    result.write_text(json.dumps([layers(*given) for given in plans]))


if __name__ == "__main__":
    main()
