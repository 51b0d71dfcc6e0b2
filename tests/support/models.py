"""Small models with random weights, for engines on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_random(architecture: str, to: Path, **differences: Any) -> Path:
    """A model of that class of transformers, of two layers unless `differences` in its configuration say otherwise.

    Its weights are the same every time, and so wide that it does not always say the same.
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
        setattr(config, name, value)  # also by names that transformers has others for, and vLLM reads
    model(config).save_pretrained(to)
    return to
