"""A private and a shared engine on one prefix: neither stores or deletes where the other's record is renewed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.s3.answers import REQUEST_ERRORS
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.lease import PrefixLease
from nixl_tiers.tiers.s3.lease_state import JANITOR_TERMS, OWNER_TERMS
from tests.support.fake_movers import Clock
from tests.tiers.s3.stepped import NAMESPACE, UNREACHABLE, Bucket, SteppedTier, install

OK, NO_SPACE = Outcome.OK, Outcome.NO_SPACE
GONE_S = PRODUCTION.s3_other_kind_s


class Pair:
    """A tier with `shared: true`, and the lease of one without: with a tenure it stores and deletes."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.shared = SteppedTier(bucket)
        self.private = PrefixLease(
            lambda: self.shared.control.connection.client,
            *("kv-stepped", "p", "private-1", Denials("here", bucket.clock), bucket.clock, OWNER_TERMS),
        )
        self.shared.control.connection.open()

    @property
    def private_stores(self) -> bool:
        return self.private.tenure() > 0

    def pass_time(self, seconds: float, *, shared: bool = False, private: bool = False) -> None:
        """With these of them alive."""
        until_s = self.bucket.clock.now + seconds
        while self.bucket.clock.now < until_s:
            self.bucket.clock.now += 1.0
            if private and self.bucket.clock.now >= self.private.next_at_s:
                with suppress(*REQUEST_ERRORS):
                    self.private.step()
                self.private._report()
            if shared and self.bucket.clock.now % JANITOR_TERMS.renew_s < 1.0:
                self.shared.janitor_step()
                self.shared.round()

    def outage(self, seconds: float) -> None:
        """The server answers nobody."""
        self.bucket.fault = lambda _: UNREACHABLE
        self.pass_time(seconds, shared=self.shared.rows._janitor is not None, private=True)
        self.bucket.fault = lambda _: None


