"""The pure part of a lease: whatever is late or lost, no two engines may hold it at once."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nixl_tiers.tiers.s3.lease_state import (
    JANITOR_TERMS,
    OWNER_TERMS,
    LeaseState,
    LeaseTerms,
    Read,
    Record,
    Write,
)

TERMS = OWNER_TERMS
SINCE_S = 1e9
RATES = st.sampled_from([0.92, 1.0, 1.08])  # less than margin_s / (2 * lease_s) off
ENGINES = st.integers(0, 2)


def record(engine: str, terms: LeaseTerms = TERMS) -> Record:
    return terms.record(engine, SINCE_S, terms.lease_s)


class Server:
    """One object with conditional writes."""

    def __init__(self) -> None:
        self.etag: str | None = None
        self.record: Record | None = None
        self._writes = 0

    def write(self, etag: str | None, content: Record) -> str | None:
        return self.let_through(content) if etag == self.etag else None

    def let_through(self, content: Record) -> str:
        """Whatever its condition was."""
        self._writes += 1
        raw = content.encode()
        self.etag, self.record = f'"{self._writes if raw else 0}"', type(content).decode(raw)
        return self.etag


@dataclass
class Request:
    kind: Read | Write
    content: Record
    sent_s: float
    answer: tuple[str | None, Record | None] | None = None  # the server's, once the request has arrived
    tested_until_s: float = 0.0  # when the write is done whose condition held when it was tested; 0: it was not yet

    def arrive(self, server: Server) -> None:
        if isinstance(self.kind, Read):
            self.answer = server.etag, server.record
        elif self.tested_until_s:
            self.answer = server.let_through(self.content), None
        else:
            self.answer = server.write(self.kind.etag, self.content), None


class Engine:
    def __init__(self, name: str, rate: float, offset_s: float, terms: LeaseTerms = TERMS) -> None:
        self.name, self.rate, self.offset_s, self.terms = name, rate, offset_s, terms
        self.state = LeaseState(name, terms)
        self.request: Request | None = None

    def clock(self, now: float) -> float:
        return self.offset_s + now * self.rate

    def tenure(self, now: float) -> int:
        return self.state.tenure(self.clock(now))

    def step(self, server: Server, now: float) -> None:
        """Send a request if one is due, and have it answered at once."""
        local = self.clock(now)
        while local >= self.state.next_at_s:
            request = Request(self.state.next_request(local), record(self.name, self.terms), local)
            request.arrive(server)
            self.answer(request, now)

    def begin(self, server: Server, now: float) -> None:
        """Claim what is nobody's, and own it from now on."""
        self.step(server, now - TERMS.confirm_s)
        assert not self.tenure(now)
        self.step(server, now)

    def answer(self, request: Request, now: float) -> None:
        assert request.answer is not None
        etag, content = request.answer
        if isinstance(request.kind, Read):
            self.state.read(etag, content, self.clock(now))
        else:
            self.state.written(etag, request.sent_s, self.clock(now))


