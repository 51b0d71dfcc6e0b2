"""KeySet and listings against plain sets, with pages that arrive while rows are stored and deleted."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.base import GONE, MAX_ENTRIES, Entry
from nixl_tiers.tiers.s3 import listing as listing_module
from nixl_tiers.tiers.s3 import quota
from nixl_tiers.tiers.s3.control import S3Control
from nixl_tiers.tiers.s3.listing import (
    MAX_EMPTY_PAGES,
    MAX_WAITING,
    EndlessListing,
    ExpirySweep,
    FullListing,
    Listing,
    limited,
)
from nixl_tiers.tiers.s3.names import LEAF_KEYS, KeySet, RowNames, pack, place_in, place_of, unpack
from nixl_tiers.tiers.s3.quota import PrefixQuota

ROW = 100
NAMES = RowNames("p")
OURS, THEIRS = "a" * 32, "b" * 32
SERVED = (OURS, ROW)
KEYS = st.binary(min_size=1, max_size=3)


class TestKeySet:
    @given(st.lists(KEYS, max_size=LEAF_KEYS))
    def test_a_leaf_holds_what_was_packed(self, places: list[bytes]) -> None:
        leaf = pack(places)
        assert unpack(leaf) == places
        assert [place_in(leaf, number) for number in range(len(places))] == places

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(["add", "discard", "update", "remove"]), st.sets(KEYS)), max_size=20))
    def test_it_equals_a_set(self, steps: list[tuple[str, set[bytes]]]) -> None:
        model: set[bytes] = set()
        ours = KeySet()
        for what, keys in steps:
            places = sorted(map(place_of, keys))
            if what == "update":
                ours.update(places)
                model |= keys
            elif what == "remove":
                ours.difference_update(places)
                model -= keys
            for key in keys if what in {"add", "discard"} else ():
                if what == "add":
                    assert ours.add(key) == (key not in model)
                    model.add(key)
                else:
                    assert ours.discard(key) == (key in model)
                    model.discard(key)
            assert len(ours) == len(model)
            assert all((key in ours) == (key in model) for key in keys)
            assert ours.after(b"", 10**6) == sorted(map(place_of, model))

    def test_names_sort_as_places(self) -> None:
        keys = [b"a", b"ab", b"\x00", b"\xff", b"b" * 112, b"a\x00"]
        assert sorted(keys, key=place_of) == sorted(keys, key=lambda key: NAMES.name(OURS, key))

    def test_a_row_takes_at_most_80_bytes(self) -> None:
        import tracemalloc

        count = 50_000
        places = sorted(place_of(number.to_bytes(36, "big")) for number in range(count))
        tracemalloc.start()
        keys = KeySet(pack(places[at : at + LEAF_KEYS]) for at in range(0, count, LEAF_KEYS))
        taken, _ = tracemalloc.get_traced_memory()
        keys.difference_update(places[::2])
        keys.update(places[::2])
        changed, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(keys) == count
        assert taken / count < 45
        assert changed / count < 60


class FakeBucket:
    """As much of a boto3 client as a listing uses. `during`: called between a page's request and its answer."""

    def __init__(self, page_rows: int = 1000) -> None:
        self.objects: dict[str, tuple[int, float]] = {}  # size, Last-Modified
        self.now_s = 1000.0
        self.during: Callable[[], None] = lambda: None
        self.requests = 0
        self._page_rows = page_rows

    def list_objects_v2(self, Bucket: str, Prefix: str, StartAfter: str = "") -> dict[str, Any]:  # noqa: N803
        self.requests += 1
        self.during()
        names = sorted(name for name in self.objects if name.startswith(Prefix) and name > StartAfter)
        date = datetime.fromtimestamp(self.now_s, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        contents = [
            {
                "Key": name,
                "Size": self.objects[name][0],
                "LastModified": datetime.fromtimestamp(self.objects[name][1], UTC),
            }
            for name in names[: self._page_rows]
        ]
        return {
            "Contents": contents,
            "IsTruncated": len(names) > self._page_rows,
            "ResponseMetadata": {"HTTPHeaders": {"date": date}},
        }

    def put(self, key: bytes, nbytes: int = ROW, modified_s: float = 0.0, namespace: str = OURS) -> None:
        self.objects[NAMES.name(namespace, key)] = (nbytes, modified_s)


def run(listing: Listing, bucket: FakeBucket) -> list[list[Entry]]:
    """The listing's batches, taken as the mover's loop does."""
    batches = []
    entries = listing.entries(lambda: 0)
    while not listing.done.is_set():
        listing.step(bucket, "bucket")
        while not listing.done.is_set() and (batch := next(entries)):
            batches.append(batch)
    batches += [batch for batch in entries if batch]
    return batches


def full(quota: PrefixQuota, **options: Any) -> FullListing:
    return FullListing(quota, NAMES, SERVED, **{"max_age_s": None, "deleter": None} | options)


def test_empty_page_is_not_the_end_of_the_listing() -> None:
    """As where many versions of a bucket are delete markers."""
    found = {"Key": NAMES.name(OURS, b"k"), "Size": ROW, "LastModified": datetime.now(UTC)}
    headers = {"ResponseMetadata": {"HTTPHeaders": {}}}
    client = Mock()
    client.list_objects_v2.side_effect = [
        {"IsTruncated": True, "NextContinuationToken": "t"} | headers,
        {"IsTruncated": False, "Contents": [found]} | headers,
        {"IsTruncated": False} | headers,
    ]
    quota = new_quota()
    listing = full(quota)
    while not listing.done.is_set():
        listing.step(client, "kv")
    assert b"k" in quota


def test_listing_of_endless_empty_pages_fails_and_goes_on_when_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_module, "MAX_EMPTY_PAGES", 3)
    headers = {"ResponseMetadata": {"HTTPHeaders": {}}}
    found = {"Key": NAMES.name(OURS, b"k"), "Size": ROW, "LastModified": datetime.now(UTC)}
    client = Mock()
    client.list_objects_v2.side_effect = [
        *({"IsTruncated": True, "NextContinuationToken": f"{number}"} | headers for number in range(5)),
        {"IsTruncated": False, "Contents": [found]} | headers,
        {"IsTruncated": False} | headers,
    ]
    control = S3Control(S3Config(type="s3", bucket="kv-control", endpoint="http://127.0.0.1:1", capacity="1GiB"))
    control.connection.client = client
    quota = new_quota()
    control.start_listing(listing := full(quota))
    for page in range(5):
        control._list_page()
        assert client.list_objects_v2.call_count == page + 1, "deletes have their turns between two pages"
        assert ("list" in control.denials.current()) == (page >= 3)
        assert (control._backoff_s["list"] > 0) == (page >= 3)
    assert "empty pages without an end" in control.denials.current()["list"]
    control._list_page()
    assert client.list_objects_v2.call_args.kwargs["ContinuationToken"] == "4"
    control._list_page()
    assert listing.done.is_set()
    assert b"k" in quota


