"""Every series is driven away from zero by what it says that it counts, over real movers: one that nothing ever changes
cannot be declared.

A scenario drives the series of its decorator. Together they drive all that `base/metrics.py` declares, of host memory
and of storage, except those ELSEWHERE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import pytest

from nixl_tiers.base.chunk import Geometry, Key, Namespace
from nixl_tiers.base.metrics import QUOTA_CHUNKS, number_of_quota, published
from nixl_tiers.base.policies import HugePages
from nixl_tiers.base.tier_traits import CPU, TierTraits
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config import schema
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Limits
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule, Way
from tests.support.control_words import mark_partial
from tests.support.core import look_up_key
from tests.support.file_tier import file_tier, files_tier
from tests.support.leaks import reclaim_all_host_rows
from tests.support.machine import NR_HUGEPAGES, setting
from tests.support.servers import S3Server
from tests.support.times import changed
from tests.support.waiting import until, until_up

STORAGE: Final = "storage"
Series = tuple[str, str]
"""CPU or STORAGE, and the number of the series."""
QUOTA: Final = "tenant"
DECLARED: Final = set(
    published([TierTraits(CPU, quotas=(QUOTA,)), TierTraits(STORAGE, checked=True, disk=True, quotas=(QUOTA,))])
)

HINTS: Final = "tests/vllm/test_hints.py"
ELSEWHERE: Final[Mapping[Series, tuple[str, str]]] = {
    # A server must deny requests.
    ("storage", "denials"): ("tests/system/faults/test_s3.py", "test_missing_permission"),
    ("storage", "dropped_denied"): ("tests/core/test_reasons.py", "test_a_drop_is_counted_once_and_by_its_reason"),
    # Memory comes before a scenario looks.
    (CPU, "ready_bytes"): ("tests/runtime/test_coordinator.py", "test_rows_are_used_as_far_as_their_memory_is_there"),
    # Only vLLM's requests carry hints; its face counts them.
    (CPU, "kv_hints"): (HINTS, "test_hints_of_vllm_are_acted_on_and_counted"),
    (CPU, "hints_accepted"): (HINTS, "test_hints_of_vllm_are_acted_on_and_counted"),
    (CPU, "hints_clipped"): (HINTS, "test_chunks_of_a_request_that_has_ended_are_retained_within_a_share"),
    (CPU, "hints_rejected"): (HINTS, "test_hints_of_vllm_are_acted_on_and_counted"),
    (CPU, "hints_unknown"): (HINTS, "test_hints_of_vllm_are_acted_on_and_counted"),
    (CPU, "retained_rows"): (HINTS, "test_chunks_of_a_request_that_has_ended_are_retained_within_a_share"),
}
"""Where a test drives a series that no coordinator does: its file and its name."""

GEOMETRY: Final = Geometry(cells=1, cell_payload=8192, sub_blocks=2)
ROWS, TOKENS = 16, 64
CAPACITY: Final = 64 << 20
MEMORY: Final = {"type": "nixl_tiers.testing.config:MemoryConfig", "capacity": 2 * GEOMETRY.row_bytes}
LIMITS: Final = replace(
    Limits(), wait_s=3.0, pin_s=20.0, soft_deadline_min_s=2.0, hard_deadline_min_s=6.0, hard_deadline_max_s=6.0
)
SLOW, FAST = 100.0, 1e9  # tokens of prompts that the engine computes in a second


def keys_of(count: int, name: str = "chunk") -> list[Key]:
    return [f"{name}-{number:02}".encode() for number in range(count)]


class Engine:
    """A scheduler and its workers over movers. Time stands still, but for `pass_time`. `seen`: gets the series that are
    not 0 at any `look`; of histograms those with a sample."""

    def __init__(
        self, seen: set[Series], *tiers: dict[str, Any], rules: Sequence[Rule] = (), times: Times = PRODUCTION
    ) -> None:
        fields: dict[str, Any] = {"tiers": [{"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes}, *tiers]}
        fields["quotas"] = {QUOTA: {"share": "50%", "salt_sha256": "0" * 64}}
        config = schema.load(fields)
        if rules:
            config = with_faults(config, FaultPlan(tuple(rules)).to_dict())
        self._close_s = 0.1 if rules else PRODUCTION.close_s  # a mover that hangs is killed
        self._seen = seen
        self._now = 1000.0
        self.region = HostRegion.create(GEOMETRY, ROWS)
        self.coordinator = Coordinator(
            config, Namespace.of({"of": "metrics"}), self.region, limits=LIMITS, clock=lambda: self._now, times=times
        )
        self.store = TieredStore(self.coordinator)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.look()
        self.store.close(self._close_s)

    def start(self) -> Engine:
        self.coordinator.start(0.0)
        until_up(self.store)
        return self

    def pass_time(self, seconds: float) -> None:
        """By less than the movers' heartbeats may be late."""
        self._now += seconds

    def computes(self, tokens_per_s: float) -> None:
        """Steps of the engine show how fast it computes prompts."""
        for _ in range(5):
            self.coordinator.prefill.observe(2000, 1000.0, 2000 / tokens_per_s)

    # --- what a scheduler does ------------------------------------------------------------------------------------

    def put(self, keys: Sequence[Key], *, failed: bool = False, whole: bool = True, flush: bool = True) -> None:
        """A request stores these, and its workers have written them, all but `failed` or not `whole` ones."""
        plan = self.coordinator.prepare_store("writer", keys)
        if whole:
            self.region.mark(plan.rows, 0, plan.store_seq, not failed)
        else:
            mark_partial(self.region, plan.rows, 0, plan.store_seq, 0, whole=False)
        self.coordinator.complete_store(plan.keys)
        self.end("writer")
        assert not flush or self.store.flush(120.0)

    def put_below(self, keys: Sequence[Key]) -> None:
        """Only storage holds these."""
        self.put(keys)
        self.empty_host()

    def empty_host(self) -> None:
        until(lambda: reclaim_all_host_rows(self.store), "every host row to be free")

    def ask(self, request: str, keys: Sequence[Key]) -> list[Lookup]:
        """The look-ups of a step."""
        with self.coordinator.core() as core:
            ends = range(TOKENS, TOKENS * (len(keys) + 1), TOKENS)
            answers = [look_up_key(core, key, request, end, self._now) for key, end in zip(keys, ends, strict=True)]
            core.end_step()
        self.look()
        return answers

    def miss(self, request: str, keys: Sequence[Key]) -> None:
        """The request computes these."""
        until(lambda: Lookup.PENDING not in self.ask(request, keys), "an answer")
        with self.coordinator.core() as core:
            core.count_misses(request, keys, self._now)

    def load(self, request: str, keys: Sequence[Key], *, copy_s: float = 0.0, unreadable: bool = False) -> None:
        """The request waits for these and loads them, which takes so long; or its workers cannot copy them."""
        until(lambda: set(self.ask(request, keys)) == {Lookup.HIT}, "the chunks")
        self.coordinator.prepare_load(request, keys, tokens=[TOKENS] * len(keys), end=TOKENS * len(keys))
        self.pass_time(copy_s)
        self.coordinator.complete_load(request, failed=unreadable)

    def end(self, request: str) -> None:
        with self.coordinator.core() as core:
            core.finish(request)

    # --- what is seen ---------------------------------------------------------------------------------------------

    def look(self) -> Mapping[str, float]:
        """Returns the numbers of the last tier."""
        numbers: Mapping[str, float] = {}
        for tier, numbers in self.coordinator.counters().items():
            self._seen |= {(CPU if tier == CPU else STORAGE, name) for name, number in numbers.items() if number}
        with self.coordinator.core() as core:
            self._seen |= {(STORAGE, name) for _, name in core.take_samples()}
        return numbers

    def until_shown(self, *names: str) -> None:
        """Until all of these numbers of the storage tier are not 0 at once."""

        def shown() -> bool:
            numbers = self.look()
            return all(numbers[name] for name in names)

        until(shown, ", ".join(names))