class LeaseMachine(RuleBasedStateMachine):
    """Three engines, a network that delays, loses and answers late, a server that tests a condition some time before
    it writes, restarted and paused movers, clocks of different rates."""

    terms = OWNER_TERMS

    @initialize(rates=st.tuples(RATES, RATES, RATES), offsets=st.tuples(*[st.floats(-1e6, 1e6)] * 3))
    def start(self, rates: tuple[float, ...], offsets: tuple[float, ...]) -> None:
        self.now = 0.0
        self.server = Server()
        clocks = zip(rates, offsets, strict=True)
        self.engines = [Engine(f"engine-{n}", *each, self.terms) for n, each in enumerate(clocks)]
        self.strays: list[Request] = []  # requests that no engine waits for, and that have not arrived
        self.renamed = 0
        self.tenures: dict[LeaseState, int] = {}  # the last tenure of each
        self.ended: set[tuple[LeaseState, int]] = set()  # tenures in which others have become owners

    @rule(share=st.floats(0.002, 0.75))
    def time_passes(self, share: float) -> None:
        """Also between an engine's request and the next thing that it does: it may be paused."""
        self.advance(share * self.terms.lease_s)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for request in self.waiting:
            if 0.0 < request.tested_until_s <= self.now:
                request.arrive(self.server)
        self.strays = [each for each in self.strays if each.answer is None]

    @property
    def waiting(self) -> list[Request]:
        """Requests that have not arrived, or not been written."""
        sent = [*(engine.request for engine in self.engines), *self.strays]
        return [each for each in sent if each is not None and each.answer is None]

    @rule(number=ENGINES, share=st.sampled_from([0.3, 0.6, 1.2]))
    def the_others_are_paused(self, number: int, share: float) -> None:
        """As are their requests."""
        engine, until = self.engines[number], self.now + share * self.terms.lease_s
        while engine.request is None and self.now < until:
            engine.step(self.server, self.now)
            self.one_owner()
            self.advance(self.terms.confirm_s)

    @rule(number=ENGINES, early=st.booleans())
    def send(self, number: int, early: bool) -> None:
        """A janitor asks when it has the time to."""
        engine = self.engines[number]
        local = engine.clock(self.now)
        if engine.request is None and (early or local >= engine.state.next_at_s):
            engine.request = Request(engine.state.next_request(local), record(engine.name, self.terms), local)

    @rule(number=ENGINES)
    def arrive(self, number: int) -> None:
        request = self.engines[number].request
        if request is not None and request.answer is None:
            request.arrive(self.server)

    @rule(order=st.permutations(range(3)), answered=st.booleans())
    def all_ask_at_once(self, order: list[int], answered: bool) -> None:
        """Writes whose conditions hold now are done soon, whatever is written in between."""
        for number in order:
            self.send(number, early=True)
        for request in self.waiting:
            if isinstance(request.kind, Write) and request.kind.etag == self.server.etag:
                request.tested_until_s = self.now + 0.9 * self.terms.confirm_s
        for number in order if answered else ():
            self.arrive(number)
            self.answer(number)

    @rule(number=ENGINES)
    def answer(self, number: int) -> None:
        engine = self.engines[number]
        if engine.request is not None and engine.request.answer is not None:
            engine.answer(engine.request, self.now)
            engine.request = None

    @rule(number=ENGINES)
    def no_trouble(self, number: int) -> None:
        if self.engines[number].request is None:
            self.engines[number].step(self.server, self.now)

    @rule(number=ENGINES)
    def lose_the_answer(self, number: int) -> None:
        engine = self.engines[number]
        if engine.request is not None:
            self._abandon(engine)
            engine.state.failed(engine.clock(self.now))

    @rule(number=ENGINES)
    def unexpected_error(self, number: int) -> None:
        engine = self.engines[number]
        self._abandon(engine)
        engine.state.lost(engine.clock(self.now))
        assert not engine.tenure(self.now)

    @precondition(lambda self: self.strays)
    @rule(pick=st.integers(0, 1 << 20))
    def stray_arrives(self, pick: int) -> None:
        self.strays.pop(pick % len(self.strays)).arrive(self.server)

    @rule(number=ENGINES)
    def mover_restarts(self, number: int) -> None:
        self._abandon(self.engines[number])
        self.engines[number].state = LeaseState(self.engines[number].name, self.terms)

    @rule(number=ENGINES)
    def engine_restarts(self, number: int) -> None:
        """Closed in order: the lease is released, with a request that may be late, too."""
        engine = self.engines[number]
        write = engine.state.release() if engine.request is None else None
        if write is not None:
            self.strays.append(Request(write, record("", self.terms), 0.0))
        self._abandon(engine)
        self.renamed += 1
        engine.name = f"engine-{number}-{self.renamed}"
        engine.state = LeaseState(engine.name, self.terms)

    @invariant()
    def one_owner(self) -> None:
        owners = [engine.state for engine in self.engines if engine.tenure(self.now)]
        assert len(owners) <= 1
        for state in owners:
            number = state._held[0]
            assert (state, number) not in self.ended, "others wrote in the same tenure"
            self.ended |= {(other, last) for other, last in self.tenures.items() if other is not state}
            # A listing since a claim counts for its tenure.
            others = [engine for engine in self.engines if engine.state is not state]
            self.ended |= {(other.state, other.state.coming_tenure(other.clock(self.now))) for other in others}
            self.tenures[state] = number

    def _abandon(self, engine: Engine) -> None:
        if engine.request is not None and engine.request.answer is None:
            self.strays.append(engine.request)
        engine.request = None