def test_pages_of_the_janitor_are_limited_too() -> None:
    empty: dict[str, Any] = {"IsTruncated": True}
    pages = [*[empty] * MAX_EMPTY_PAGES, {"Contents": ["row"]}]
    assert list(limited(pages * 2)) == pages * 2
    with pytest.raises(EndlessListing):
        list(limited(itertools.repeat(empty)))


def test_row_whose_delete_waits_when_the_first_listing_begins_is_not_handed_over() -> None:
    """The core has given it up: it would be a miss when it is loaded."""
    quota, bucket = new_quota(), FakeBucket()
    for key in (b"evicted", b"held"):
        bucket.put(key)
        quota.reserve(key)
    quota.delete(b"evicted")
    assert [entry.key for batch in run(full(quota), bucket) for entry in batch] == [b"held"]


def again(quota: PrefixQuota) -> FullListing:
    """As a new owner lists: only the differences are handed over."""
    return full(quota, differences_only=True)


def sweep(quota: PrefixQuota, **options: Any) -> ExpirySweep:
    return ExpirySweep(quota, NAMES, SERVED, **{"max_age_s": 100.0, "pause_s": 0.0, "deleter": None} | options)


def new_quota(capacity_bytes: int = 10**9) -> PrefixQuota:
    quota = PrefixQuota(NAMES, ROW, capacity_bytes)
    quota.serve(OURS, 0.0)
    return quota


