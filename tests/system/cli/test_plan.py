"""`nixl-tiers plan MODEL [CONFIG]`: a tier that is really tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.cli.checks import tiers
from nixl_tiers.cli.checks.finding import Finding
from nixl_tiers.cli.checks.trial import NAME
from tests.cli.test_plan import LLAMA_8B, answer, configured

__all__ = ["answer", "configured"]  # fixtures


def test_disk_is_tried_with_rows_of_the_plan_and_left_as_it_was(
    answer: Callable[..., dict[str, Any]],
    configured: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Finding] = []

    def examine(*given: Any, **geometry: Any) -> Iterator[Finding]:
        for finding in real(*given, **geometry):
            tried.append(finding)
            yield finding

    real = tiers.examine
    monkeypatch.setattr(tiers, "examine", examine)
    host, disk = answer(LLAMA_8B, configured(), "--prefill", "1e12", "--tp", "2")["tiers"]
    assert host["read_bytes_per_s"] is None
    assert host["tokens"] == disk["tokens"] == (1 << 30) // (8_388_608 + 4096) * 64
    (found,) = [finding for finding in tried if finding.name == NAME]
    assert "31 rows of 8 MiB written" in found.text
    assert disk["read_bytes_per_s"] == found.details["read_bytes_per_s"] > 0
    assert disk["verdict"].endswith(": this disk will not be loaded from")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tiers.json"}