class JanitorLeaseMachine(LeaseMachine):
    terms = JANITOR_TERMS


TestOwnersLease = LeaseMachine.TestCase
TestJanitorsLease = JanitorLeaseMachine.TestCase
TestOwnersLease.settings = TestJanitorsLease.settings = settings(max_examples=60, stateful_step_count=60)


def test_expiry_is_one_moment() -> None:
    """Seen at 4.1 s, 60 s later is 64.1 s; the difference of these is less than 60. Read again at once it would be, as
    long as the clock stands."""
    two = Engine("two", 1.0, 0.0)
    two.state.read('"1"', record("one"), 4.1)
    assert TERMS.lease_s > 64.1 - 4.1
    two.state.read('"1"', record("one"), 64.1)
    assert two.state.next_at_s == 64.1
    assert two.state.next_request(64.1) == Write('"1"')


def owner_and_reader() -> tuple[Server, Engine, Engine]:
    server, one, two = Server(), Engine("one", 1.0, 0.0), Engine("two", 1.0, 5000.0)
    one.begin(server, 0.0)
    two.step(server, 0.0)
    assert one.tenure(0.0) == 1
    assert two.tenure(0.0) == 0
    assert two.state.other == record("one")
    return server, one, two


def test_claim_is_no_tenure_before_a_read_has_shown_it_and_a_second_write_has_followed() -> None:
    server, one = Server(), Engine("one", 1.0, 0.0)
    one.step(server, 0.0)
    assert server.record == record("one")
    assert one.state.coming_tenure(0.0) == 1
    one.state.read(server.etag, server.record, TERMS.confirm_s / 2)
    assert (one.state.next_request(TERMS.confirm_s), one.tenure(TERMS.confirm_s)) == (Read(), 0), "it was too early"
    one.state.read(server.etag, server.record, TERMS.confirm_s)
    assert (one.state.next_request(TERMS.confirm_s), one.tenure(TERMS.confirm_s)) == (Write(server.etag), 0)
    one.step(server, TERMS.confirm_s)
    assert one.tenure(TERMS.confirm_s) == 1


@pytest.mark.parametrize("taken_over", [False, True])
def test_of_writes_that_a_server_lets_through_at_once_one_makes_an_owner(taken_over: bool) -> None:
    server, engines = Server(), [Engine("one", 1.0, 0.0), Engine("two", 1.0, 5000.0)]
    now = 0.0
    if taken_over:
        server.write(None, record("dead"))
        for engine in engines:
            engine.step(server, now)
        now = TERMS.lease_s
    for engine in engines:
        engine.state.read(server.etag, server.record, engine.clock(now))
    for engine in engines:
        assert engine.state.next_request(engine.clock(now)) == Write('"1"' if taken_over else None)
        etag = server.let_through(record(engine.name))
        engine.state.written(etag, engine.clock(now), engine.clock(now))
    for _ in range(600):
        now += 0.1
        for engine in engines:
            engine.step(server, now)
        assert not engines[0].tenure(now)
    assert engines[1].tenure(now)


@pytest.mark.parametrize("answered_s", [0.0, TERMS.lease_s / 2])
def test_a_claim_that_others_may_take_for_expired_begins_anew(answered_s: float) -> None:
    """Its engine was paused. Both writes are let through at once, and the other one stays."""
    server, one, two = Server(), Engine("one", 1.0, 0.0), Engine("two", 1.0, 5000.0)
    one.state.read(None, None, 0.0)
    one.state.written(server.write(None, record("one")), 0.0, answered_s)
    two.step(server, 0.1)
    one.state.read(server.etag, server.record, answered_s + TERMS.confirm_s)
    now = TERMS.lease_s + 0.1
    two.state.read(server.etag, server.record, two.clock(now))
    requests = [(engine, engine.state.next_request(engine.clock(now))) for engine in (one, two)]
    assert requests == [(one, Write('"1"')), (two, Write('"1"'))]
    for engine, _ in requests:
        engine.state.written(server.let_through(record(engine.name)), engine.clock(now), engine.clock(now))
    assert (one.tenure(now), one.state.coming_tenure(now)) == (0, 2), "what it has listed since its claim may be old"
    for _ in range(600):
        now += 0.1
        one.step(server, now)
        two.step(server, now)
        assert not one.tenure(now)
    assert two.tenure(now)