@pytest.fixture
def pair(server_credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    bucket = Bucket(Clock(1_800_000_000.0))
    install(monkeypatch, bucket)
    pair = Pair(bucket)
    yield pair
    pair.shared.release()


def test_a_private_engine_only_reads_beside_shared_ones(pair: Pair) -> None:
    pair.shared.open()
    assert pair.shared.store(0) == [OK]
    pair.pass_time(120.0, shared=True, private=True)
    assert not pair.private_stores
    assert not pair.private.coming_tenure()
    assert "p/.owner" not in pair.bucket.objects
    assert 'with shared: true use the prefix "p"' in pair.private.denials.current()["private prefix"]
    assert pair.shared.store(1) == [OK], "who was there first goes on"
    assert pair.shared.tier.denials == {}
    pair.pass_time(GONE_S + 60.0, private=True)
    assert pair.private_stores, "they are gone"
    pair.pass_time(10.0, private=True)
    assert pair.private.denials.current() == {}


def test_shared_engines_only_read_beside_a_private_one(pair: Pair) -> None:
    pair.pass_time(5.0, private=True)
    assert pair.private_stores
    pair.shared.open()
    pair.pass_time(120.0, shared=True, private=True)
    assert pair.shared.store(0) == [NO_SPACE]
    pair.bucket.put(pair.shared.name(1), b"bad")
    pair.shared.load(1)
    pair.shared.round()
    assert pair.shared.name(1) in pair.bucket.objects
    assert not {"p/.janitor", "p/.usage"} & pair.bucket.objects.keys()
    assert 'without shared: true uses the prefix "p"' in pair.shared.tier.denials["shared prefix"]
    assert pair.private_stores, "who was there first goes on"
    assert pair.private.denials.current() == {}
    pair.pass_time(GONE_S + 90.0, shared=True)
    assert pair.shared.store(0) == [OK], "it is gone"
    assert pair.shared.tier.denials == {}


@pytest.mark.parametrize("first", ["private", "shared"])
def test_of_both_that_began_at_once_the_shared_ones_go_on(pair: Pair, first: str) -> None:
    """As where one of them is of a release that did not look."""
    order: list[Callable[[], Any]] = [lambda: pair.pass_time(5.0, private=True), pair.shared.open]
    if first == "shared":
        order.reverse()
    for begin in order:
        seen = pair.bucket.objects.copy()
        pair.bucket.objects = {name: it for name, it in seen.items() if name.startswith("p/.probe")}
        begin()
        pair.bucket.objects.update(seen)
    pair.shared.store(0)
    pair.pass_time(20.0, shared=True, private=True)
    assert not pair.private_stores
    assert pair.shared.store(1) == [NO_SPACE], "the private one's lease may still be renewed"
    pair.pass_time(GONE_S + 120.0, shared=True, private=True)
    assert not pair.private_stores
    assert pair.shared.store(2) == [OK]


@pytest.mark.parametrize("long_s", [100.0, 3 * GONE_S])
@pytest.mark.parametrize("first", ["private", "shared"])
def test_after_an_outage_those_that_were_there_first_go_on(pair: Pair, first: str, long_s: float) -> None:
    """Though the others, which should not be there, are the first to look."""
    if first == "private":
        pair.pass_time(5.0, private=True)
    pair.shared.open()
    pair.pass_time(60.0, shared=True, private=True)
    for _ in range(3):
        pair.outage(long_s)
        pair.pass_time(20.0, shared=first == "private", private=first == "shared")
        pair.pass_time(120.0, shared=True, private=True)
        assert pair.private_stores == (first == "private")
        assert pair.shared.store(0) == [NO_SPACE if first == "private" else OK]


@pytest.mark.parametrize("first", ["private", "shared"])
def test_those_that_were_there_first_have_time_to_restart(pair: Pair, first: str) -> None:
    """All of them at once: a large model takes minutes to load. The others wait meanwhile, and would delete it all."""
    if first == "private":
        pair.pass_time(5.0, private=True)
    pair.shared.open()
    pair.pass_time(60.0, shared=True, private=True)
    pair.pass_time(600.0, shared=first == "private", private=first == "shared")
    pair.pass_time(120.0, shared=True, private=True)
    assert pair.private_stores == (first == "private")
    assert pair.shared.store(0) == [NO_SPACE if first == "private" else OK]


@pytest.mark.parametrize("conditions", [True, False])
def test_a_shared_engine_deletes_no_row_before_it_has_looked(
    pair: Pair, conditions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a private one's on a server that has no conditional writes."""
    pair.pass_time(5.0, private=True)
    name = pair.shared.name(1)
    pair.bucket.put(name, b"bad")
    pair.shared.tier.open(NAMESPACE, 0)
    janitor = pair.shared.rows._janitor
    assert janitor is not None
    for step in range(3):
        pair.shared.load(1)
        pair.shared.round()
        assert (name in pair.bucket.objects) == (step < 2)
        if not conditions:
            monkeypatch.setattr(janitor._lease, "can_be_held", lambda: False)
        if step == 1:
            pair.bucket.objects.pop("p/.owner")
        janitor.step()


@pytest.mark.parametrize("days", [1, -1])
def test_a_record_that_nobody_renews_holds_up_nobody_for_long(pair: Pair, days: int) -> None:
    """By the server's clocks at once, and if those are two by this engine's. An outage does not bring it back."""
    pair.bucket.put("p/.janitor", b"gone 1")
    pair.bucket.objects["p/.janitor"] = b"gone 1", pair.bucket.clock.now - days * 86400.0
    pair.pass_time(5.0, private=True)
    assert pair.private_stores == (days > 0)
    pair.pass_time(GONE_S, private=True)
    assert pair.private_stores
    pair.outage(120.0)
    assert not pair.private_stores
    pair.pass_time(20.0, private=True)
    assert pair.private_stores
