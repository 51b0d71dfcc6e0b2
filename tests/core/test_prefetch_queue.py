"""Requests that wait for their turn, and prefetches: what comes up for them, and what gives way to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefetch_queue import MAX_PREFETCHES
from nixl_tiers.core.types import Direction
from tests.core.test_manager import HIT, PENDING, manager, run, scan
from tests.support import inside
from tests.support.core import all_good, anticipate, put

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


def test_line_queues_no_more_than_the_window_of_loads() -> None:
    """However fast the tier is: one whose turn comes is next when these have come."""
    a, b = chain("a", 16), chain("b", 2)
    core = stored(a, b, rows=64, ahead_s=1e3)
    inside.state(core).load_window = 4
    wait_in_line(core, "a", a, FIRST)
    jobs = core.events.plan(0.0)
    assert scan(core, b, "b") == [PENDING] * 2
    run(core, jobs)
    assert come_up(core)[:2] == b


def test_line_holds_its_share_of_the_host_and_no_more() -> None:
    a, b, c = chain("a"), chain("b"), chain("c")
    core = stored(a, b, c, rows=12)
    for number, keys in enumerate((a, b, c)):
        wait_in_line(core, f"r{number}", keys, (number,))
    assert come_up(core) == [*a, *b[:2]]
    other = chain("other", 12)
    put(core, other)
    assert (in_host(core, a), in_host(core, b), in_host(core, other)) == (4, 2, 6), "and keeps them"
    core.finish("r0")
    assert come_up(core) == [*b[2:], *c[:2]]


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


def test_prefetch_brings_rows_up_and_leaves_them_unpinned() -> None:
    a = chain("a")
    core = stored(a, rows=8)
    core.prefetch([a[0], b"nowhere", *a[1:]])
    assert come_up(core) == a
    assert not inside.pinned(core)
    assert not inside.promotion(core).busy
    assert scan(core, a, "get") == [HIT] * 4


def test_request_that_begins_without_a_look_up_leaves_the_line() -> None:
    """The engine's own cache had all of its prompt when its turn came."""
    a, b = chain("a"), chain("b")
    core = stored(a, b, rows=8, line_requests=1)
    wait_in_line(core, "a", a, FIRST)
    wait_in_line(core, "b", b, (1.0,))
    assert come_up(core) == a
    core.end_step(began=["a"])
    assert come_up(core) == b, "the next is no longer behind it"
    put(core, chain("other", 4))
    assert (in_host(core, a), in_host(core, b)) == (0, 4)


def test_line_that_can_only_wait_leaves_no_work() -> None:
    """The supervisor would go on at once with work that is left, and take a core."""
    chains = [chain(name) for name in "abcdef"]
    core = stored(*chains, rows=32, rows_per_slice=2, ahead_s=0.0)  # so that nothing is queued behind the first row
    for place, keys in enumerate(chains):
        wait_in_line(core, f"r{place}", keys, (float(place),))
    turns = 0
    while core.events.turn(0.0, 0.0) or core.events.unfinished:
        turns += 1
        assert turns < 100, "it never rests"
    assert core.events.busy, "and there is something to promote when a load has ended"


def test_turn_with_a_host_full_of_pinned_rows_walks_over_no_queue() -> None:
    """Every turn asks, on the thread that starts the loads, and hundreds of requests may wait."""

    class Unwalked(dict):  # type: ignore[type-arg]
        def __iter__(self) -> NoReturn:
            raise AssertionError("a walk over all requests that wait")

        values = items = keys = __iter__  # type: ignore[assignment]

    a, b = chain("a"), chain("b")
    core = stored(a, b, rows=8)
    core.prepare_store("filling", chain("filling", 8))
    assert scan(core, a, "a")[0] is PENDING
    assert scan(core, b, "b")[0] is PENDING
    assert core.turn(0.0, 0.0) == []
    inside.promotion(core)._waiting = Unwalked(inside.waiting(core))
    assert core.turn(0.5, 0.5) == []
    assert inside.promotion(core).host_full, "what is being stored will be unpinned"
    core.complete_store(chain("filling", 8), all_good)
    assert come_up(core) == [*a, *b]


def test_line_has_room_for_those_that_would_be_next() -> None:
    a, b = chain("a"), chain("b")
    core = stored(a, b, rows=8, line_requests=2)
    for name in ("a", "b", "c"):
        core.arrive(name)
    assert core.anticipate("a", (), FIRST)
    assert core.anticipate("a", a, FIRST)
    assert core.anticipate("b", b, (1.0,))
    assert [core.anticipate("c", (), (rank,)) for rank in (-1.0, 0.5, 1.0, 2.0)] == [True, True, False, False]
    scan(core, a, "a")
    assert core.anticipate("a", (), FIRST) is None, "its turn has come"
    assert core.anticipate("c", (), (2.0,))


def test_line_of_prefetches_is_bounded() -> None:
    core = stored(rows=8)
    for number in range(1000):
        core.prefetch([b"%d-%d" % (number, place) for place in range(4)])
    assert len(inside.line(core)) == MAX_PREFETCHES


def test_line_rests_while_the_host_has_no_room() -> None:
    a = chain("a", 8)
    core = stored(a, rows=8)
    core.prepare_store("filling", chain("filling", 8))
    wait_in_line(core, "a", a, FIRST)
    for _ in range(5):
        core.turn(0.0, 0.0)
    assert not inside.line_is_busy(core), "until a step has passed"
    core.end_step()
    assert inside.line_is_busy(core)