def test_claim_that_another_engine_has_overwritten_is_given_up() -> None:
    server, one = Server(), Engine("one", 1.0, 0.0)
    one.step(server, 0.0)
    server.write(server.etag, record("two"))
    one.step(server, TERMS.confirm_s)
    assert (one.state.other, one.state.coming_tenure(TERMS.confirm_s)) == (record("two"), 0)


def test_claim_is_released() -> None:
    server, one = Server(), Engine("one", 1.0, 0.0)
    one.step(server, 0.0)
    assert one.state.release() == Write(server.etag)


def test_another_engine_lives_if_it_is_seen_to_write() -> None:
    server, one, two = owner_and_reader()
    assert not two.state.other_lives, "it may be of its own last process"
    one.step(server, TERMS.renew_s)
    two.step(server, TERMS.renew_s)
    assert two.state.other_lives
    three = Engine("three", 1.0, 0.0)
    three.step(server, TERMS.renew_s)
    assert not three.state.other_lives


def test_owner_that_was_replaced_knows_that_the_other_lives() -> None:
    server, one, _ = owner_and_reader()
    server.write(server.etag, record("two"))
    one.state.failed(1.0)
    one.step(server, 2.0)
    assert one.state.other_lives


class TestUnguarded:
    """On a server without conditional writes nothing is written, and the object is only looked at."""

    def test_what_nobody_owns_is_used_without_a_lease(self) -> None:
        server, one = Server(), Engine("one", 1.0, 0.0)
        one.state.begin_anew(unguarded=True)
        for now in (0.0, 10.0, 300.0, 310.0):
            one.step(server, now)
            assert one.tenure(now) == (1 if now < 300.0 else 2)
        assert (server.etag, one.state.release()) == (None, None)

    def test_nothing_is_stored_while_another_engine_renews(self) -> None:
        server, one, two = owner_and_reader()
        two.state.begin_anew(unguarded=True)
        for second in range(300):
            one.step(server, second)
            two.step(server, second)
            assert (one.tenure(second), two.tenure(second)) == (1, 0)
        last = second
        first = next(s for s in range(last, last + 600) if two.step(server, s) or two.tenure(s))
        assert first - last >= TERMS.lease_s - TERMS.renew_s
        one.step(server, first)
        two.step(server, first + TERMS.poll_s)
        assert not two.tenure(first + TERMS.poll_s), "it is back"

    def test_guarded_again_begins_with_a_claim(self) -> None:
        server, one = Server(), Engine("one", 1.0, 0.0)
        one.state.begin_anew(unguarded=True)
        one.step(server, 0.0)
        one.state.begin_anew(unguarded=False)
        assert not one.tenure(1.0)
        one.begin(server, 2.0)
        assert one.tenure(2.0) == 2
        assert server.record == record("one")


def test_an_owner_that_renews_stays_the_owner() -> None:
    server, one, two = owner_and_reader()
    for second in range(600):
        one.step(server, second)
        two.step(server, second)
        assert one.tenure(second) == 1
        assert two.tenure(second) == 0


def test_expired_lease_is_taken_over() -> None:
    server, one, two = owner_and_reader()
    seconds = next(s for s in range(600) if two.step(server, s) or two.tenure(s))
    assert TERMS.lease_s <= seconds - TERMS.confirm_s <= TERMS.lease_s + TERMS.poll_s
    assert not one.tenure(seconds)
    one.step(server, seconds)
    one.step(server, seconds + TERMS.retry_s)
    assert one.state.other == record("two")


