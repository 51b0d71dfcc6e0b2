"""The object tier's books against a plain model, under every order of events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nixl_tiers.tiers.s3.quota import PrefixQuota

ROW = 100
CAPACITY_ROWS = 4
KEYS = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"])


class StockMachine(RuleBasedStateMachine):
    """The model is the bucket itself: what is in it, and what the server has been asked to delete."""

    def __init__(self) -> None:
        super().__init__()
        self.stock = PrefixQuota(ROW, CAPACITY_ROWS * ROW + ROW // 2)
        self.bucket: dict[str, int] = {}
        self.held: set[bytes] = set()
        self.deleting: set[str] = set()

    @initialize(
        strangers=st.lists(st.integers(1, ROW), max_size=4),
        rows=st.sets(KEYS, max_size=3),
        early=st.sets(KEYS, max_size=1),
    )
    def listed(self, strangers: list[int], rows: set[bytes], early: set[bytes]) -> None:
        for key in early:  # stored while the listing ran
            self.store(key)
        sizes = {f"stranger-{i}": nbytes for i, nbytes in enumerate(strangers)}
        listed = rows | early
        self.stock.meet(list(sizes.items()), len(listed))
        self.bucket |= sizes
        for key in sorted(listed):
            assert self.stock.adopt(key, key.decode()) == (key not in early)
            self.bucket[key.decode()] = ROW
            self.held.add(key)
        self.over_at_open = max(0, sum(self.bucket.values()) - CAPACITY_ROWS * ROW - ROW // 2)

    @rule(key=KEYS)
    def store(self, key: bytes) -> None:
        name = key.decode()
        self.deleting.discard(name)  # the tier takes a queued delete of the same name back
        had = name in self.bucket
        if self.stock.hold(key, name):
            self.bucket[name] = ROW
            self.held.add(key)
        elif had and key not in self.held:
            self.deleting.add(name)
        if key not in self.held:
            for victim in self.stock.make_room(1):
                assert victim.startswith("stranger")
                self.deleting.add(victim)

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        assert self.stock.doom(key, key.decode()) == (key in self.held)
        if key in self.held:
            self.held.remove(key)
            self.deleting.add(key.decode())

    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        if self.deleting:
            name = data.draw(st.sampled_from(sorted(self.deleting)))
            self.deleting.remove(name)
            self.bucket.pop(name, None)
            self.stock.gone(name)

    @rule(key=KEYS)
    def lose(self, key: bytes) -> None:
        self.bucket.pop(key.decode(), None)
        self.held.discard(key)
        self.deleting.discard(key.decode())
        self.stock.lose(key, key.decode())

    @invariant()
    def counts_what_is_there(self) -> None:
        assert self.stock.used_bytes == sum(self.bucket.values())

    @invariant()
    def stays_below_the_capacity(self) -> None:
        if self.bucket:
            over = getattr(self, "over_at_open", 0)
            assert sum(self.bucket.values()) <= CAPACITY_ROWS * ROW + ROW // 2 + over


TestStock = StockMachine.TestCase
TestStock.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
