"""examples/: every configuration is one that `nixl-tiers config` accepts without a warning, and every script runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Final

import pytest
import yaml

from nixl_tiers import cli
from nixl_tiers.config import schema
from nixl_tiers.config.warnings import warnings_of
from tests.support.kubernetes import folder, rendered

ROOT: Final = Path(__file__).parents[1]
EXAMPLES: Final = ROOT / "examples"
CONFIGS: Final = sorted((EXAMPLES / "configs").iterdir())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configuration_is_accepted_and_not_warned_of(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that `examples/README.md` has."""
    assert cli.main(["config", "--elsewhere", str(path)]) == 0, capsys.readouterr()
    assert capsys.readouterr().out.startswith("the configuration is valid\n")


def test_page_has_every_configuration() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert len(CONFIGS) >= 6
    assert [path.name for path in CONFIGS if f"`{path.name}`" not in page] == []


def test_offline_example_gives_vllm_a_configuration_that_is_read() -> None:
    transfer = runpy.run_path(str(EXAMPLES / "offline.py"))["kv_transfer"](str(EXAMPLES / "configs/laptop.json"))
    assert [tier.type for tier in schema.load(json.dumps(transfer)).tiers] == ["cpu", "file"]


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
    assert ours.shared
    assert ours.model_copy(update={"capacity": theirs.capacity}) == theirs
    assert ours.capacity == 4 * theirs.capacity
