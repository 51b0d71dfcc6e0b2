"""Small models with random weights, for engines on a CPU."""

from __future__ import annotations

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