def test_engine_that_starts_after_the_owner_has_died_waits_one_lease() -> None:
    server, _, _ = owner_and_reader()
    heir = Engine("three", 1.0, 77.0)
    began = 42.0
    seconds = next(s for s in range(600) if heir.step(server, began + s) or heir.tenure(began + s))
    assert seconds == TERMS.lease_s + TERMS.confirm_s


def test_deleted_lease_object_is_taken_at_the_next_read() -> None:
    server, one, two = owner_and_reader()
    server.etag = server.record = None
    two.begin(server, TERMS.poll_s + TERMS.confirm_s)
    assert two.tenure(TERMS.poll_s + TERMS.confirm_s)
    one.step(server, TERMS.renew_s)
    assert not one.tenure(TERMS.renew_s + TERMS.retry_s + 40)


def test_owner_stops_before_the_lease_expires() -> None:
    _, one, _ = owner_and_reader()
    assert one.tenure(TERMS.lease_s - TERMS.margin_s - 0.1) == 1
    assert one.tenure(TERMS.lease_s - TERMS.margin_s) == 0


def test_released_lease_is_taken_over_at_the_next_read() -> None:
    server, one, two = owner_and_reader()
    write = one.state.release()
    assert write is not None
    assert not one.tenure(0.0)
    assert server.write(write.etag, record("")) is not None
    two.begin(server, TERMS.poll_s + TERMS.confirm_s)
    assert two.tenure(TERMS.poll_s + TERMS.confirm_s) == 1


def test_restarted_mover_continues_its_engines_lease() -> None:
    server, one, _ = owner_and_reader()
    successor = Engine("one", 1.0, 100.0)
    successor.begin(server, 2.0)
    assert successor.tenure(2.0) == 1
    assert server.record == record("one")
    del one


def test_lapsed_lease_that_nobody_took_is_a_new_tenure() -> None:
    server, one, _ = owner_and_reader()
    one.begin(server, 51.0)
    assert one.tenure(51.0) == 2


def test_lost_answer_of_a_renewal_keeps_the_tenure() -> None:
    server, one, _ = owner_and_reader()
    request = Request(one.state.next_request(15.0), record("one"), 15.0)
    request.arrive(server)
    one.state.failed(20.0)
    one.step(server, 21.0)
    assert one.tenure(21.0 + TERMS.lease_s - TERMS.margin_s - 0.1) == 1


def test_time_counts_from_before_a_renewal_was_sent() -> None:
    server, one, two = owner_and_reader()
    renewal = Request(one.state.next_request(15.0), record("one"), 15.0)
    renewal.arrive(server)
    two.step(server, 15.0)
    one.answer(renewal, 50.0)
    assert not one.tenure(55.0)
    two.begin(server, 76.0)
    assert two.tenure(76.0)


def test_write_whose_answer_was_lost_is_not_repeated_blindly() -> None:
    _, one, _ = owner_and_reader()
    one.state.failed(15.0)
    assert isinstance(one.state.next_request(16.0), Read)


def test_owner_that_reads_another_engines_lease_stops_at_once() -> None:
    _, one, _ = owner_and_reader()
    one.state.failed(15.0)
    one.state.read('"other"', record("two"), 16.0)
    assert not one.tenure(16.0)


def test_longer_lease_of_another_engine_is_respected() -> None:
    state = LeaseState("two", TERMS)
    state.read('"1"', Record("one", SINCE_S, 300.0), 0.0)
    assert isinstance(state.next_request(299.0), Read)
    assert state.next_request(300.0) == Write('"1"')


def test_unknown_content_is_another_engines_lease() -> None:
    state = LeaseState("two", TERMS)
    for raw in (b"", b"{}", b"[1]", b"\xff", b'{"engine": "x", "since": 1e300, "lease": 1}'):
        assert Record.decode(raw) is None
    state.read('"1"', None, 0.0)
    assert isinstance(state.next_request(59.0), Read)
    assert state.next_request(60.0) == Write('"1"')


def test_record_survives_encoding_and_is_never_the_same() -> None:
    assert Record.decode(record("pod/1/ab").encode()) == record("pod/1/ab")
    assert record("a").encode() != record("a").encode()
