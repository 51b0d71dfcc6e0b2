"""The budget of a shared prefix: movers, janitors and a bucket in any order of events."""

from __future__ import annotations

import random

import pytest

from nixl_tiers.tiers.s3 import usage
from nixl_tiers.tiers.s3.usage import Account, UploadQuota, Usage, Victims

CAPACITY, WINDOW, ROW = 100, 25, 5
NAMES = 100


class TestUploadQuota:
    """Capacity 100, window 25."""

    @pytest.fixture
    def quota(self, monkeypatch: pytest.MonkeyPatch) -> UploadQuota:
        monkeypatch.setattr(usage, "WINDOW_SHARE", 4)
        return UploadQuota("me", CAPACITY, ROW)

    def test_nothing_is_granted_before_a_listing_that_began_after_start(self, quota: UploadQuota) -> None:
        assert not quota.try_acquire(5)
        quota.refresh(Usage(0, {"another": 7}), 60.0)
        assert not quota.try_acquire(5)
        quota.refresh(Usage(0, {"me": 0}), 60.0)
        assert quota.try_acquire(5)

    def test_one_window_is_granted_until_the_record_has_counted_it(self, quota: UploadQuota) -> None:
        quota.refresh(Usage(0, {"me": 0}), 60.0)
        assert [quota.try_acquire(5) for _ in range(6)] == [True] * 5 + [False]
        for _ in range(3):
            quota.upload_ended(5)
        assert quota.counter == 15
        assert not quota.try_acquire(5), "the record has not counted it"
        quota.refresh(Usage(10, {"me": 10}), 60.0)
        assert [quota.try_acquire(5) for _ in range(3)] == [True, True, False]

    @pytest.mark.parametrize(("nbytes", "room"), [(75, True), (76, False)])
    def test_a_whole_window_must_be_free(self, quota: UploadQuota, nbytes: int, room: bool) -> None:
        quota.refresh(Usage(nbytes, {"me": 0}), 60.0)
        assert quota.try_acquire(5) is room
        assert quota.used_bytes == nbytes

    def test_a_stale_record_grants_nothing(self, quota: UploadQuota) -> None:
        quota.refresh(Usage(0, {"me": 0}), -1.0)
        assert not quota.try_acquire(5)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"null", b'{"bytes": 1}', b'{"bytes": 1, "counted": [1]}', b'{"bytes": "x"}', b"\xff"]
)
def test_invalid_usage_records_are_rejected(raw: bytes) -> None:
    assert Usage.decode(raw) is None
    assert Usage.decode(Usage(5, {"me": 7}, 9).encode()) == Usage(5, {"me": 7}, 9)


def test_records_of_other_releases_are_read() -> None:
    assert Usage.decode(b'{"bytes": 5, "counted": {"me": 7}}') == Usage(5, {"me": 7}, 0), "an older one"
    newer = b'{"bytes": 5, "counted": {}, "oldest": 9, "new": {"a": [1]}}'
    assert Usage.decode(newer) == Usage(5, {}, 9)
    assert Usage.decode(b'{"bytes": 5, "counted": {}, "oldest": Infinity}') is None


class TestAccount:
    def test_counters_since_the_listing_are_added(self) -> None:
        account = Account({"a": 5, "b": 0})
        account.listed(100)
        account.deleted(30)
        account.read({"a": 12, "b": 3})
        assert account.usage == Usage(70 + 7 + 3, {"a": 12, "b": 3})

    def test_counter_never_goes_backwards(self) -> None:
        account = Account({"a": 5})
        account.read({"a": 9})
        account.read({"a": 7})
        assert account.usage == Usage(4, {"a": 9})

    def test_mover_that_began_after_the_listing_is_not_counted(self) -> None:
        account = Account({"a": 5})
        account.read({"a": 5, "late": 8})
        assert account.usage == Usage(0, {"a": 5})
        assert account.unknown(Usage(0, {"a": 5, "late": 8})) == {"late"}


