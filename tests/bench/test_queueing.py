"""The queue in virtual time: what promotion at arrival brings, and what it costs."""

from __future__ import annotations

from statistics import mean

import pytest

from bench.queueing import CHUNK_TOKENS, ROW_BYTES, Arm, Machine, Medium, Request, Result, VirtualEngine
from nixl_tiers.core.limits import Limits

HOST = 64
WAITING = 64
FILE = Medium("file", 0.001, 8e9, 10_000)
ALWAYS = Arm("always", priced=False, ahead=False)
AHEAD = Arm("ahead", priced=False)


def serve(arm: Arm, *, host: int = HOST, limits: Limits | None = None) -> Result:
    """So many requests arrive at once. The first halves of their chains, ten times what the host holds, are stored, and
    they store the rest."""
    chains = [[b"%d-%d" % (number, place) for place in range(HOST * 10 // WAITING)] for number in range(WAITING)]
    engine = VirtualEngine(Machine(host, (FILE,)), arm, limits)
    engine.hold([key for chain in chains for key in chain])
    new = [[b"new %d-%d" % (number, place) for place in range(len(chain))] for number, chain in enumerate(chains)]
    return engine.run([Request(f"r{number}", 0.0, chain + new[number]) for number, chain in enumerate(chains)])


def test_rows_promoted_at_arrival_are_not_evicted_before_their_turn() -> None:
    result = serve(AHEAD)
    assert result.loaded == 10 * HOST, "all that is stored is loaded"
    assert result.promoted == 10 * HOST, "each row once"
    assert result.unused <= 0.05 * result.promoted


def test_storage_time_is_spent_in_the_queue() -> None:
    """A request behind a long prompt: what it loads has come before its turn."""
    took = {}
    for arm in (ALWAYS, AHEAD):
        stored = [b"stored %d" % place for place in range(10)]
        engine = VirtualEngine(Machine(HOST, (Medium("file", 0.001, 1e9, 100),)), arm)
        engine.hold(stored)
        long = Request("long", 0.0, [b"new %d" % place for place in range(40)])
        took[arm.name] = engine.run([long, Request("next", 0.0, stored)]).first_s
    assert took["ahead"][0] == pytest.approx(took["always"][0], rel=0.01)
    loading_s = 10 * ROW_BYTES / 1e9
    assert took["always"][1] - took["ahead"][1] > 0.9 * loading_s


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_any_share_of_the_host_ends_well(share: float) -> None:
    result = serve(AHEAD, limits=Limits(line_share=share))
    assert result.loaded == 10 * HOST
    assert result.unused <= 0.05 * result.promoted


@pytest.mark.parametrize("chunks", [2, 8])
@pytest.mark.parametrize("slower", [0.25, 0.5, 1.0, 1.3, 2.0, 4.0])
def test_requests_at_once_share_the_engine_and_the_tier(chunks: int, slower: float) -> None:
    """Loading a chunk takes so many times as long as computing it. Some are loaded while others are computed: that is
    no slower than to do the same with all, and where both take about as long much quicker."""
    prefill_s = Machine(HOST, ()).prefill_s
    s3 = Medium("s3", 0.005, ROW_BYTES / (slower * CHUNK_TOKENS * prefill_s), 10_000)
    machine = Machine(1000, (s3,), context_s=0.0)
    mean_s = {}
    for arm in (Arm("off", tiers=False), ALWAYS, Arm("ours")):
        before = [Request(f"b{n}", 2.0 * n, [b"b%d-%d" % (n, place) for place in range(chunks)]) for n in range(3)]
        crowd = [Request(f"c{n}", 20.0, [b"c%d-%d" % (n, place) for place in range(chunks)]) for n in range(8)]
        engine = VirtualEngine(machine, arm)
        engine.hold([key for each in before + crowd for key in each.keys])
        mean_s[arm.name] = mean(engine.run(before + crowd).first_s[len(before) :])
    better_s = min(mean_s["off"], mean_s["always"])
    assert mean_s["ours"] < 1.1 * better_s
    if slower in (1.0, 1.3):
        assert mean_s["ours"] < 0.75 * better_s
