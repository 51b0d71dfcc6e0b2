"""From a configuration to its tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config import schema
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.testing.config import with_faults
from nixl_tiers.tiers.base import make_tier
from tests.support.file_tier import file_tier
from tests.support.times import PATIENT


@pytest.mark.parametrize("faulty", [False, True], ids=["itself", "with-faults"])
@pytest.mark.parametrize("kind", ["slabs", "files", "s3"])
def test_a_tier_is_given_the_times_of_its_mover(tmp_path: Path, kind: str, faulty: bool) -> None:
    given = file_tier(tmp_path, "16MiB", layout=kind)
    if kind == "s3":
        given = {"type": "s3", "bucket": "kv-times", "capacity": "16MiB"}
    config = schema.load({"tiers": [{"type": "cpu", "capacity": "1MiB"}, given]})
    (storage,) = (with_faults(config, {}) if faulty else config).storage
    with HostRegion.create(Geometry(1, 60_000), 4) as region:
        made: Any = make_tier(schema.tier_to_dict(storage), region.geometry, region, times=PATIENT)
        tier = made._inner if faulty else made
        held = vars(tier._control if kind == "s3" else tier)
        assert held.get("times", held.get("_times")) == PATIENT
        made.close()
