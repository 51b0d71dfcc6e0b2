"""examples/ and the Python example of the documents run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nixl_tiers.config import schema
from nixl_tiers.config.warnings import warnings_of
from tests.support.kubernetes import folder, render, rendered
from tests.test_guide import EXAMPLES, ROOT


@pytest.mark.smoke
def test_store_finds_in_a_second_process_what_the_first_has_put(tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "configs/laptop.json").read_text())
    config["tiers"][0]["capacity"] = "32MiB"
    config["tiers"][1] |= {"path": str(tmp_path / "kv"), "capacity": "64MiB", "min_free": 0}
    config |= {"wait_s": 120}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def run() -> str:
        command = [sys.executable, EXAMPLES / "store.py", tmp_path / "config.json"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True).stdout

    assert run() == "0 found, 16 computed\n"
    assert run() == "16 found, 0 computed\n"


def test_python_example_runs_when_pasted(tmp_path: Path) -> None:
    """As it is printed, but for the directory and the sizes."""
    page = (ROOT / "docs/reference/python-api.md").read_text()
    (code,) = re.findall(r"```python\n(import .*?)```", page, re.DOTALL)
    code, changed = re.subn(
        r'"/[\w/]+", "capacity": "10GiB"', f'"{tmp_path}/kv", "capacity": "64MiB", "min_free": 0', code
    )
    assert changed == 1
    names: dict[str, Any] = {}
    exec(code.replace('"1GiB"', '"16MiB"'), names)
    assert names["found"] == len(names["keys"])
    assert names["hits"] == [True] * len(names["keys"])


def test_eight_pods_are_those_of_the_overlay_with_one_larger_prefix() -> None:
    place = EXAMPLES / "eight-pods"
    overlay = yaml.safe_load((place / "kustomization.yaml").read_text())
    assert set(overlay) == {"apiVersion", "kind", "resources", "replicas", "images", "configMapGenerator"}
    assert [(place / path).resolve() for path in overlay["resources"]] == [folder("retained")]
    (pods,) = (part for part in render(place) if part["kind"] == "StatefulSet")
    assert pods["spec"]["replicas"] == 8
    by_kind = {part["kind"]: part for part in rendered("retained")}
    (container,) = by_kind["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (image,) = overlay["images"]
    assert overlay["replicas"] == [{"name": by_kind["StatefulSet"]["metadata"]["name"], "count": 8}]
    assert container["image"].startswith(f"{image['name']}:")
    (files,) = overlay["configMapGenerator"]
    assert by_kind["ConfigMap"]["metadata"]["name"].startswith(files["name"])
    assert (files["behavior"], files["files"]) == ("replace", list(by_kind["ConfigMap"]["data"]))
    before = schema.load(folder("retained") / "tiers.yaml")
    after = schema.load(place / "tiers.yaml")
    assert warnings_of(after) == []
    assert after.cpu == before.cpu, "else limits.memory does not fit"
    assert after.storage[0] == before.storage[0]
    ours, theirs = after.storage[1], before.storage[1]
    assert isinstance(ours, schema.S3Config)
    assert ours.model_copy(update={"capacity": theirs.capacity}) == theirs
    assert ours.capacity == 4 * theirs.capacity