@dataclass
class Scene:
    """What a scenario runs on."""

    path: Path
    seen: set[Series]
    request: pytest.FixtureRequest
    engines: ExitStack

    def engine(self, *tiers: dict[str, Any], rules: Sequence[Rule] = ()) -> Engine:
        """Over movers that have started."""
        return self.unstarted(*tiers, rules=rules).start()

    def unstarted(self, *tiers: dict[str, Any], rules: Sequence[Rule] = ()) -> Engine:
        return self.engines.enter_context(Engine(self.seen, *tiers, rules=rules))


SCENARIOS: Final[dict[str, tuple[Callable[[Scene], None], set[Series]]]] = {}


def drives(*, cpu: str = "", storage: str = "") -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    """The numbers of the series that a scenario drives."""

    def add(scenario: Callable[[Scene], None]) -> Callable[[Scene], None]:
        named = {QUOTA_CHUNKS: number_of_quota(QUOTA)}
        series = {
            (tier, named.get(name, name)) for tier, names in ((CPU, cpu), (STORAGE, storage)) for name in names.split()
        }
        SCENARIOS[scenario.__name__] = scenario, series
        return scenario

    return add


# --- the scenarios ----------------------------------------------------------------------------------------------------


@drives(
    cpu="hits hit_tokens stored promoted rows used_bytes capacity_bytes prefill_tokens_per_s saved_prefill_s "
    "saved_first_token_s lost_slower_s waiting_requests missed_never_stored unused evictions reset",
    storage="hits hit_tokens stored rows used_bytes capacity_bytes up bytes_read bytes_written load_seconds load_bytes "
    "store_seconds store_bytes promotion_seconds wait_loaded saved_prefill_s saved_first_token_s lost_slower_s "
    "missed_excluded missing missed_failed reset",
)
def chunks_are_stored_loaded_and_lost(scene: Scene) -> None:
    engine, keys = scene.engine(files_tier(scene.path, CAPACITY)), keys_of(4)
    engine.computes(SLOW)
    engine.put(keys)
    engine.load("from host memory", keys)
    engine.load("slowly from host memory", keys, copy_s=10.0)
    engine.empty_host()
    engine.load("from storage", keys)
    engine.empty_host()
    engine.load("slowly from storage", keys, copy_s=10.0)
    engine.empty_host()
    engine.store.prefetch(keys)
    until(lambda: engine.store.locate(keys) == [CPU] * len(keys), "what is prefetched")
    engine.empty_host()
    engine.miss("new", [b"new"])
    with engine.coordinator.core() as core:
        core.arrive("picky", RequestWishes(allowed=frozenset(())))
    engine.miss("picky", keys)
    for row in scene.path.rglob("*.row"):
        row.unlink()
    engine.miss("lost", keys[:1])
    engine.put(keys_of(4, "other"))
    engine.store.reset()


