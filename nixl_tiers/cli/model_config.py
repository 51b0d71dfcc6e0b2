"""A model's config.json: in a directory, a file, or the hub's cache on this machine. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from nixl_tiers.cli.output import InputError


def read_config(model: str) -> dict[str, Any]:
    """With what ModelOpt keeps in a file beside it, as vLLM reads it. Raises InputError."""
    given = Path(model)
    place = given if given.exists() else _snapshot(model)
    file = place if place.is_file() else place / "config.json"
    config = _read(file)
    beside = file.with_name("hf_quant_config.json")
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = _read(beside)
    return config


def _read(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text())
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from None
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise InputError(f"{file} is not a model's config.json: it holds no JSON object")
    return read


def _snapshot(model: str) -> Path:
    """Of the default branch, or the only one."""
    env = os.environ.get
    home = env("HF_HOME") or Path(env("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    given = env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")
    hub = Path(os.path.expandvars(given)).expanduser()
    folder = hub / f"models--{model.replace('/', '--')}"
    try:
        return folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        found = [*(folder / "snapshots").glob("*")]
    if len(found) != 1:
        raise InputError(f"{model} is no directory with a config.json, and not in {hub}; nothing is downloaded")
    return found[0]
