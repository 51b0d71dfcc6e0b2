"""Host memory comes piece by piece (memory/backing.py), and may end early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import TierSpec
from nixl_tiers.runtime.copies import take_memory
from tests.support import inside

ROWS, READY = 1000, 200


def core_of(rows: int) -> TierManager:
    return TierManager(rows, 1 << 20, [TierSpec("file", Write.THROUGH, physical_slots=True)], quotas=(0.5, 0.25))


def bounds(core: TierManager) -> list[Any]:
    state = inside.state(core)
    return [state.load_window, state.store_window, state.demote_window, core.host.quotas]


@pytest.fixture
def core() -> TierManager:
    core = core_of(ROWS)
    core.host.limit = 0
    return core


def come(core: TierManager, ready: int, *, lacks: bool = False) -> None:
    region: Any = SimpleNamespace(ranks=SimpleNamespace(ready_rows=ready), lacks_memory=lacks)
    take_memory(core, region)


def test_bounds_are_of_all_rows_while_memory_comes(core: TierManager) -> None:
    for ready in (0, READY, ROWS):
        come(core, ready)
        assert (core.host.limit, bounds(core)) == (ready, bounds(core_of(ROWS)))


def test_bounds_are_of_the_rows_there_are_where_memory_ends_early(core: TierManager) -> None:
    """A tenant with half of all rows would have had more than there were."""
    come(core, READY)
    come(core, READY, lacks=True)
    assert (core.host.limit, core.host.grows) == (READY, False)
    assert bounds(core) == bounds(core_of(READY))
    assert core.host.quotas == (READY // 2, READY // 4)


def test_bounds_are_of_all_rows_where_these_are_used_without_memory_ahead(core: TierManager) -> None:
    """That there is none is known a moment before the rows are given out."""
    come(core, READY, lacks=True)
    come(core, ROWS, lacks=True)
    assert (core.host.limit, bounds(core)) == (ROWS, bounds(core_of(ROWS)))
