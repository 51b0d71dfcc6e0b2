"""Third-party types of tiers, and the errors of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.config import schema
from nixl_tiers.config.schema import ConfigError
from tests.support.refusals import refusal

MODULE = """
from typing import ClassVar
from nixl_tiers.config.tier import AbsolutePath, EnvironmentName, StorageConfig

class TapeConfig(StorageConfig):
    drive: int
    password_env: EnvironmentName = None
    token_file: AbsolutePath | None = None
    implementation: ClassVar[str] = "tape_of_tests:Missing"

class KeyConfig(TapeConfig):
    api_key: str

class NoImplementation(StorageConfig):
    pass

class NoConfig:
    pass
"""
TAPE = {"type": "tape_of_tests:TapeConfig", "capacity": "1TiB", "drive": 3}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tape_of_tests.py").write_text(MODULE)
    (tmp_path / "broken_of_tests.py").write_text("raise ZeroDivisionError('two\\nlines')\n")
    about = tmp_path / "tape-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tape\nVersion: 1\n")
    names = {"tape": "TapeConfig", "file": "TapeConfig"}
    lines = [f"{name} = tape_of_tests:{kind}" for name, kind in names.items()]
    (about / "entry_points.txt").write_text("\n".join(["[nixl_tiers.tiers]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)


def config(*tiers: dict[str, Any]) -> dict[str, Any]:
    return {"tiers": [{"type": "cpu", "capacity": "1GiB"}, *tiers]}


@pytest.mark.parametrize("kind", ["tape_of_tests:TapeConfig", "tape"])
def test_third_party_tier_has_a_name_and_round_trips_as_json(kind: str) -> None:
    read = schema.load(config(TAPE | {"type": kind}))
    assert read.names == ("tape",)
    (tier,) = read.storage
    raw = schema.tier_to_dict(tier)
    assert raw["drive"] == 3
    assert schema.tier_from_dict(json.loads(json.dumps(raw))) == tier


@pytest.mark.parametrize(
    ("tier", "sentence"),
    [
        ({"type": "nowhere.to.be:Found"},
         'type: "nowhere.to.be:Found" cannot be imported (ModuleNotFoundError: No module named \'nowhere\')'),
        ({"type": "broken_of_tests:X"},
         'type: "broken_of_tests:X" cannot be imported (ZeroDivisionError: two lines)'),
        ({"type": "tape_of_tests:Nothing"}, 'type: "tape_of_tests:Nothing" cannot be imported (AttributeError: '),
        ({"type": "tape_of_tests:NoConfig"},
         'type: "tape_of_tests:NoConfig" is not a class that derives from nixl_tiers.config.tier.StorageConfig'),
        ({"type": "tape_of_tests:NoImplementation", "capacity": 1},
         'type: tape_of_tests:NoImplementation has no implementation ("package.module:Name")'),
        ({"type": "tap"}, 'type: must be "cpu", "file" or "s3", not "tap"; the type of a third-party tier is'),
        ({"type": "os:system('x')"}, 'type: must be "cpu", "file" or "s3", not "os:system(\'x\')"'),
        ({"type": "tape"}, "capacity: this field is missing"),
        (TAPE | {"drives": 4}, 'drives: unknown field; did you mean "drive"?'),
        (TAPE | {"bucket": 4}, 'bucket: unknown field here; it belongs to "s3"'),
        (TAPE | {"password_env": "wJalrXU/K7MD+bPx"}, "password_env: must be the name of an environment variable"),
        (TAPE | {"token_file": "hunter2"}, 'token_file: must be an absolute path, and "hunter2" is relative'),
        ({"type": "tape_of_tests:KeyConfig", "api_key": "hunter2"},
         "api_key: a secret must not be in the configuration"),
    ],
)  # fmt: skip
def test_error_is_one_sentence_that_names_the_field(tier: dict[str, Any], sentence: str) -> None:
    assert refusal(config(tier)).startswith(f"tiers[1].{sentence}")
    with pytest.raises(ConfigError) as error:
        schema.tier_from_dict(tier)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_field_may_point_to_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAPE_PASSWORD", raising=False)
    read = schema.load(config(TAPE | {"password_env": "TAPE_PASSWORD", "token_file": "/etc/token"}))
    assert read.storage[0].secret_variables == ["TAPE_PASSWORD"]
    with pytest.raises(ConfigError, match=r"^tiers\[1\]\.password_env: the environment variable TAPE_PASSWORD is not"):
        schema.check_paths(read)
    monkeypatch.setenv("TAPE_PASSWORD", "x")
    schema.check_paths(read)
