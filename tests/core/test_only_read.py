"""A tier with `write: off`: the core has nothing deleted there, and makes no room."""

from __future__ import annotations

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import TierSpec
from tests.support.core import look_up_key, opened


@pytest.mark.parametrize("physical", [True, False])
def test_core_has_nothing_deleted_that_it_only_reads(physical: bool) -> None:
    core = TierManager(4, 4096, [TierSpec("file", Write.OFF, physical_slots=physical)])
    (tier,) = core.tiers
    opened(core, 0, 4)
    rows = [(n % 5, b"%d" % n, n) for n in range(8)]  # more than fit, and some in slots that are taken
    core.events.listed(0, rows, last=True)
    assert tier.index.make_room(4) == []
    assert len(tier.index.slots) == 4
    look_up_key(core, b"1", "request", None, 1.0)
    (job,) = core.turn(1.0, 1.0)
    core.events.finished(0, job.id, [Outcome.CORRUPT], 1.0)
    assert b"1" not in tier.index
    core.events.listed(0, [(-1, b"2", 9)], last=False)
    assert b"2" not in tier.index
    assert not tier.members[0].to_delete
