"""From a configuration to its tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config import schema
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, decode_to_coordinator, encode, sendable_text
from nixl_tiers.testing.config import with_faults
from nixl_tiers.tiers.base import expire_if_due, expired, make_tier, sweep_s
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


def test_what_is_too_old_and_how_often_to_look() -> None:
    now, age_s = 1_800_000_000.0, 3600.0
    ages = [0.0, now - age_s - 1, now - age_s, now - age_s + 1, now, now + 1e8]
    old = [True, True, True, False, False, False]
    assert [expire_if_due(sealed_at, now, age_s) for sealed_at in ages] == old
    assert expired(np.array(ages, np.uint32), now, age_s).tolist() == old
    assert not expire_if_due(0.0, now, None)
    assert [sweep_s(age_s) for age_s in (1.0, 600.0, 86400.0)] == [0.1, 60.0, 60.0]


def test_name_of_a_foreign_file_that_is_no_utf8_can_be_sent() -> None:
    reason = sendable_text(f"{os.fsdecode(bytes([255]))} cannot be read" + "x" * 5000)
    found = decode_to_coordinator(encode(Down(reason, 0)))
    assert isinstance(found, Down)
    assert found.reason.startswith("\\udcff cannot be read")
