"""Requests that wait for their turn, and prefetches: what comes up for them, and what gives way to whom."""

from __future__ import annotations

from collections.abc import Sequence

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefetch_queue import MAX_PREFETCHES
from nixl_tiers.core.types import Direction
from tests.core.test_manager import HIT, PENDING, manager, run, scan
from tests.support import inside
from tests.support.core import anticipate

FIRST = (0.0,)


def chain(name: str, length: int = 4) -> list[Key]:
    return [f"{name}{number}".encode() for number in range(length)]


def stored(*chains: Sequence[Key], rows: int, **limits: float) -> TierManager:
    """A core whose one tier holds these chains and whose host holds nothing."""
    core = manager(rows, **limits)
    keys = [key for each in chains for key in each]
    core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
    return core


def wait_in_line(core: TierManager, name: str, keys: Sequence[Key], rank: tuple[float, ...]) -> None:
    """The request arrives, and a step passes it over."""
    anticipate(core, name, keys, rank)
    core.end_step()


def come_up(core: TierManager, outcome: Outcome = Outcome.OK) -> list[Key]:
    """All promotions that are planned one after the other, carried out: their keys in order."""
    keys = []
    while jobs := core.events.plan(0.0):
        keys += [move.key for job in jobs for move in job.moves if job.direction is Direction.LOAD]
        run(core, jobs, outcome)
    return keys


def in_host(core: TierManager, keys: Sequence[Key]) -> int:
    return sum(core.where([key])[0] == "cpu" for key in keys)


def test_request_finds_its_rows_in_host_memory_when_its_turn_comes() -> None:
    a, b = chain("a"), chain("b")
    core = stored(a, b, rows=16)
    wait_in_line(core, "b", b, (1.0,))
    wait_in_line(core, "a", a, FIRST)
    assert come_up(core) == [*a, *b], "in the order of their turns"
    assert scan(core, a, "a") == [HIT] * 4
    core.prepare_load("a", a, 0.0)
    core.complete_load("a", 0.0)
    core.end_step()
    assert scan(core, b, "b", now=1e6) == [HIT] * 4, "its time in the queue is no waiting"
    assert not inside.line_is_busy(core)


def test_request_whose_turn_comes_at_once_gets_nothing_before_it_is_looked_up() -> None:
    """It may well choose to compute: its look-up weighs that, and a promotion before it would be in vain."""
    a = chain("a")
    core = stored(a, rows=16)
    anticipate(core, "a", a, FIRST)
    assert core.events.plan(0.0) == []
    assert not core.events.busy, "nothing wakes the supervisor either"
    core.end_step()
    assert core.events.busy
    assert come_up(core) == a, "a step has passed it over"


def test_line_gives_way_to_a_request_whose_turn_has_come() -> None:
    a, b = chain("a"), chain("b", 8)
    core = stored(a, b, rows=8)
    wait_in_line(core, "a", a, FIRST)
    come_up(core)
    assert scan(core, b, "b") == [PENDING] * 8
    jobs = core.events.plan(0.0)
    assert [move.key for job in jobs for move in job.moves] == b, "all at once"
    run(core, jobs)
    core.end_step()
    assert scan(core, b, "b") == [HIT] * 8
    core.finish("b")
    core.end_step()
    assert scan(core, a, "a") == [PENDING] * 4, "it gets them at its turn"


def test_line_of_prefetches_is_bounded() -> None:
    core = stored(rows=8)
    for number in range(1000):
        core.prefetch([b"%d-%d" % (number, place) for place in range(4)])
    assert len(inside.line(core)) == MAX_PREFETCHES
