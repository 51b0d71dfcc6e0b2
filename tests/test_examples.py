"""examples/: every configuration is one that `nixl-tiers config` accepts without a warning, and every script runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Final

import pytest

from nixl_tiers import cli
from nixl_tiers.config import schema

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
