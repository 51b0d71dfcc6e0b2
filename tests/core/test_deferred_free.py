"""Rows are not tracked by Python's garbage collector: a full collection stops the scheduler."""

from __future__ import annotations

import gc

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import TierSpec
from tests.support.core import all_good, opened

ROWS = 4096
CHUNKS = 16  # a request


def test_garbage_collector_does_not_track_rows() -> None:
    core = TierManager(ROWS, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    opened(core, 0, ROWS)
    core.events.listed(0, [], last=True)
    before, walked_before = tracked(), walked()
    for number in range(ROWS // CHUNKS):
        keys = [b"%d %d" % (number, chunk) for chunk in range(CHUNKS)]
        plan = core.prepare_store(f"{number}", keys)
        core.complete_store(plan.keys, all_good)
        core.finish(f"{number}")
        core.end_step()
        for job in core.events.plan(0.0):
            core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), 0.0)
    del job, keys, plan
    core.take_samples()  # of histograms, which a scheduler takes in every step
    assert core.host.used == len(core.tiers[0].index) == ROWS
    assert tracked() - before < 100
    assert walked() - walked_before < ROWS // 2, "a container that the collector walks over has all rows"


def tracked() -> int:
    gc.collect()
    return len(gc.get_objects())


def walked() -> int:
    """What a full collection looks at."""
    return sum(len(gc.get_referents(one)) for one in gc.get_objects())
