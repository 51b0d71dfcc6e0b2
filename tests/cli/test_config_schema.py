"""`nixl-tiers config --schema`: every configuration of the documentation agrees with it, and what `load` refuses for
its fields or their types does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nixl_tiers.cli import OK, main
from nixl_tiers.cli.config import schema_of
from nixl_tiers.config.schema import ConfigError, CpuConfig, FileConfig, S3Config, TiersConfig, load
from nixl_tiers.config.source import ours

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(?:yaml|json)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CPU = {"type": "cpu", "capacity": "1GiB"}
FILE = {"type": "file", "path": "/mnt/kv", "capacity": 1 << 30}


def documented() -> list[Any]:
    """Configurations, and single tiers as such behind a cpu tier."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in BLOCK.findall(page.read_text()):
            read = yaml.safe_load(block)
            if isinstance(read, list) and all(isinstance(each, dict) and "type" in each for each in read):
                found.append({"tiers": [CPU, *read]})
            elif isinstance(read, dict) and ("tiers" in read or "kv_connector" in read):
                found.append(ours(read))
    return found


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = schema_of()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == OK
    assert json.loads(capsys.readouterr().out) == schema_of()


def test_every_documented_configuration_agrees(validator: jsonschema.Draft202012Validator) -> None:
    found = documented()
    assert len(found) >= 10
    for each in found:
        validator.validate(each)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"tiers": CPU},
        {"tiers": [CPU], "wait": 1},
        {"tiers": [CPU], "wait_s": 3601},
        {"tiers": [CPU], "wait_s": 0},
        {"tiers": [CPU], "replicas": "2"},
        {"tiers": [CPU], "on_reset": "no"},
        {"tiers": [CPU | {"capacity": [1]}]},
        {"tiers": [{"type": "cpu"}]},
        {"tiers": [CPU, FILE | {"pth": "/mnt"}]},
        {"tiers": [CPU, FILE | {"write": "sometimes"}]},
        {"tiers": [CPU, FILE | {"movers": 1}]},
        {"tiers": [CPU, {"type": "s3", "capacity": "1GiB"}]},
        {"tiers": [CPU], "quotas": {"*": {"share": 20}}},
    ],
)
def test_what_is_refused_for_its_fields_disagrees(given: Any, validator: jsonschema.Draft202012Validator) -> None:
    with pytest.raises(ConfigError):
        load(given)
    assert not validator.is_valid(given)


def test_every_field_is_there_with_its_meaning() -> None:
    schema = schema_of()
    parts = {"": schema, **schema["$defs"]}
    for model in (TiersConfig, CpuConfig, FileConfig, S3Config):
        declared = parts["" if model is TiersConfig else model.__name__]["properties"]
        assert set(declared) == set(model.model_fields)
        assert all(each["description"] for each in declared.values())