ROWS = st.sampled_from([b"\0", b"\0\0", b"a", b"ab", b"b", b"\xff"])  # few: each is stored, deleted and listed again


class PrefixMachine(RuleBasedStateMachine):
    """One mover that lists again and again: what it holds and what the core was told, while others store and delete.

    As a core does, it stores nothing before the first listing has ended: what that does not list is not there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bucket = FakeBucket(page_rows=2)
        self.quota = new_quota()
        self.listing: Listing = full(self.quota)
        self.entries = self.listing.entries(lambda: 0)
        self.core: set[bytes] = set()
        self.uploads: set[bytes] = set()
        self.stored: set[bytes] = set()  # by this mover, and neither evicted nor deleted by others
        self.listed = False  # whether the first listing has ended

    def there(self) -> set[bytes]:
        return {
            parsed[1]
            for name, (size, _) in self.bucket.objects.items()
            if size == ROW and (parsed := NAMES.parse(name))
        }

    @rule(key=ROWS)
    def another_stores(self, key: bytes) -> None:
        self.bucket.put(key)

    @rule(key=ROWS)
    def another_deletes(self, key: bytes) -> None:
        self.bucket.objects.pop(NAMES.name(OURS, key), None)
        self.stored.discard(key)

    @rule(name=st.sampled_from(["p/" + OURS + "/zz", "p/" + OURS + "/00/x", "p/" + OURS + "/80/~", "p/.usage"]))
    def a_file_that_is_no_row(self, name: str) -> None:
        self.bucket.objects[name] = (1, 0.0)

    @precondition(lambda self: self.listed)
    @rule(key=ROWS)
    def upload_starts(self, key: bytes) -> None:
        assert self.quota.reserve(key, upload=True)
        self.uploads.add(key)

    @rule(data=st.data())
    def upload_ends(self, data: st.DataObject) -> None:
        if self.uploads:
            key = data.draw(st.sampled_from(sorted(self.uploads)))
            self.upload_ends_now(key)

    @rule(key=ROWS)
    def evict(self, key: bytes) -> None:
        if key not in self.uploads:
            self.quota.forget(key)
            self.core.discard(key)
            self.stored.discard(key)

    @rule(store=st.booleans(), key=ROWS)
    def a_page_comes(self, store: bool, key: bytes) -> None:
        """Another row is stored or evicted while its request runs."""
        store &= self.listed
        self.bucket.during = lambda: (self.upload_starts(key), self.upload_ends_now(key)) if store else self.evict(key)
        if not self.listing.done.is_set():
            self.listing.step(self.bucket, "bucket")
        self.bucket.during = lambda: None

    def upload_ends_now(self, key: bytes) -> None:
        self.uploads.discard(key)
        self.bucket.put(key)
        self.quota.upload_ended(key)
        self.core.add(key)
        self.stored.add(key)

    @rule()
    def the_loop_takes_entries(self) -> None:
        batch = next(self.entries, None)
        if batch is None:
            self.begin_again()
        self.take(batch or ())

    def begin_again(self) -> None:
        self.listed = True
        self.listing = again(self.quota)
        self.entries = self.listing.entries(lambda: 0)

    def take(self, batch: Sequence[Entry]) -> None:
        for entry in batch:
            (self.core.discard if entry.slot == GONE else self.core.add)(entry.key)

    def teardown(self) -> None:
        """When nobody changes anything, one more listing brings all in agreement."""
        while self.uploads:
            self.upload_ends_now(next(iter(self.uploads)))
        for _ in range(2):
            while not self.listing.done.is_set():
                self.listing.step(self.bucket, "bucket")
            for batch in self.entries:
                self.take(batch)
            self.begin_again()
        assert self.core == self.there()
        assert {key for key in self.core if key in self.quota} == self.core
        assert len(self.quota) == len(self.core)

    @invariant()
    def what_it_stores_is_held(self) -> None:
        assert all(key in self.quota for key in self.uploads | self.stored)


TestPrefix = PrefixMachine.TestCase
TestPrefix.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("pages", [0, 1])
def test_a_row_that_others_delete_after_its_upload_is_gone_with_a_later_listing(pages: int) -> None:
    machine = PrefixMachine()
    while not machine.listed:
        machine.a_page_comes(store=False, key=b"b")
        machine.the_loop_takes_entries()
    for key in (b"\0\0", b"\0"):
        machine.upload_starts(key)
    for _ in range(pages):
        machine.a_page_comes(store=True, key=b"a")
    machine.upload_ends_now(b"\0\0")
    machine.another_deletes(b"\0\0")
    machine.teardown()
    assert machine.core == {b"\0"} | ({b"a"} if pages else set())


class TestFullListing:
    def test_rows_come_oldest_first(self) -> None:
        bucket, quota = FakeBucket(page_rows=7), new_quota()
        for number in range(1000):
            bucket.put(b"%d" % number, modified_s=float(number * 7919 % 1000 // 2))
        bucket.put(b"other", 7, namespace=THEIRS)
        entries = [entry for batch in run(full(quota), bucket) for entry in batch]
        ages = [bucket.objects[NAMES.name(OURS, entry.key)][1] for entry in entries]
        assert ages == sorted(ages)
        assert len(entries) == 1000
        assert [entry.tick for entry in entries] == [int(age) for age in ages]
        assert quota.used_bytes == 1000 * ROW + 7

    def test_differences_that_the_loop_takes_while_the_books_are_replaced_are_not_lost(self) -> None:
        bucket, quota = FakeBucket(page_rows=3), new_quota()
        for number in range(20):
            bucket.put(b"%d" % number, modified_s=0.0 if number < 5 else 900.0)
        run(full(quota), bucket)
        del bucket.objects[NAMES.name(OURS, b"7")]
        bucket.now_s = 1000.0
        listing = full(quota, differences_only=True, max_age_s=500.0)
        entries = listing.entries(lambda: 0)
        taken: list[Entry] = []
        adopt = quota.adopt

        def adopt_late(listed: Any) -> None:
            taken.extend(next(entries))
            adopt(listed)

        quota.adopt = adopt_late  # type: ignore[method-assign]
        while not listing.done.is_set():
            listing.step(bucket, "bucket")
            if not listing.done.is_set():
                taken.extend(next(entries))
        taken += [entry for batch in entries for entry in batch]
        assert {entry.key for entry in taken if entry.slot == GONE} == {b"0", b"1", b"2", b"3", b"4", b"7"}
        assert len(taken) == 6

    def test_a_new_owner_gets_the_differences(self) -> None:
        bucket, quota = FakeBucket(page_rows=3), new_quota()
        for number in range(200):
            bucket.put(b"%d" % number)
        run(full(quota), bucket)
        for number in range(0, 200, 3):
            del bucket.objects[NAMES.name(OURS, b"%d" % number)]
        for number in range(200, 250):
            bucket.put(b"%d" % number)
        entries = [entry for batch in run(full(quota, differences_only=True), bucket) for entry in batch]
        assert {e.key for e in entries if e.slot == GONE} == {b"%d" % number for number in range(0, 200, 3)}
        assert {e.key for e in entries if e.slot != GONE} == {b"%d" % number for number in range(200, 250)}
        assert quota.used_bytes == ROW * len(bucket.objects)


class TestWork:
    """What a listing costs the mover's loop."""

    def test_a_listing_without_changes_hands_over_nothing(self) -> None:
        bucket, quota = FakeBucket(), new_quota()
        for number in range(3000):
            bucket.put(b"%d" % number, modified_s=950.0)
        run(full(quota), bucket)
        assert run(again(quota), bucket) == []
        assert run(sweep(quota), bucket) == []

    def test_the_loop_takes_bounded_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket, quota_ = FakeBucket(), new_quota()
        for number in range(20_000):
            bucket.put(b"%d" % number)
        batches = run(full(quota_), bucket)
        assert sum(map(len, batches)) == 20_000
        assert max(map(len, batches)) <= MAX_ENTRIES
        listing = sweep(quota_)
        while not listing.done.is_set():
            if listing.next_step_s(time.monotonic()) > time.monotonic():
                break
            listing.step(bucket, "bucket")
        assert not listing.done.is_set(), "it waits for the loop"
        assert MAX_WAITING <= len(listing._differences) < MAX_WAITING + 1000
        batches = run(listing, bucket)
        assert sum(map(len, batches)) == 20_000
        assert max(map(len, batches)) <= MAX_ENTRIES
        assert len(quota_) == 0

    def test_the_books_are_compared_in_portions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket, quota_ = FakeBucket(), new_quota()
        for number in range(20_000):
            bucket.put(b"%d" % number)
        run(full(quota_), bucket)
        bucket.objects.clear()  # one empty page tells that all 20,000 are gone
        compared: list[int] = []
        plain = PrefixQuota.compare
        monkeypatch.setattr(
            PrefixQuota, "compare", lambda *args: compared.append(len((result := plain(*args))[1])) or result
        )
        gone = [entry for batch in run(again(quota_), bucket) for entry in batch]
        assert len(gone) == 20_000 == sum(compared)
        assert max(compared) <= quota.PORTION + LEAF_KEYS
        assert len(quota_) == 0

    def test_pages_of_a_sweep_keep_the_request_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [100.0]
        monkeypatch.setattr("nixl_tiers.tiers.s3.listing.time.monotonic", lambda: now[0])
        bucket, quota = FakeBucket(page_rows=10), new_quota()
        for number in range(100):
            bucket.put(b"%d" % number)
        run(full(quota), bucket)
        bucket.requests = 0
        listing = sweep(quota, pause_s=1.8)
        began = now[0]
        while not listing.done.is_set():
            now[0] = max(now[0], listing.next_step_s(now[0]))
            listing.step(bucket, "bucket")
        assert bucket.requests == 10
        assert now[0] - began == pytest.approx(9 * 1.8)


