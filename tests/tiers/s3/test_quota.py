"""PrefixQuota against the bucket itself: stores, deletes and pages of listings, in any order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nixl_tiers.tiers.s3.names import KeySet, RowNames, pack, place_of
from nixl_tiers.tiers.s3.quota import Group, PrefixQuota

ROW = 100
CAPACITY = 4 * ROW + ROW // 2
NAMES = RowNames("p")
NAMESPACES = ["a" * 32, "b" * 32, "c" * 32]
EVERY_KEY = [b"a", b"b", b"c", b"d", b"e", b"f"]
KEYS = st.sampled_from(EVERY_KEY)


def group(*keys: bytes, newest_s: float = 0.0) -> Group:
    return Group(KeySet([pack(sorted(map(place_of, keys)))]), newest_s)


class QuotaMachine(RuleBasedStateMachine):
    """The model is the bucket: its objects, and the deletes that were requested."""

    def __init__(self) -> None:
        super().__init__()
        self.quota = PrefixQuota(NAMES, ROW, CAPACITY)
        self.bucket: dict[str, int] = {}
        self.held: set[bytes] = set()
        self.deleting: set[str] = set()
        self.namespace = NAMESPACES[0]

    def name(self, key: bytes) -> str:
        return NAMES.name(self.namespace, key)

    @initialize(
        others=st.dictionaries(st.tuples(st.sampled_from(["a" * 32, "c" * 32]), KEYS), st.integers(1, ROW - 1)),
        rows=st.sets(KEYS, max_size=3),
        early=st.sets(KEYS, max_size=1),
        gone=st.sets(KEYS, max_size=2),
    )
    def listed(
        self, others: dict[tuple[str, bytes], int], rows: set[bytes], early: set[bytes], gone: set[bytes]
    ) -> None:
        """`early`, `gone`: stored while the listing ran, `gone` also deleted; it has found both or not."""
        self.quota.serve(self.namespace, 0.0)
        self.quota.watch()
        for key in early | gone:
            self.store(key)
        for key in gone - early:
            self.delete(key)
            self.confirm_one(self.name(key))
        kinds: dict[tuple[str, int], Group] = {(self.namespace, ROW): group(*(rows | gone))}
        for (namespace, key), nbytes in others.items():
            if namespace != self.namespace or key not in rows | gone | early:
                kinds.setdefault((namespace, nbytes), group()).keys.add(key)
                self.bucket[NAMES.name(namespace, key)] = nbytes
        self.quota.adopt(kinds)
        self.quota.unwatch()
        for key in rows - (gone - early):
            self.bucket[self.name(key)] = ROW
            self.held.add(key)
        self.over_at_open = max(0, sum(self.bucket.values()) - CAPACITY)

    @rule(key=KEYS)
    def store(self, key: bytes) -> None:
        name = self.name(key)
        self.deleting.discard(name)  # the tier cancels a queued delete of the same name
        had = name in self.bucket
        if self.quota.reserve(key):
            self.bucket[name] = ROW
            self.held.add(key)
        elif had and self.quota.is_pending_delete(key):
            self.deleting.add(name)
        if key not in self.held:
            for victim in self.quota.make_room(1):
                assert victim not in {self.name(held) for held in self.held}
                self.deleting.add(victim)

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        assert self.quota.delete(key) == (self.name(key) if key in self.held else None)
        if key in self.held:
            self.held.remove(key)
            self.deleting.add(self.name(key))

    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        if self.deleting:
            self.confirm_one(data.draw(st.sampled_from(sorted(self.deleting))))

    def confirm_one(self, name: str) -> None:
        self.deleting.remove(name)
        self.bucket.pop(name, None)
        self.quota.confirm_deletes([name])

    @rule(key=KEYS)
    def forget(self, key: bytes) -> None:
        if self.bucket.get(self.name(key), ROW) != ROW:
            return  # an object of another size is corrupt, not missing
        self.bucket.pop(self.name(key), None)
        self.held.discard(key)
        self.deleting.discard(self.name(key))
        self.quota.forget(key)

    @rule(number=st.integers(0, len(NAMESPACES) - 1))
    def reset(self, number: int) -> None:
        namespace = NAMESPACES[number]
        if namespace == self.namespace:
            return
        known = self.quota.serve(namespace, 0.0)
        self.namespace = namespace
        there = {
            key for key in EVERY_KEY if self.bucket.get(self.name(key)) == ROW and self.name(key) not in self.deleting
        }
        assert not (known and there), "rows that the core is not told of"
        self.held = there

    @precondition(lambda self: self.held)
    @rule(key=KEYS, data=st.data())
    def expire(self, key: bytes, data: st.DataObject) -> None:
        self.quota.watch()
        unsettled = data.draw(st.booleans())
        if unsettled and key in self.held:
            self.store(key)
        name = self.quota.expire(self.namespace, key, ROW, delete=True)
        assert (name is not None) == (key in self.held and not unsettled)
        if name is not None:
            self.held.remove(key)
            self.deleting.add(name)
        self.quota.unwatch()

    @invariant()
    def used_bytes_are_those_of_the_bucket(self) -> None:
        assert self.quota.used_bytes == sum(self.bucket.values())

    @invariant()
    def the_bucket_stays_below_the_capacity(self) -> None:
        if self.bucket:
            assert sum(self.bucket.values()) <= CAPACITY + getattr(self, "over_at_open", 0)


TestPrefixQuota = QuotaMachine.TestCase
TestPrefixQuota.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class TestResets:
    @pytest.fixture
    def quota(self) -> PrefixQuota:
        quota = PrefixQuota(NAMES, ROW, 10 * ROW)
        assert not quota.serve(NAMESPACES[0], 0.0), "nothing is known before a listing"
        quota.watch()
        quota.adopt({(NAMESPACES[0], ROW): group(b"a", b"b"), (NAMESPACES[1], ROW): group(b"x", newest_s=5.0)})
        quota.unwatch()
        return quota

    def test_a_new_namespace_needs_no_listing(self, quota: PrefixQuota) -> None:
        assert quota.serve(NAMESPACES[2], 9.0)
        assert quota.used_bytes == 3 * ROW
        assert len(quota) == 0

    def test_a_namespace_with_rows_is_listed(self, quota: PrefixQuota) -> None:
        assert not quota.serve(NAMESPACES[1], 9.0)
        assert not quota.serve(NAMESPACES[0], 9.0)

    def test_the_namespace_unused_for_longest_goes_first(self, quota: PrefixQuota) -> None:
        quota.serve(NAMESPACES[2], 9.0)
        (first,) = quota.make_room(8)
        assert first == NAMES.name(NAMESPACES[1], b"x")

    def test_rows_that_can_never_be_used_again_go_first(self, quota: PrefixQuota) -> None:
        quota.serve(NAMESPACES[2], float("-inf"))
        (first,) = quota.make_room(8)
        assert first in {NAMES.name(NAMESPACES[0], key) for key in (b"a", b"b")}
