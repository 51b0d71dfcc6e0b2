"""What a tier says at its start of the rows of other namespaces that its medium holds."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import manifests
from tests.system.tiers.file_tiers import make_tier, store
from tests.system.tiers.test_manifests import LAYOUTS, run_until
from tests.tiers.test_other_namespaces import ABOUT

FIRST, SECOND = bytes(range(16)), bytes(range(16, 32))


@LAYOUTS
def test_file_tier_says_once_at_its_start_what_is_there_of_others(
    layout: str, tmp_path: Path, region: HostRegion, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(manifests, "CHECK_S", 0.01)

    def lines() -> list[str]:
        return [each.getMessage() for each in caplog.records if "which this engine does not find" in each.getMessage()]

    for namespace, model, said in [(FIRST, "org/old", 0), (SECOND, "org/new", 1), (FIRST, "org/old", 1)]:
        tier = make_tier(layout, tmp_path, region)
        tier.describe(msgspec.structs.replace(ABOUT, model=model))
        about = f"{namespace.hex()}/about.json"
        for epoch in (0, 1):  # a reset says nothing more
            tier.open(namespace, epoch)
            for _ in tier.list_rows():
                time.sleep(0.001)
            if not epoch:
                assert store(tier, region, range(3)) == [Outcome.OK] * 3
                run_until(tier, lambda about=about: any(tmp_path.rglob(about)))  # type: ignore[misc]
                run_until(tier, lambda said=said: len(lines()) == said)  # type: ignore[misc]
        tier.close()
        found = lines()
        caplog.clear()
        assert len(found) == said
        if said:
            old, new = ("org/old", "org/new") if namespace is SECOND else ("org/new", "org/old")
            assert f"model {old}, now {new}" in found[0]
            assert "another namespace" in found[0]