@drives(
    cpu="failed_stores incomplete failed_loads unreadable missed_failed lost_vain_s dropped_full missed_evicted",
)
def workers_fail_and_host_memory_is_full(scene: Scene) -> None:
    engine, (one, two, *_) = scene.engine(), keys_of(2)
    engine.put([b"failed"], failed=True)
    engine.put([b"incomplete"], whole=False)
    engine.put([one, two])
    engine.load("fails", [one], copy_s=1.0, unreadable=True)
    engine.miss("fails", [two])
    engine.put(keys_of(ROWS + 1, "more"))
    engine.miss("evicted", [two])


@drives(cpu="quota_chunks", storage="quota_chunks")
def a_tenant_stores(scene: Scene) -> None:
    engine = scene.engine(file_tier(scene.path, CAPACITY))
    with engine.coordinator.core() as core:
        core.set_tenant("writer", engine.coordinator.tenants.named[QUOTA])
    engine.put(keys_of(2))


@drives(storage="evictions missed_evicted missed_slower", cpu="missed_no_room")
def more_is_stored_and_asked_for_than_there_is_room(scene: Scene) -> None:
    engine, keys = scene.engine(file_tier(scene.path, CAPACITY)), keys_of(ROWS + 4)
    engine.put_below(keys[:ROWS])
    engine.put_below(keys[ROWS:])
    engine.miss("long", keys)
    engine.end("long")
    engine.empty_host()
    engine.computes(FAST)
    with engine.coordinator.core() as core:
        core.look_up("quick", Chain([Group(keys, TOKENS)]), 0, engine.coordinator.now())
    engine = scene.engine(MEMORY)
    for key in keys[:3]:
        engine.put_below([key])
    engine.miss("evicted", keys[:1])


@drives(storage="listing found listed_rows missed_listing dropped_slow queued_stores")
def a_tier_is_listed_while_chunks_are_stored(scene: Scene) -> None:
    tier, listed = file_tier(scene.path / "kv", CAPACITY), scene.path / "listed"
    with Engine(set(), tier) as before:
        before.start().put(keys_of(8))
    tier |= {"type": "tests.mover.stub_tiers:PausedListingConfig", "listed": str(listed)}
    engine = scene.unstarted(tier)
    engine.coordinator.start(0.0)
    engine.until_shown("listing", "found", "listed_rows")
    engine.miss("new", [b"new"])
    for name in ("first", "second"):
        engine.put(keys_of(ROWS, name), flush=False)
        engine.look()
    listed.touch()
    engine.until_shown("dropped_slow")


