"""Where a configuration is read from: JSON and YAML files, JSON text, and the whole value of --kv-transfer-config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.config import schema
from nixl_tiers.config.schema import ConfigError
from tests.support.refusals import refusal

CPU = {"type": "cpu", "capacity": "1GiB"}
# A few lines that stand for 10^12 values.
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
FILE = {"type": "file", "path": "/mnt/nvme/kv", "capacity": "10GiB"}


def full() -> dict[str, Any]:
    return {"tiers": [dict(CPU), dict(FILE)]}


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("a.json", "{", "not valid JSON in line 1"),
        ("a.yaml", "tiers: []\ntiers: []\n", "tiers: duplicate field"),
        ("a.json", '{"tiers": [], "tiers": []}', "tiers: duplicate field"),
        ("a.json", " \n", "is empty"),
        (
            "a.yaml",
            "salt: a\ntiers: [\nsalt: b\n",
            "not valid YAML in line 4 (expected ',' or ']', but got '<stream end>', begun in line 2)",
        ),
        ("a.yaml", "tiers: []\n---\ntiers: []\n", "not valid YAML in line 2"),
        ("a.yaml", "salt: a\n\nsalt: b\n", "salt: duplicate field in the same table (line 3)"),
        ("a.json", '{"tiers": [{"type": "cpu", "type": "cpu"}]}', "type: duplicate field"),
        ("a.json", "[" * 100_000, "not valid JSON (nested too deeply)"),
        ("a.json", '{"wait_s": ' + "9" * 5000 + "}", "not valid JSON (a value that cannot be read)"),
        ("a.yaml", "salt: 2024-13-45", "not valid YAML (a value that cannot be read)"),
        ("a.yaml", "tiers: &a [*a]", "tiers: is nested too deeply"),
        ("a.yaml", BOMB, "tiers: has more values than"),
        ("a.json", '{"config": "b.json"}', "config: points to another file"),
        ("a.json", "#" * (1 << 20) + "#", "is larger than 1 MiB"),
        ("a.yaml", "tiers: [{type: cpu, capacity: 1XB}]", 'tiers[0].capacity: "1XB" has an unknown unit'),
        ("a.yaml", "!!python/object/apply:os.getpid []", "not valid YAML"),
    ],
)
def test_error_names_the_file(tmp_path: Path, name: str, text: str, rest: str) -> None:
    (tmp_path / name).write_text(text)
    assert refusal(tmp_path / name).startswith(f"{tmp_path / name}: {rest}")


def test_endless_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("/dev/zero")
    assert refusal(tmp_path / "a.yaml") == f"{tmp_path / 'a.yaml'}: is larger than 1 MiB, so it is no configuration"
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{}")
    assert refusal(tmp_path / "a.json") == f"{tmp_path / 'a.json'}: is not UTF-8 text"


@given(st.text(alphabet="tiers:[]{}-?!&*<|>#%@`\"',\n\t 0129._~abxy", max_size=40))
def test_junk_in_a_file_raises_only_config_errors(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    for name in ("junk.yaml", "junk.json"):
        path = tmp_path_factory.getbasetemp() / name
        path.write_text(text)
        with pytest.raises(ConfigError, match="junk"):
            schema.load(path)


def transfer(**changes: Any) -> dict[str, Any]:
    extra = {"spec_name": "NixlTiersSpec", "spec_module_path": "nixl_tiers.vllm.spec", "block_size": 32}
    whole = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra | full()}
    return whole | changes


def test_whole_kv_transfer_config_is_accepted(tmp_path: Path) -> None:
    expected = schema.load(full())
    (tmp_path / "tiers.yaml").write_text(yaml.safe_dump(full()))
    pointing = {"spec_name": "NixlTiersSpec", "config": str(tmp_path / "tiers.yaml")}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"}, transfer()]}}  # fmt: skip
    extra = transfer()["kv_connector_extra_config"]
    for whole in (transfer(), transfer(kv_connector_extra_config=pointing), multi, extra, pointing):
        (tmp_path / "transfer.json").write_text(json.dumps(whole))
        for source in (whole, json.dumps(whole), "\n " + json.dumps(whole), tmp_path / "transfer.json"):
            assert schema.load(source) == expected
    assert schema.load(json.dumps(full())) == expected


@pytest.mark.parametrize(
    ("source", "start"),
    [
        (transfer(kv_connector="NixlConnector"), 'kv_connector: must be "OffloadingConnector" or "NixlTiersConnector"'),
        ({"kv_connector": "OffloadingConnector"}, "kv_connector_extra_config: must be a table"),
        (transfer(kv_connector_extra_config={"tiers": []}), 'kv_connector_extra_config.spec_name: must be "NixlTiers'),
        (transfer(kv_connector_extra_config={"connectors": [7, {}]}), "kv_connector_extra_config.connectors: none"),
        (transfer(kv_connector_extra_config={"spec_name": "NixlTiersSpec"}), "tiers: this field is missing"),
        ('{"tiers": [', "the configuration: not valid JSON in line 1"),
        (json.dumps([CPU]), "tiers: this field is missing"),
        ('{"tiers": [], "tiers": []}', "the configuration: tiers: duplicate field"),
    ],
)
def test_kv_transfer_config_without_tiers_is_refused(source: Any, start: str) -> None:
    assert refusal(source).startswith(start)
