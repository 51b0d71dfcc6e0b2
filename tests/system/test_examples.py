"""examples/: every configuration is one that `nixl-tiers config` accepts without a warning, and every script runs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import yaml

import nixl_tiers
from nixl_tiers.config import schema
from nixl_tiers.config.warnings import warnings_of
from tests.support.kubernetes import folder, render, rendered
from tests.support.servers import MotoServer
from tests.support.waiting import until, until_up
from tests.test_examples import EXAMPLES, ROOT

CHUNK: Final = 100_000


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


def test_two_stores_with_the_same_bucket_find_each_others_chunks(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file that `examples/README.md` gives to two engines."""
    for name, value in moto.env.items():
        monkeypatch.setenv(name, value)
    config = json.loads((EXAMPLES / "configs/diskless-s3.json").read_text())
    config["tiers"][0]["capacity"] = "4MiB"
    config["tiers"][1] |= {"bucket": moto.make_bucket("examples"), "endpoint": moto.endpoint}
    config |= {"wait_s": 120}
    row = np.arange(CHUNK, dtype=np.uint32).astype(np.uint8)[None]
    tries = itertools.count(1)
    with nixl_tiers.open(config, CHUNK, "n") as one, nixl_tiers.open(config, CHUNK, "n") as other:
        until_up(one, other)

        def uploads() -> bool:
            """Before there is an account of the prefix, nothing is written there."""
            one.put([b"%d" % next(tries)], row)
            return one.flush(10) and one.stats()["s3"]["rows"] > 0

        until(uploads, "the account of the prefix")
        key = b"%d" % (next(tries) - 1)
        found = np.zeros_like(row)
        until(lambda: other.get([key], found) == [True], "the other engine's chunk")
        assert (found == row).all()
        assert other.stats()["s3"]["hits"] == 1


def test_eight_pods_are_rendered() -> None:
    (pods,) = (part for part in render(EXAMPLES / "eight-pods") if part["kind"] == "StatefulSet")
    assert pods["spec"]["replicas"] == 8
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.corp/vllm-nixl-tiers:1"


def test_eight_pods_are_those_of_the_overlay_with_one_larger_prefix() -> None:
    place = EXAMPLES / "eight-pods"
    overlay = yaml.safe_load((place / "kustomization.yaml").read_text())
    assert set(overlay) == {"apiVersion", "kind", "resources", "replicas", "images", "configMapGenerator"}
    assert [(place / path).resolve() for path in overlay["resources"]] == [folder("retained")]
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
