"""Small models with random weights, for engines on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_random(architecture: str, to: Path, **differences: Any) -> Path:
    """Save a model of that class of transformers, with two layers; `differences` override fields of its configuration.

    Its weights are the same every time, with a variance at which it does not repeat one token.
    """
    import torch
    import transformers

    model = getattr(transformers, architecture)
    fields = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.05,
    }
    torch.manual_seed(1)
    config = model.config_class(**fields | differences)
    for name, value in differences.items():
        setattr(config, name, value)  # also fields that vLLM reads under another name than transformers
    model(config).save_pretrained(to)
    return to


def save_adapter(model: Path, to: Path, seed: int) -> Path:
    """Save a LoRA adapter with random weights for `model`, of which it changes the queries."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"] * config["head_dim"], 8
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        weights[name + "A.weight"] = torch.randn(rank, hidden, generator=generator) / 4
        weights[name + "B.weight"] = torch.randn(heads, rank, generator=generator) / 4
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    to.mkdir()
    (to / "adapter_config.json").write_text(json.dumps(fields))
    save_file(weights, to / "adapter_model.safetensors")
    return to
