"""PrefixQuota against a plain model, under any order of events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nixl_tiers.tiers.s3.quota import PrefixQuota

ROW = 100
CAPACITY_ROWS = 4
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])


class QuotaMachine(RuleBasedStateMachine):
    """The model is the bucket itself: its objects, and the deletes that were requested."""

    def __init__(self) -> None:
        super().__init__()
        self.quota = PrefixQuota(ROW, CAPACITY_ROWS * ROW + ROW // 2)
        self.bucket: dict[str, int] = {}
        self.held: set[bytes] = set()
        self.deleting: set[str] = set()

    @initialize(
        other_rows=st.lists(st.integers(1, ROW), max_size=4),
        rows=st.sets(KEYS, max_size=3),
        early=st.sets(KEYS, max_size=1),
    )
    def listed(self, other_rows: list[int], rows: set[bytes], early: set[bytes]) -> None:
        for key in early:  # stored while the listing ran
            self.store(key)
        sizes = {f"other-{i}": nbytes for i, nbytes in enumerate(other_rows)}
        listed = rows | early
        self.quota.begin_listing(list(sizes.items()), len(listed))
        self.bucket |= sizes
        for key in sorted(listed):
            assert self.quota.add_listed(key, key.decode()) == (key not in early)
            self.bucket[key.decode()] = ROW
            self.held.add(key)
        self.over_at_open = max(0, sum(self.bucket.values()) - CAPACITY_ROWS * ROW - ROW // 2)

    @rule(key=KEYS)
    def store(self, key: bytes) -> None:
        name = key.decode()
        self.deleting.discard(name)  # the tier cancels a queued delete of the same name
        had = name in self.bucket
        if self.quota.reserve(key, name):
            self.bucket[name] = ROW
            self.held.add(key)
        elif had and key not in self.held:
            self.deleting.add(name)
        if key not in self.held:
            for victim in self.quota.make_room(1):
                assert victim.startswith("other")
                self.deleting.add(victim)

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        assert self.quota.delete(key, key.decode()) == (key in self.held)
        if key in self.held:
            self.held.remove(key)
            self.deleting.add(key.decode())

    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        if self.deleting:
            name = data.draw(st.sampled_from(sorted(self.deleting)))
            self.deleting.remove(name)
            self.bucket.pop(name, None)
            self.quota.confirm_delete(name)

    @rule(key=KEYS)
    def forget(self, key: bytes) -> None:
        self.bucket.pop(key.decode(), None)
        self.held.discard(key)
        self.deleting.discard(key.decode())
        self.quota.forget(key, key.decode())

    @invariant()
    def used_bytes_are_those_of_the_bucket(self) -> None:
        assert self.quota.used_bytes == sum(self.bucket.values())

    @invariant()
    def the_bucket_stays_below_the_capacity(self) -> None:
        if self.bucket:
            over = getattr(self, "over_at_open", 0)
            assert sum(self.bucket.values()) <= CAPACITY_ROWS * ROW + ROW // 2 + over


TestPrefixQuota = QuotaMachine.TestCase
TestPrefixQuota.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