def test_a_row_stored_behind_a_page_that_ends_with_a_foreign_object_stays() -> None:
    bucket, quota = FakeBucket(page_rows=1), new_quota()
    bucket.objects |= dict.fromkeys([f"p/{OURS}/80/~", f"p/{OURS}/zz"], (1, 0.0))
    key = next(key for number in range(256) if place_of(key := b"%d" % number) < b"\x80")
    listing = again(quota)
    listing.step(bucket, "bucket")
    quota.reserve(key, upload=True)
    bucket.put(key)
    quota.upload_ended(key)
    assert run(listing, bucket) == []
    assert key in quota


def test_a_row_whose_upload_ends_behind_the_page_of_its_name_stays() -> None:
    bucket, quota = FakeBucket(page_rows=1), new_quota()
    stored, *others = sorted((b"%d" % number for number in range(4)), key=place_of)
    for key in others:
        bucket.put(key)
    run(full(quota), bucket)
    quota.reserve(stored, upload=True)
    listing = again(quota)
    listing.step(bucket, "bucket")
    bucket.put(stored)
    quota.upload_ended(stored)
    assert run(listing, bucket) == []
    assert stored in quota


class Deletes:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.has_room = True

    def delete(self, names: list[str]) -> None:
        self.names += names


class TestExpiry:
    def test_expired_rows_of_every_namespace_are_deleted(self) -> None:
        bucket, quota, deletes = FakeBucket(page_rows=2), new_quota(), Deletes()
        for number in range(6):
            bucket.put(b"%d" % number, modified_s=995.0 if number % 2 else 10.0)
            bucket.put(b"%d" % number, modified_s=995.0 if number % 2 else 10.0, namespace=THEIRS)
        run(full(quota), bucket)
        entries = [entry for batch in run(sweep(quota, deleter=deletes), bucket) for entry in batch]
        assert {(entry.slot, entry.key) for entry in entries} == {(GONE, b"0"), (GONE, b"2"), (GONE, b"4")}
        assert len(deletes.names) == 6
        assert quota.used_bytes == 12 * ROW, "until the deletes are confirmed"
        quota.confirm_deletes(deletes.names)
        assert quota.used_bytes == 6 * ROW

    def test_too_many_deletes_leave_rows_to_the_next_sweep(self) -> None:
        bucket, quota, deletes = FakeBucket(), new_quota(), Deletes()
        bucket.put(b"old", modified_s=10.0)
        deletes.has_room = False
        (batch,) = run(full(quota, max_age_s=100.0, deleter=deletes), bucket)
        assert [entry.key for entry in batch] == [b"old"], "counted like any other; a load finds it expired"
        assert run(sweep(quota, deleter=deletes), bucket) == []
        deletes.has_room = True
        assert len(run(sweep(quota, deleter=deletes), bucket)) == 1
