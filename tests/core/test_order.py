"""What the core does depends on what happened to it, and not on the order in which a set of keys gives them.

That order is another in each process (PYTHONHASHSEED), so that no run could be repeated, and no failure either.
"""

from __future__ import annotations

from itertools import permutations

from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import TierSpec
from tests.support.core import look_up_key, opened, put


def test_victims_leave_a_tier_in_the_order_in_which_they_were_selected() -> None:
    tier = Tier(TierSpec("file", Write.THROUGH, physical_slots=True), 0)
    index = tier.index
    index.set_limit(tier.members[0], 32)
    keys = [b"%03d" % number for number in range(32)]
    for slot, key in enumerate(keys):
        index.add_listed(slot, key, tick=slot)
    assert index.select_victims(24) == keys[:24]
    assert index.make_room(16) == keys[:16]


def test_rows_that_could_not_be_copied_leave_in_prefix_order() -> None:
    keys = [b"a", b"ab", b"abc"]
    core = TierManager(8, 4096, [])
    put(core, keys)
    gone: list[bytes] = []
    core.host.changed = gone.append
    core.prepare_load("request", keys, 0.0)
    core.complete_load("request", 0.0, failed=True)
    assert gone == keys


def test_waits_of_preempted_requests_are_samples_in_the_order_of_their_names() -> None:
    for order in permutations(["a", "b", "c"]):
        core = TierManager(8, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
        opened(core, 0, 8)
        core.events.listed(0, [(slot, key, 0) for slot, key in enumerate([b"a", b"b", b"c"])], last=True)
        for began_s, name in enumerate(["a", "b", "c"]):
            assert look_up_key(core, name.encode(), name, 0, float(began_s)) is Lookup.PENDING
        core.end_step()
        for name in ["a", "b", "c"]:
            look_up_key(core, name.encode(), name, 0, 3.0)
        core.end_step(preempted=order)
        assert core.take_samples()["file", "wait_vain"] == [3.0, 2.0, 1.0]