@drives(
    storage="queued_loads loading storing wait_partial wait_vain lost_vain_s missed_late late quarantined kills deaths "
    "missed_down dropped_full",
)
def a_medium_hangs(scene: Scene) -> None:
    good, hanging = keys_of(2), keys_of(8, "hanging")
    rules = [Rule(Fault.STALL, Way.LOAD, tuple(hanging)), Rule(Fault.STALL, Way.STORE, (b"never written",))]
    engine = scene.engine(file_tier(scene.path / "kv", CAPACITY), rules=rules)
    engine.put_below([*good, *hanging])
    engine.put([b"never written"], flush=False)
    engine.until_shown("storing")
    engine.load("other", good)
    engine.ask("some", [*good, *hanging])
    engine.ask("none", hanging)
    engine.until_shown("loading", "queued_loads")
    engine.pass_time(LIMITS.wait_s + 0.1)
    engine.load("some", good)
    engine.miss("none", hanging)
    engine.end("none")
    engine.until_shown("late", "quarantined")
    (scene.path / "kv").rename(scene.path / "moved")
    (scene.path / "kv").touch()  # so that no other mover can open it
    engine.pass_time(LIMITS.hard_deadline_max_s)
    engine.until_shown("kills", "deaths")
    engine.miss("down", hanging)
    engine = scene.engine(MEMORY, rules=[Rule(Fault.STALL, Way.LOAD)])
    engine.put_below(good)
    engine.ask("both", good)
    engine.until_shown("loading")
    engine.put(keys_of(ROWS // 2, "more"), flush=False)  # too many to be held up by loads
    engine.until_shown("dropped_full")


@drives(storage="failed_loads failed_stores dropped_failed dropped_unreachable corrupt breaker missed_open")
def a_medium_fails(scene: Scene) -> None:
    keys, bad = keys_of(8), keys_of(8, "bad")
    rules = [
        Rule(Fault.BIT_FLIP, Way.LOAD, tuple(keys[:1])),
        Rule(Fault.UNAVAILABLE, Way.LOAD, tuple(keys[1:])),
        Rule(Fault.UNAVAILABLE, Way.STORE, tuple(bad)),
    ]
    engine = scene.engine(file_tier(scene.path, CAPACITY), rules=rules)
    engine.put_below(keys)
    engine.miss("corrupt", keys[:1])
    for key in keys[1:]:
        engine.miss("failed", [key])
    for key in bad:
        engine.put([key])
    engine.until_shown("breaker")


@drives(storage="removed missed_expired")
def another_engine_deletes_chunks(scene: Scene) -> None:
    keys = keys_of(2)
    tier = files_tier(scene.path, CAPACITY)
    engine = scene.engines.enter_context(Engine(scene.seen, tier, times=changed(file_known_s=1.0))).start()
    engine.put_below(keys)
    for row in scene.path.rglob("*.row"):
        row.unlink()
    engine.until_shown("removed")
    until(lambda: engine.store.locate(keys) == [None] * 2, "both to be known no more")
    engine.miss("expired", keys)


@drives(storage="loads_staged stores_staged")
def slabs_are_staged(scene: Scene) -> None:
    tier = file_tier(scene.path, CAPACITY, type="tests.mover.stub_tiers:DecidedConfig", staged=True)
    scene.engine(tier).until_shown("loads_staged")


@drives(storage="full")
def a_file_system_is_full(scene: Scene) -> None:
    scene.engine(files_tier(scene.path, CAPACITY, min_free="99.999%")).until_shown("full")


@drives(storage="probes")
def a_bucket_is_shared(scene: Scene) -> None:
    server: S3Server = scene.request.getfixturevalue("any_s3")
    scene.request.getfixturevalue("s3_credentials")(server)
    place = {"bucket": scene.request.getfixturevalue("s3_bucket")(server), "endpoint": server.endpoint}
    prefix = scene.request.getfixturevalue("s3_prefix")
    engine = scene.engine({"type": "s3", "capacity": CAPACITY, "prefix": prefix, **place})
    engine.miss("new", [b"new"])


@drives(cpu="huge_page_bytes")
def host_memory_has_huge_pages(scene: Scene) -> None:
    pages = -(-ROWS * GEOMETRY.row_bytes // HUGE_PAGE_BYTES) + 1  # one for the header
    with (
        setting(NR_HUGEPAGES, str(pages)),
        HostRegion.create(GEOMETRY, ROWS, huge_pages=HugePages.HUGETLB) as region,
    ):
        region.prefault().wait()
        engine = scene.engine()
        engine.region.close()
        engine.coordinator.region = region
        engine.look()


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_drives_what_it_says(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    scenario, driven = SCENARIOS[name]
    seen: set[Series] = set()
    with ExitStack() as engines:
        scenario(Scene(tmp_path, seen, request, engines))
    assert driven - seen == set()


def test_every_series_is_driven() -> None:
    driven = set().union(*(series for _, series in SCENARIOS.values()))
    assert DECLARED - driven - set(ELSEWHERE) == set(), "declared, but nothing is known to change them"
    assert driven | set(ELSEWHERE) == DECLARED, "driven, but not declared"
    root = Path(__file__).parents[3]
    for file, name in ELSEWHERE.values():
        assert f"def {name}(" in (root / file).read_text()
