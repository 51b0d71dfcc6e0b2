"""Several engines on one private prefix: one stores and deletes, the others read until they get the lease."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from nixl_tiers.base.chunk import UNREACHABLE, Geometry, Outcome
from nixl_tiers.tiers.base import GONE
from nixl_tiers.tiers.s3 import conditional
from nixl_tiers.tiers.s3 import lease as lease_module
from nixl_tiers.tiers.s3.conditional import CONDITIONS, write_test_name
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.lease import KIND, PrefixLease
from nixl_tiers.tiers.s3.lease_state import OWNER_TERMS, LeaseTerms, Record
from nixl_tiers.tiers.s3.listing import ExpirySweep
from nixl_tiers.tiers.s3.names import WRITE_TEST_NAME
from tests.mover.harness import MoverProcess, has_exited
from tests.mover.stub_tiers import SHORT_LEASE_UPLOADS
from tests.support.servers import MotoServer, S3Server
from tests.system.tiers.s3.harness import CUT_OFF, FaultyS3, TierDriver, client_of, key_of, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
CAPACITY_ROWS = 32
SHORT = LeaseTerms(
    lease_s=6.0, margin_s=2.0, renew_s=0.4, poll_s=0.1, retry_s=0.1, confirm_s=0.05, doubt_s=0.0, ask_again_s=0.2
)


DELETED = object()


def refused(status: int, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


@pytest.fixture(autouse=True)
def _short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "OWNER_TERMS", SHORT)


@pytest.fixture
def lease_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease expires, on a machine however busy: another engine takes over only if the owner has released its own."""
    monkeypatch.setattr(lease_module, "OWNER_TERMS", replace(SHORT, lease_s=600.0, margin_s=200.0))


@pytest.fixture
def make(place: dict[str, Any]) -> Iterator[Callable[..., TierDriver]]:
    """Makes tiers of different engines, on one private prefix."""
    with ExitStack() as stack:
        yield lambda engine="", **fields: stack.enter_context(
            TierDriver(SMALL, 32, engine=engine, **place, **({"capacity": CAPACITY_ROWS * ROW} | fields))
        )


def stored(driver: TierDriver, number: int) -> bool:
    """Store a row as soon as the tier has the lease and has listed."""

    def store() -> bool:
        driver.listed_rows()
        return driver.store([number]) == [Outcome.OK]

    return wait_until(store)


