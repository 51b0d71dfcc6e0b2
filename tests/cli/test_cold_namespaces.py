"""`nixl-tiers config` says which stored namespaces an engine would not find, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nixl_tiers import cli
from nixl_tiers.base.manifest import MANIFEST_NAME, Description, Manifest, salt_digest
from nixl_tiers.cli.cold_namespaces import why_cold
from tests.support.file_tier import file_tier

OLD = Manifest("a" * 32, Description("my/model", vllm="0.32.0"), 4096, last_used=1_700_000_000)


@pytest.mark.parametrize(
    ("manifest", "salt", "vllm", "why"),
    [
        (OLD, "", "0.32.1+cpu", ""),
        (OLD, "", "0.33.0", "vLLM 0.32 wrote it, and 0.33 may arrange a page of KV cache otherwise"),
        (OLD, "", "0.31.0", "vLLM 0.32 wrote it, and 0.31 may arrange a page of KV cache otherwise"),
        (OLD, "", "", ""),
        (OLD, "pepper", "0.32.0", "it has another salt"),
        (Manifest("b" * 32, Description(vllm="0.32.0", salt=salt_digest("pepper")), 4096), "pepper", "0.32.0", ""),
        (
            Manifest("b" * 32, Description(vllm="0.32.0", salt=salt_digest("pepper")), 4096),
            "",
            "",
            "it has another salt",
        ),
        (Manifest("c" * 32, Description("a store"), 4096), "", "0.33.0", ""),
        (Manifest("d" * 32, Description(vllm="0.32.0"), 4096, epoch=2), "", "0.32.0", "its engine was reset after it"),
    ],
)
def test_reason_is_the_fact_that_differs(manifest: Manifest, salt: str, vllm: str, why: str) -> None:
    found = why_cold(manifest, salt, vllm)
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize("folder", ["part-0", "."])
def test_namespaces_of_both_layouts_are_named(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / folder / OLD.namespace
    home.mkdir(parents=True)
    (home / MANIFEST_NAME).write_bytes(OLD.encode())
    (tmp_path / "lost+found").mkdir()
    storage = file_tier(tmp_path, "1GiB")
    config = json.dumps({"tiers": [{"type": "cpu", "capacity": "64MiB"}, storage]})
    assert cli.main(["config", config, "--vllm", "0.33.1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if OLD.namespace in line)
    assert "my/model, last used 2023-11-14: goes cold: vLLM 0.32 wrote it" in line
    assert cli.main(["config", config, "--vllm", "0.32.9", "--json"]) == 0
    (stored,) = json.loads(capsys.readouterr().out)["stored"]
    assert (stored["namespace"], stored["why_cold"]) == (OLD.namespace, "")