class TestVictims:
    def test_the_oldest_are_taken_first(self) -> None:
        ages = list(range(1000))
        random.Random(1).shuffle(ages)
        victims = Victims(1000)
        for age in ages:
            victims.add(float(age), b"%d" % age, ROW)
        assert list(victims.take(10 * ROW, 0.0, 1000)) == [b"%d" % age for age in range(10)]
        assert list(victims.take(0, 15.0, 1000)) == [b"%d" % age for age in range(10, 15)], "the expired ones"
        assert len(victims.take(10**9, 0.0, 7)) == 7
        assert len(victims.take(10**9, 0.0, 10_000)) == 1000 - 22

    def test_what_was_taken_is_older_than_all_that_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(usage, "MIN_VICTIMS", 20)
        assert Victims(0).oldest == 0
        victims = Victims(0)
        for age in random.Random(1).sample(range(1, 1001), 1000):
            victims.add(float(age), b"%d" % age, ROW)
        assert victims.oldest == 1
        victims.take(5 * ROW, 0.0, 1000)
        assert victims.oldest == 6
        victims.put_back()
        assert victims.oldest == 1, "perhaps they are still there"
        taken = victims.take(10**9, 0.0, 10_000)
        assert victims.oldest == len(taken) + 1, "the rows whose names were not kept"
        few = Victims(0)
        few.add(7.5, b"x", ROW)
        few.take(ROW, 0.0, 1000)
        assert few.oldest == 7, "others may have been written at the same time"

    @pytest.mark.parametrize("order", ["random", "newest first", "oldest first"])
    def test_no_row_that_is_left_out_is_older(self, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
        monkeypatch.setattr(usage, "MIN_VICTIMS", 20)
        ages = [age // 2 for age in range(1000)]
        ages = ages[::-1] if order == "newest first" else ages
        if order == "random":
            random.Random(2).shuffle(ages)
        victims = Victims(0)
        for number, age in enumerate(ages):
            victims.add(float(age), b"%d" % number, ROW)
        taken = [ages[int(name)] for name in victims.take(10**9, 0.0, 10_000)]
        assert taken == sorted(taken)
        left_out = sorted(ages)[len(taken) :]
        assert len(taken) >= 19
        assert len(taken) <= 40
        assert taken[-1] <= left_out[0]


class Mover:
    def __init__(self, name: str) -> None:
        self.quota = UploadQuota(name, CAPACITY, ROW)
        self.uploads: list[int] = []


class Janitor:
    """One that believes to hold the lease: it lists name by name, so that everything happens during its listings."""

    def __init__(self) -> None:
        self.account: Account | None = None
        self.listing: Account | None = None
        self.position = 0
        self.victims: dict[int, int] = {}
        self.found: dict[int, int] = {}


class World:
    """Two movers (and those that replace them after a kill) and two janitors at once, which write records in turn."""

    def __init__(self, random: random.Random) -> None:
        self.random = random
        self.uploaded = 0
        self.bucket: dict[int, int] = {}
        self.counters: dict[str, int] = {}
        self.damaged: set[str] = set()  # movers whose counters cannot be read
        self.record = Usage(0, {})
        self.seen: list[Usage | None] = [None, None]  # by each janitor, as the last record
        self.started = 0
        self.ever: list[Mover] = []
        self.movers = [self.new_mover(), self.new_mover()]
        self.janitors = [Janitor(), Janitor()]

    def new_mover(self) -> Mover:
        self.started += 1
        mover = Mover(f"m{self.started}")
        self.counters[mover.quota.mover] = 0
        self.ever.append(mover)
        return mover

    def kill(self, who: int) -> None:
        """What has not arrived never does. Another one takes its place."""
        self.movers[who] = self.new_mover()

    def upload(self, who: int) -> None:
        if self.movers[who].quota.try_acquire(ROW):
            self.movers[who].uploads.append(self.random.randrange(NAMES))

    def upload_ends(self, who: int) -> None:
        mover = self.movers[who]
        if mover.uploads:
            name = mover.uploads.pop(0)
            if self.random.random() < 0.9:
                self.bucket[name] = ROW
                self.uploaded += 1
            mover.quota.upload_ended(ROW)

    def upload_arrives(self, who: int) -> None:
        """It has not ended yet."""
        if self.movers[who].uploads:
            self.bucket[self.movers[who].uploads[0]] = ROW

    def publish(self, who: int) -> None:
        mover = self.movers[who].quota.mover
        self.counters[mover] = self.movers[who].quota.counter
        self.damaged.discard(mover)

    def a_counter_is_damaged(self, who: int) -> None:
        """Of a mover that lives, or of one that was killed."""
        self.damaged.add(self.random.choice([self.movers[who], self.random.choice(self.ever)]).quota.mover)

    def readable(self, who: int) -> dict[str, int]:
        """The counters as this janitor reads them: what the record has counted for one that is damaged."""
        record = self.seen[who]
        counted = {} if record is None else record.counted
        known = {mover: counted[mover] for mover in self.damaged & counted.keys()}
        return {mover: n for mover, n in self.counters.items() if mover not in self.damaged} | known

    def read_record(self, who: int) -> None:
        self.movers[who].quota.refresh(self.record, 1e9)

    def a_row_is_lost(self, _: int) -> None:
        self.bucket.pop(self.random.randrange(NAMES), None)

    def list_names(self, who: int) -> None:
        janitor = self.janitors[who]
        if janitor.listing is None:
            janitor.listing, janitor.position, janitor.found = Account(self.readable(who)), 0, {}
        for _ in range(20):
            if janitor.position in self.bucket:
                janitor.listing.listed(ROW)
                janitor.found[janitor.position] = ROW
            janitor.position += 1
        if janitor.position >= NAMES:
            janitor.account, janitor.listing, janitor.victims = janitor.listing, None, janitor.found

    def janitor_deletes(self, who: int) -> None:
        janitor = self.janitors[who]
        if janitor.account is not None and janitor.victims:
            while janitor.account.usage.nbytes > CAPACITY - 2 * WINDOW and janitor.victims:
                name, nbytes = janitor.victims.popitem()
                self.bucket.pop(name, None)
                janitor.account.deleted(nbytes)

    def janitor_reads_counters(self, who: int) -> None:
        janitor = self.janitors[who]
        for account in (janitor.account, janitor.listing):
            if account is not None:
                account.read(self.readable(who))

    def janitor_reads_record(self, who: int) -> None:
        self.seen[who] = self.record

    def janitor_writes(self, who: int) -> None:
        """If the record is the one that it has read last (If-Match), and counts no mover that it cannot count."""
        account = self.janitors[who].account
        if account is not None and self.seen[who] is self.record and not account.unknown(self.record):
            account.read(self.record.counted)
            self.record = account.usage
            self.seen[who] = self.record

    def check(self) -> None:
        there = sum(self.bucket.values())
        assert there <= CAPACITY + (len(self.movers) - 1) * WINDOW
        counted = self.record.counted
        uncounted = sum(mover.quota._started - counted.get(mover.quota.mover, 0) for mover in self.ever)
        assert there <= self.record.nbytes + uncounted


WEIGHTS = {
    World.upload: 30,
    World.upload_ends: 25,
    World.upload_arrives: 5,
    World.publish: 6,
    World.read_record: 6,
    World.list_names: 12,
    World.janitor_deletes: 10,
    World.janitor_reads_counters: 5,
    World.janitor_reads_record: 5,
    World.janitor_writes: 8,
    World.a_counter_is_damaged: 1,
    World.a_row_is_lost: 1,
    World.kill: 3,
}


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_holds_and_no_record_is_below_the_truth(seed: int) -> None:
    world = World(random.Random(seed))
    turns = world.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=1500)
    for turn in turns:
        turn(world, world.random.randrange(2))
        world.check()
    assert world.uploaded > 0


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "WINDOW_SHARE", 4)