def objects(server: S3Server, place: dict[str, Any]) -> dict[str, int]:
    """Sizes of the rows below the prefix."""
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=place["bucket"], Prefix=place["prefix"])
    found = {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", ())}
    return {name: size for name, size in found.items() if name.count("/") > 1}


def disconnect_lease(driver: TierDriver) -> None:
    """From now on the lease is not renewed: no request for it arrives."""

    def client() -> Any:
        raise EndpointConnectionError(endpoint_url="disconnected")

    assert driver.tier._owner.lease is not None
    driver.tier._owner.lease.client = client


def owner_and_reader(make: Callable[..., TierDriver], rows: int) -> tuple[TierDriver, TierDriver]:
    """An engine that has stored rows, and another without the lease that has listed them."""
    owner, reader = make("one"), make("two")
    owner.open()
    for number in range(rows):
        assert stored(owner, number)
    assert len(reader.open()) == rows
    return owner, reader


class TestTwoEngines:
    @pytest.mark.usefixtures("lease_is_released")
    def test_one_stores_and_the_other_only_reads(
        self, make: Callable[..., TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        owner, reader = make("pod-0/17/ab"), make("pod-1/17/cd")
        owner.open()
        assert stored(owner, 1)
        assert owner.tier.denials == {}
        assert [entry.key for entry in reader.open()] == [key_of(1)]
        assert reader.load([1]) == [Outcome.OK]
        assert reader.store([2, 3]) == [Outcome.NO_SPACE] * 2, "which opens no circuit"
        reader.delete(1)
        assert reader.settled(0), "forgotten"
        assert wait_until(lambda: KIND in reader.tier.denials), "when it has seen a renewal"
        sentence = reader.tier.denials[KIND]
        assert f'the private prefix "{place["prefix"]}" belongs to engine pod-0/17/ab since 20' in sentence
        assert "set shared: true in every engine, or another prefix in this one" in sentence
        assert not reader.tier._control.has_pending_deletes
        assert set(objects(s3_server, place)) == {owner.name(1)}

    @pytest.mark.usefixtures("lease_is_released")
    def test_closing_hands_the_prefix_over_at_once(
        self, make: Callable[..., TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        owner, heir = make("one"), make("two")
        owner.open()
        assert stored(owner, 1)
        assert [entry.key for entry in heir.open()] == [key_of(1)]
        assert stored(owner, 2)
        owner.delete(1)
        assert owner.settled(1)
        heir.delete(1)
        owner.tier.close()
        entries: list[Any] = []

        def store() -> bool:
            entries.extend(heir.listed_rows())
            return heir.store([3]) == [Outcome.OK]

        assert wait_until(store)
        assert [(entry.key, entry.slot == GONE) for entry in entries] == [(key_of(2), False)]
        assert heir.settled(2)
        assert heir.load([1, 2, 3]) == [Outcome.MISSING, Outcome.OK, Outcome.OK]
        assert set(objects(s3_server, place)) == {heir.name(2), heir.name(3)}

    @pytest.mark.usefixtures("lease_is_released")
    def test_rows_that_the_owner_deleted_are_reported_to_its_successor(self, make: Callable[..., TierDriver]) -> None:
        owner, heir = make("one"), make("two")
        owner.open()
        assert stored(owner, 1)
        heir.open()
        owner.delete(1)
        assert owner.settled(0)
        owner.tier.close()
        entries: list[Any] = []
        assert wait_until(lambda: bool(entries.extend(heir.listed_rows()) or entries))
        assert [(entry.key, entry.slot) for entry in entries] == [(key_of(1), GONE)]
        assert heir.settled(0)

    @pytest.mark.usefixtures("lease_is_released")
    def test_rows_that_were_forgotten_without_the_lease_are_counted_again(
        self, make: Callable[..., TierDriver]
    ) -> None:
        owner, heir = owner_and_reader(make, rows=4)
        heir.delete(0, 1)
        assert heir.settled(2)
        owner.tier.close()
        entries: list[Any] = []
        assert wait_until(lambda: bool(entries.extend(heir.listed_rows()) or entries))
        assert {entry.key for entry in entries} == {key_of(0), key_of(1)}
        assert heir.settled(4)

    @pytest.mark.usefixtures("lease_is_released")
    def test_rows_evicted_during_the_new_owners_listing_are_counted_and_listed_again(
        self, make: Callable[..., TierDriver]
    ) -> None:
        owner, heir = owner_and_reader(make, rows=4)
        quota = heir.tier._rows.quota
        adopt = quota.adopt

        def adopt_between_evictions(listed: Any) -> None:
            heir.delete(0)
            adopt(listed)
            heir.delete(1)

        quota.adopt = adopt_between_evictions  # type: ignore[method-assign]
        owner.tier.close()
        entries: list[Any] = []
        assert wait_until(lambda: bool(entries.extend(heir.listed_rows()) or heir.tier._owner.may_write))
        assert {entry.key for entry in entries} == {key_of(0), key_of(1)}
        assert heir.settled(4)

    @pytest.mark.usefixtures("lease_is_released")
    def test_expiry_sweep_does_not_delay_the_new_owner(
        self, make: Callable[..., TierDriver], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ExpirySweep, "next_step_s", lambda _, now: now + 3600.0)
        owner, heir = make("one"), make("two", max_age=3600)
        owner.open()
        assert stored(owner, 1)
        assert len(heir.open()) == 1
        sweep = heir.tier.maintain()
        assert next(sweep) == []
        owner.tier.close()
        assert wait_until(lambda: next(sweep, None) is None)
        for _ in heir.tier.list_rows():
            time.sleep(0.002)
        assert heir.store([2]) == [Outcome.OK]

    def test_owner_without_answers_stops_before_another_takes_over(
        self, make: Callable[..., TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        owner, heir = make("one"), make("two")
        owner.open()
        assert stored(owner, 1)
        heir.open()
        disconnect_lease(owner)
        number = 2
        owned: set[int] = set()
        while not heir.tier._owner.may_write:
            if owner.store([number]) == [Outcome.OK]:
                owned.add(number)
            # The later owner first: the other may stop between the two looks, and one that has got it keeps it.
            assert not (heir.tier._owner.may_write and owner.tier._owner.may_write)
            number = 2 + (number - 1) % 8
            heir.listed_rows()
        assert owner.store([10]) == [Outcome.NO_SPACE]
        sentence = "cannot be renewed, so nothing is stored or deleted there"
        assert wait_until(lambda: sentence in owner.tier.denials.get(UNREACHABLE, ""))
        owner.delete(1)
        assert stored(heir, 20)
        assert set(heir.load([1, *owned])) == {Outcome.OK}
        assert {owner.name(each) for each in {1, 20, *owned}} <= set(objects(s3_server, place))

    def test_owner_that_was_replaced_reads_and_gets_it_back(self, make: Callable[..., TierDriver]) -> None:
        owner, heir = make("one"), make("two")
        owner.open()
        assert stored(owner, 1)
        heir.open()
        assert owner.tier._owner.lease is not None
        connect = owner.tier._owner.lease.client
        disconnect_lease(owner)
        assert stored(heir, 2)
        owner.tier._owner.lease.client = connect
        assert wait_until(lambda: "belongs to engine two" in owner.tier.denials.get(KIND, ""))
        heir.delete(1)
        assert heir.settled(1)
        heir.tier.close()
        assert stored(owner, 3)
        assert owner.load([1, 2, 3]) == [Outcome.MISSING, Outcome.OK, Outcome.OK]
        assert owner.settled(2)

    def test_unexpected_error_ends_the_tenure_and_the_lease_is_asked_for_again(
        self, make: Callable[..., TierDriver], caplog: pytest.LogCaptureFixture
    ) -> None:
        owner = make("one")
        owner.open()
        assert stored(owner, 1)
        assert owner.tier._owner.lease is not None
        connect = owner.tier._owner.lease.client
        owner.tier._owner.lease.client = lambda: 1 // 0
        assert wait_until(lambda: not owner.tier._owner.may_write)
        assert owner.store([2]) == [Outcome.NO_SPACE]
        assert wait_until(lambda: "cannot be renewed" in owner.tier.denials.get(UNREACHABLE, ""))
        owner.tier._owner.lease.client = connect
        assert stored(owner, 2)
        lines = [r.getMessage() for r in caplog.records if "unexpected error" in r.getMessage()]
        assert len(lines) == 1
        assert lines[0].endswith("unexpected error (ZeroDivisionError), and asked for again")

    @pytest.mark.usefixtures("lease_is_released")
    def test_uploads_that_come_with_the_claim_wait_for_the_lease(
        self, make: Callable[..., TierDriver], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        confirmed, read = threading.Event(), PrefixLease._read

        def read_late(lease: PrefixLease) -> Any:
            assert lease.state._claim is None or confirmed.wait(120)
            return read(lease)

        monkeypatch.setattr(PrefixLease, "_read", read_late)
        owner = make("one")
        assert owner.open() == []
        assert owner.tier._owner.tenure == 0
        batch = owner.begin_store([1])
        assert owner.tier.poll() == []
        confirmed.set()
        assert owner.finish(batch) == [[Outcome.OK]]
        assert owner.tier._rows.listing is None
        assert not owner.tier._owner.has_new_tenure, "the listing that ran meanwhile counts"

    def test_restart_waits_for_the_lease_of_the_last_process_without_a_warning(
        self, make: Callable[..., TierDriver], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        before, after = make("pod-0/17/ab"), make("pod-0/17/cd")
        before.open()
        assert stored(before, 1)
        assert before.tier._owner.lease is not None
        before.tier._owner.lease.close(120.0, release=False)  # as when its process was killed
        assert len(after.open()) == 1
        assert after.load([1]) == [Outcome.OK]
        reported: list[str] = []
        assert wait_until(lambda: bool(reported.extend(after.tier.denials) or after.tier._owner.tenure))
        assert reported == []
        lines = [r.getMessage() for r in caplog.records if "was not released by engine pod-0/17/ab" in r.getMessage()]
        assert len(lines) == 1
        assert stored(after, 2)

    @pytest.mark.usefixtures("lease_is_released")
    def test_restarted_mover_of_the_same_engine_continues(self, make: Callable[..., TierDriver]) -> None:
        before, after = make("one"), make("one")
        before.open()
        assert stored(before, 1)
        assert before.tier._owner.lease is not None
        before.tier._owner.lease.close(120.0, release=False)  # as when its process was killed
        assert len(after.open()) == 1
        assert after.store([2]) == [Outcome.OK], "without waiting"


class TestWithoutALease:
    def test_read_only_tier_takes_none(
        self, make: Callable[..., TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        reader = make("one", write="off")
        reader.open()
        assert reader.tier.relist_s is None
        found = s3_server.client().list_objects_v2(Bucket=place["bucket"], Prefix=place["prefix"])
        assert found["KeyCount"] == 0
        assert reader.tier.denials == {}

    def test_page_of_a_proxy_is_not_taken_for_a_server_without_conditional_writes(self) -> None:
        """It answers every PUT with status 200, and nothing of it is S3's."""
        client = Mock(**{"put_object.return_value": {"ResponseMetadata": {"HTTPStatusCode": 200}}})
        lease = PrefixLease(lambda: client, "kv", "p", "one", Denials("here"), time.time, SHORT)
        lease.start(60.0)
        assert client.put_object.called
        assert lease.tenure() == 0
        assert lease.denials.current()[KIND] == (
            "here: answers have no ETag, so they are not S3's, perhaps a proxy's page: there is no lease of the "
            'private prefix "p", and nothing is stored or deleted there'
        )
        lease.close(120.0, release=False)

    def test_server_that_never_says_whether_it_knows_conditions_is_a_problem(self) -> None:
        client = Mock(**{"put_object.side_effect": refused(500, "InternalError")})
        terms = replace(SHORT, lease_s=0.2, margin_s=0.1)
        lease = PrefixLease(lambda: client, "kv", "p", "one", Denials("here"), time.time, terms)
        lease.start(60.0)
        assert wait_until(lambda: "cannot be acquired" in lease.denials.current().get(UNREACHABLE, ""))
        lease.close(120.0, release=False)

    def test_lease_that_is_no_record_is_of_an_unknown_engine(self, s3_server: S3Server, place: dict[str, Any]) -> None:
        client, bucket, prefix = s3_server.client(), place["bucket"], place["prefix"]
        client.put_object(Bucket=bucket, Key=f"{prefix}/{OWNER_TERMS.name}", Body=b'{"engine": "torn')
        lease = PrefixLease(lambda: client, bucket, prefix, "one", Denials("here"), time.time, SHORT)
        lease.start(60.0)
        sentence = lease.denials.current()[KIND]
        assert (
            f'belongs to an unknown engine ("{prefix}/.owner" is no record of one), so rows are only read' in sentence
        )
        assert wait_until(lambda: lease.tenure() > 0), "nobody renews it"
        lease.close(120.0, release=True)

    def test_answer_that_is_cut_off_is_no_unexpected_error(
        self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(lease_module, "conditional_writes_work", lambda *_: True)
        faulty.fault = lambda request: CUT_OFF if request.method == "GET" else None
        client = client_of(faulty)
        lease = PrefixLease(lambda: client, "kv", "p", "one", Denials("here"), time.time, SHORT)
        lease.start(60.0)
        assert wait_until(lambda: faulty.count("GET") > 2)
        lease.close(120.0, release=False)
        assert not [r for r in caplog.records if "unexpected" in r.getMessage()]

    def test_one_refusal_does_not_switch_the_lease_off(
        self, make: Callable[..., TierDriver], monkeypatch: pytest.MonkeyPatch, s3_server: S3Server
    ) -> None:
        """Nor does an object that somebody deletes between two test writes."""
        monkeypatch.setattr(lease_module, "OWNER_TERMS", replace(SHORT, doubt_s=600.0))
        monkeypatch.setattr(conditional, "DOUBT_TRIES", 6000)
        answers, looked_at = [refused(405, "MethodNotAllowed"), DELETED], threading.Event()
        put_if = lease_module.put_if

        def once(client: Any, bucket: str, name: str, body: bytes, condition: dict[str, str]) -> Any:
            if condition == {"IfNoneMatch": "*"} and WRITE_TEST_NAME in name and answers:
                if isinstance(answer := answers.pop(0), ClientError):
                    raise answer
                assert looked_at.wait(120)
                put_if(client, bucket, name, body, condition)
                client.delete_object(Bucket=bucket, Key=name)
            return put_if(client, bucket, name, body, condition)

        monkeypatch.setattr(lease_module, "put_if", once)
        owner = make("one")
        owner.open()
        assert owner.tier._owner.tenure == 0
        assert "and is asked again for 600 s" in owner.tier.denials[CONDITIONS]
        looked_at.set()
        assert stored(owner, 1)
        assert owner.tier._owner.lease is not None
        assert not owner.tier._owner.lease.state.unguarded
        assert answers == []

    def test_test_object_has_the_engines_name_and_is_deleted(
        self, make: Callable[..., TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        owner = make("pod-0/17/ab")
        owner.open()
        assert stored(owner, 1)
        pages = s3_server.client().list_objects_v2(Bucket=place["bucket"], Prefix=place["prefix"])
        assert not [each["Key"] for each in pages["Contents"] if WRITE_TEST_NAME in each["Key"]]
        assert write_test_name("pod-0/17/ab") == ".probe-pod-0-17-ab"

    def test_without_conditional_writes_nothing_is_stored_while_another_engine_renews(
        self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        renewals = 0
        owner = f"nixl-tiers/{OWNER_TERMS.name}"

        def renew() -> None:
            nonlocal renewals
            renewals += 1
            faulty.objects[owner] = Record("other", 1e9, SHORT.lease_s).encode()
            faulty.etag = f'"{renewals}"'

        renew()
        with TierDriver(SMALL, 32, bucket="kv-alone", endpoint=faulty.endpoint) as driver:
            driver.open()
            read = faulty.count("GET")
            assert wait_until(lambda: bool(renew() or faulty.count("GET") > read + 8))
            assert driver.store([1]) == [Outcome.NO_SPACE]
            assert "belongs to engine other" in driver.tier.denials[KIND]
            assert stored(driver, 1), "nobody renews it any more"
            renew()
            assert wait_until(lambda: driver.tier._owner.tenure == 0), "it is back"

    def test_lease_begins_when_the_server_supports_it_at_last(
        self, make: Callable[..., TierDriver], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        supported = False
        ask = lease_module.conditional_writes_work
        monkeypatch.setattr(lease_module, "conditional_writes_work", lambda *args: supported and ask(*args))
        owner, other = make("one"), make("two")
        owner.open()
        assert stored(owner, 1)
        assert CONDITIONS in owner.tier.denials
        before = owner.tier._owner.tenure
        supported = True
        lease = owner.tier._owner.lease
        assert lease is not None
        assert wait_until(lambda: not lease.state.unguarded and owner.tier._owner.tenure > before)
        other.open()
        assert other.store([2]) == [Outcome.NO_SPACE]
        assert stored(owner, 2)

    @pytest.mark.parametrize("ignored", [False, True])
    def test_server_without_conditional_writes_is_served_and_that_is_a_problem(
        self, faulty: FaultyS3, ignored: bool
    ) -> None:
        faulty.ignores_conditions, faulty.etag = ignored, '"0"'
        with TierDriver(SMALL, 32, bucket="kv-alone", endpoint=faulty.endpoint) as driver:
            driver.open()
            assert driver.store([1]) == [Outcome.OK]
            driver.delete(1)
            assert driver.settled(0)
            assert list(driver.tier.denials) == [CONDITIONS]
            assert "two engines on the private prefix" in driver.tier.denials[CONDITIONS]
        assert f"nixl-tiers/{OWNER_TERMS.name}" not in faulty.objects


ENGINE = """
    import json, sys, time
    from tests.mover.harness import MoverProcess, key_of
    from nixl_tiers.base.chunk import Geometry
    from nixl_tiers.mover.protocol import Store
    from nixl_tiers.tiers.base import Move

    mover = MoverProcess(json.loads(sys.argv[1]), Geometry(1, 64 << 10), 8, engine="engine-0")
    mover.open()
    mover.listed_rows()
    mover.store([1])
    for number in range(200):
        mover.begin(Store, [Move(n % 8, n, key_of(n), seal=True) for n in range(10 * number, 10 * number + 10)])
    print(mover.process.pid, flush=True)
    time.sleep(600)
"""


def test_mover_of_a_killed_engine_releases_the_lease_though_uploads_wait(
    moto: MotoServer, s3_credentials: Callable[[S3Server], None], s3_bucket: Callable[[S3Server], str], s3_prefix: str
) -> None:
    s3_credentials(moto)
    place = {"bucket": s3_bucket(moto), "prefix": s3_prefix}
    patient = "tests.mover.stub_tiers:PatientConfig"
    tier = {"type": patient, "endpoint": moto.endpoint, "capacity": "1GiB", **place}
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", textwrap.dedent(ENGINE), json.dumps(tier)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, env=environment)
    assert engine.stdout is not None
    mover = int(engine.stdout.readline())
    engine.kill()
    engine.wait()
    engine.stdout.close()
    assert wait_until(lambda: has_exited(mover))
    found = moto.client().get_object(Bucket=place["bucket"], Key=f"{s3_prefix}/{OWNER_TERMS.name}")
    record = Record.decode(found["Body"].read())
    assert record is not None
    assert record.engine == "", "released: the next engine takes it when it reads it"
    assert 1 <= len(objects(moto, place)) < 2000


def test_killed_owners_rows_stay_and_the_capacity_is_kept(
    moto: MotoServer,
    s3_credentials: Callable[[S3Server], None],
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
) -> None:
    """Real movers, killed at random moments: the other one takes over when the lease has expired."""
    s3_credentials(moto)
    place = {"bucket": s3_bucket(moto), "prefix": s3_prefix}
    config = {"type": "tests.mover.stub_tiers:ShortLeaseConfig", "endpoint": moto.endpoint, **place}
    tier = {**config, "capacity": CAPACITY_ROWS * ROW}
    rng = random.Random(7)
    with ExitStack() as stack:
        live: set[int] = set()
        number = 0

        def start(engine: str) -> MoverProcess:
            mover = stack.enter_context(MoverProcess(tier, SMALL, 64, engine=engine))
            mover.open()
            mover.listed_rows()
            return mover

        owner = start("engine-0")
        for engine in ("engine-1", "engine-2"):
            heir = start(engine)
            until = time.monotonic() + rng.uniform(0.05, 0.5)
            while time.monotonic() < until and len(live) < 12:
                number += 1
                (outcome,) = owner.store([number])
                # NO_SPACE: on a busy machine it could not renew its lease in time.
                assert outcome in {Outcome.OK, Outcome.NO_SPACE}
                live |= {number} if outcome is Outcome.OK else set()
            owner.kill()
            mark = 1000 + number
            assert wait_until(lambda heir=heir, mark=mark: heir.store([mark], slots=[31]) == [Outcome.OK])  # type: ignore[misc]
            live.add(mark)
            assert set(heir.load(sorted(live))) == {Outcome.OK}
            owner = heir
        owner.store(list(range(2000, 2040)), slots=list(range(40)))
        assert sum(objects(moto, place).values()) <= (CAPACITY_ROWS + SHORT_LEASE_UPLOADS) * ROW
        record = moto.client().get_object(Bucket=place["bucket"], Key=f"{s3_prefix}/{OWNER_TERMS.name}")["Body"].read()
        assert Record.decode(record).engine == "engine-2"  # type: ignore[union-attr]
        owner.stop()
