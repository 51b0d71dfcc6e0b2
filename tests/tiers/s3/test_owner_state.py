"""Two engines on one private prefix: the real tier, lease, books and delete queue over a bucket in memory.

Nothing runs by itself: each step of the lease's thread, of the control thread and of the mover's loop is a step of the
machine, at a time that the machine sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import BytesIO
from typing import Any
from unittest import mock

import hypothesis.strategies as st
from botocore.exceptions import ClientError, EndpointConnectionError
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nixl_tiers.base.chunk import Geometry, Key
from nixl_tiers.config.schema import S3Config
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import GONE, Entry, Move
from nixl_tiers.tiers.nixl_agent import TransferState
from nixl_tiers.tiers.s3 import lease as lease_module
from nixl_tiers.tiers.s3 import transfers
from nixl_tiers.tiers.s3.client import Credentials
from nixl_tiers.tiers.s3.lease import PrefixLease
from nixl_tiers.tiers.s3.listing import FullListing
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.tier import S3Tier

GEOMETRY = Geometry(cells=1, cell_payload=4096)
ROW = GEOMETRY.row_bytes
CAPACITY_ROWS = 5
UPLOADS = 2
NAMESPACE = bytes(16)
NAMES = RowNames("p")
KEYS = st.sampled_from([b"k%d" % number for number in range(9)])
NUMBERS = st.integers(0, 1)
RATES = st.sampled_from([0.92, 1.08])  # less than margin_s / (2 * lease_s) off
MAX_AGE_S = 300.0
PAGE_ROWS = 3


@dataclass(frozen=True)
class Version:
    """What is stored under one name."""

    body: bytes
    etag: str
    modified_s: float
    began: int = 0  # steps of the machine
    landed: int = 0


@dataclass
class Upload:
    """A transfer, as far as the tier looks at it."""

    name: str
    began: int
    started_s: float = 0.0
    state: TransferState = TransferState.PENDING

    def over(self) -> bool:
        return self.state is not TransferState.PENDING


class Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, Version] = {}
        self.now_s = 0.0
        self.step = 0
        self._writes = 0

    def put(self, name: str, body: bytes, began: int = 0) -> Version:
        self._writes += 1
        self.objects[name] = Version(body, f'"{self._writes}"', self.now_s, began, self.step)
        return self.objects[name]

    @property
    def rows(self) -> dict[str, Version]:
        return {name: version for name, version in self.objects.items() if NAMES.parse(name)}

    @property
    def used_bytes(self) -> int:
        return sum(len(version.body) for version in self.rows.values())

    @property
    def _date(self) -> dict[str, Any]:
        now = datetime.fromtimestamp(self.now_s, UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        return {"HTTPHeaders": {"date": now}, "HTTPStatusCode": 200}


def refused(status: int) -> ClientError:
    return ClientError({"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}, "any")


class Client:
    """One mover's boto3 client."""

    def __init__(self, bucket: Bucket, engine: Engine) -> None:
        self.bucket, self.engine = bucket, engine
        self.meanwhile: Callable[[], None] | None = None
        """What happens while the answer to the next listing is on its way."""

    def put_object(self, *, Bucket: str, Key: str, Body: bytes, **condition: str) -> dict[str, Any]:  # noqa: N803
        found = self.bucket.objects.get(Key)
        if condition != ({"IfNoneMatch": "*"} if found is None else {"IfMatch": found.etag}):
            raise refused(412)
        return {"ETag": self.bucket.put(Key, Body).etag}

    def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:  # noqa: N803
        found = self.bucket.objects.get(Key)
        if found is None:
            raise refused(404)
        return {"ETag": found.etag, "Body": BytesIO(found.body)}

    def list_objects_v2(self, *, Bucket: str, Prefix: str, StartAfter: str = "") -> dict[str, Any]:  # noqa: N803
        names = sorted(name for name in self.bucket.objects if name.startswith(Prefix) and name > StartAfter)
        found = [(name, self.bucket.objects[name]) for name in names[:PAGE_ROWS]]
        self.engine.seen.update(found)
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()
        return {
            "Contents": [
                {"Key": name, "Size": len(v.body), "LastModified": datetime.fromtimestamp(v.modified_s, UTC)}
                for name, v in found
            ],
            "IsTruncated": len(names) > PAGE_ROWS,
            "ResponseMetadata": self.bucket._date,
        }

    def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:  # noqa: N803
        try:
            self._check_deletes(Delete)
        except AssertionError as error:  # which the control thread would take for a failed request
            self.engine.world.wrong.append(str(error))
        for each in Delete["Objects"]:
            self.bucket.objects.pop(each["Key"], None)
        return {}

    def _check_deletes(self, request: dict[str, Any]) -> None:
        self.engine.may_touch("deletes")
        for each in request["Objects"]:
            found = self.bucket.objects.get(each["Key"])
            if found is None:
                continue
            late = found.began < self.engine.listed_from <= found.landed
            assert late or (each["Key"], found) in self.engine.seen, "it deletes a row that it has not seen"


class Data:
    """Stands for S3Data."""

    credentials: Credentials | None = None

    def __init__(self, bucket: Bucket, engine: Engine) -> None:
        self.bucket, self.engine = bucket, engine
        self.free_staging = [0]
        self.uploads: list[Upload] = []

    @property
    def running(self) -> int:
        return len(self.uploads)

    @property
    def busy(self) -> bool:
        return bool(self.uploads)

    def connect(self, credentials: Credentials, region: str, endpoint: str | None) -> None:
        self.credentials = credentials

    def populate_staging(self) -> None:
        pass

    def upload(self, row: int, name: str) -> Upload:
        self.engine.may_touch("uploads")
        self.uploads.append(Upload(name, self.bucket.step))
        return self.uploads[-1]

    def release(self, upload: Upload) -> None:
        self.uploads.remove(upload)

    def poll(self, now: float) -> bool:
        return any(upload.over() for upload in self.uploads)

    def close(self) -> None:
        pass


class SteppedLease(PrefixLease):
    """Without a thread."""

    def start(self, wait_s: float) -> None:
        self._conditions.answered(work=True, now=0.0)

    def step(self) -> None:
        """What the thread does when it is due."""
        if lease_module.lease_clock() >= self.state.next_at_s:
            with suppress(ClientError, EndpointConnectionError):
                super().step()

    def close(self, timeout_s: float, *, release: bool) -> None:
        self.release(write=release)


@dataclass
class Engine:
    """An engine with its mover, and the part of its core that counts here."""

    world: OwnerMachine
    name: str
    rate: float
    offset_s: float
    connected: bool = True
    core: set[Key] = field(default_factory=set)
    seen: set[tuple[str, Version]] = field(default_factory=set)
    listed_from: int = 0  # the step in which the last listing began
    listed_bytes: int = 0  # of the bucket when the last one ended, and of its own uploads that ran on
    late: int = 0  # uploads of others that have landed since that listing began
    late_now: int = 0  # the same for the listing that runs

    def start(self) -> None:
        """A new mover process."""
        bucket = self.world.bucket
        config = S3Config(
            type="s3",
            bucket="kv-owner",
            prefix="p",
            endpoint="http://x",
            capacity=CAPACITY_ROWS * ROW,
            max_age=MAX_AGE_S,
        )
        with mock.patch.object(transfers, "MOST", UPLOADS):
            self.tier = S3Tier(config, GEOMETRY, self.world.region)
        self.tier.identify(self.name)
        self.data = Data(bucket, self)
        self.tier._transfers.data = self.data  # type: ignore[assignment]
        credentials = Credentials("key", "secret")
        control = self.tier._control
        control.connect = lambda *_: credentials  # type: ignore[method-assign]
        control.connection.credentials = credentials
        control.connection.client = control.connection.delete_client = Client(bucket, self)
        self.core, self.seen, self.late, self.late_now = set(), set(), 0, 0
        self.connected = True
        self.slots = self.tier.open(NAMESPACE, 0)
        assert isinstance(self.lease, SteppedLease)
        self.lease.client = self.client
        self.entries: Iterator[list[Entry]] = self.tier.list_rows()
        self.listing: FullListing | None = None
        self.listing_tenure = self.listed_tenure = 0
        self.note_listing()

    def client(self) -> Any:
        if not self.connected:
            raise EndpointConnectionError(endpoint_url="http://x")
        return self.tier._control.connection.client

    @property
    def lease(self) -> PrefixLease:
        assert self.tier._owner.lease is not None
        return self.tier._owner.lease

    @property
    def owns(self) -> bool:
        with self.world.acting(self):
            return self.tier._owner.may_write

    @property
    def tenure(self) -> int:
        """The number of the lease's tenure; 0 without it."""
        return self.lease.state._held[0] if self.lease.tenure() else 0

    def may_touch(self, what: str) -> None:
        """It uploads or deletes."""
        others = [engine for engine in self.world.engines if engine is not self]
        assert self.lease.tenure(), f"it {what} without the lease"
        if what == "uploads":
            assert self.tenure == self.listed_tenure, "it uploads before it has listed"
        assert not any(engine.owns for engine in others), f"it {what} while another owns the prefix"

    @property
    def uploading(self) -> set[Key]:
        return {move.key for move in self.tier._transfers.moves.unfinished()}

    def poll(self) -> None:
        self.tier._transfers.pace.hurry()
        stored = {unit: [*unit.moves] for unit in self.tier._transfers.moves.stores.running}
        for _ in self.tier.poll():
            pass
        for moves in stored.values():
            for move in moves:
                if move.key not in self.uploading and move.key in self.tier._rows.quota:
                    self.core.add(move.key)

    def evict(self, key: Key) -> None:
        self.core.discard(key)
        self.tier.delete([(0, key)])

    def take_entries(self) -> None:
        batch = next(self.entries, None)
        if batch is None:
            self.entries = self.tier.list_rows()
        for entry in batch or ():
            (self.core.discard if entry.slot == GONE else self.core.add)(entry.key)
        for key in sorted(self.core - self.uploading)[: max(0, len(self.core) - self.slots)]:
            self.evict(key)
        self.note_listing()

    def note_listing(self) -> None:
        """Notice at once when a listing begins, with the lease or without, and when it ends."""
        listing = self.tier._rows.listing
        if isinstance(listing, FullListing) and listing is not self.listing:
            self.listing, self.listing_ended, self.listing_tenure = listing, False, self.lease.coming_tenure()
            self.listed_from, self.late_now = self.world.bucket.step, 0
            self.seen.clear()
        if self.listing is not None and not self.listing_ended and self.listing.done.is_set():
            self.listing_ended, self.listed_tenure = True, self.listing_tenure
            # Uploads of an earlier tenure: they run for longer than others have owned the prefix and filled it.
            running = sum(not upload.over() for upload in self.data.uploads)
            self.late, self.listed_bytes = self.late_now, self.world.bucket.used_bytes + running * ROW

    def control(self) -> None:
        """One task of the control thread."""
        control = self.tier._control
        if control._sendable_deletes:
            control._delete_some()
        elif control._listing is not None:
            control._list_page()


class OwnerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.actor: Engine | None = None
        self.names = 0
        self.wrong: list[str] = []
        self.bucket = Bucket()
        self.region = HostRegion.create(GEOMETRY, 2)
        self.strays: list[Upload] = []  # of movers that are gone
        self.engines: list[Engine] = []
        self.patches = [
            mock.patch.object(lease_module, "lease_clock", self.lease_clock),
            mock.patch.object(lease_module, "PrefixLease", SteppedLease),
        ]
        for patch in self.patches:
            patch.start()

    def acting(self, engine: Engine) -> Any:
        """In this context clocks are those of this engine."""
        return mock.patch.object(self, "actor", engine)

    def lease_clock(self) -> float:
        assert self.actor is not None
        return self.actor.offset_s + self.now * self.actor.rate

    def new_name(self) -> str:
        self.names += 1
        return f"engine-{self.names}"

    @initialize(rates=st.tuples(RATES, RATES), offsets=st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)))
    def begin(self, rates: tuple[float, float], offsets: tuple[float, float]) -> None:
        self.engines = [Engine(self, self.new_name(), *each) for each in zip(rates, offsets, strict=True)]
        for engine in self.engines:
            with self.acting(engine):
                engine.start()

    # Time and faults

    @rule(seconds=st.sampled_from([1.0, 10.0, 25.0, 58.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.bucket.now_s += seconds

    @rule(number=NUMBERS, seconds=st.sampled_from([5.0, 50.0]))
    def clock_of_an_owner_steps(self, number: int, seconds: float) -> None:
        """Forward, as after a sleep. One that waits for the lease must not: its clock is what is trusted."""
        engine = self.engines[number]
        if engine.lease.state.other is None:
            engine.offset_s += seconds

    @rule(number=NUMBERS)
    def the_lease_cannot_be_renewed(self, number: int) -> None:
        self.engines[number].connected = not self.engines[number].connected

    @precondition(lambda self: self.bucket.step % 4 == 0)  # not too often
    @rule(number=NUMBERS, same_engine=st.booleans(), closed=st.booleans())
    def mover_ends(self, number: int, same_engine: bool, closed: bool) -> None:
        """Closed or killed, with or without its engine. Its uploads may still arrive, until the next mover ends."""
        engine = self.engines[number]
        with self.acting(engine):
            if closed and not engine.data.busy and engine.connected:
                engine.tier.close()
            self.strays = engine.data.uploads
            if not same_engine:
                engine.name = self.new_name()
            engine.start()

    @rule()
    def stray_lands(self) -> None:
        if self.strays:
            self.land(self.strays.pop(), None)

    # What engines do

    @rule(number=NUMBERS)
    def renew(self, number: int) -> None:
        engine = self.engines[number]
        with self.acting(engine):
            assert isinstance(engine.lease, SteppedLease)
            engine.lease.step()

    @rule(number=NUMBERS)
    def control(self, number: int) -> None:
        with self.acting(self.engines[number]):
            self.engines[number].control()
            self.engines[number].note_listing()

    @rule(number=NUMBERS)
    def loop(self, number: int) -> None:
        with self.acting(self.engines[number]):
            self.engines[number].poll()
            self.engines[number].take_entries()

    @rule(number=NUMBERS)
    def all_goes_well(self, number: int) -> None:
        for _ in range(8):
            self.renew(number)
            self.control(number)
            self.loop(number)
            if self.engines[number].lease.state._claim is not None:
                self.time_passes(1.0)

    @rule(number=NUMBERS)
    def owner_changes(self, number: int) -> None:
        """The other one does nothing for so long that its lease expires; what it uploads runs on."""
        for _ in range(9):
            self.time_passes(10.0)
            self.all_goes_well(number)

    @rule(number=NUMBERS, keys=st.sets(KEYS, min_size=3, max_size=5))
    def rows_are_stored(self, number: int, keys: set[Key]) -> None:
        for key in sorted(keys):
            self.store(number, key)
            for _ in range(2):
                self.control(number)
                self.loop(number)
                self.upload_ends(number, arrives=True, works=True)
            self.loop(number)

    @rule(number=NUMBERS)
    def sweep(self, number: int) -> None:
        engine = self.engines[number]
        with self.acting(engine):
            if engine.tier._rows.listing is None:
                engine.entries = engine.tier.maintain()
                engine.take_entries()

    @rule(number=NUMBERS, key=KEYS)
    def store(self, number: int, key: Key) -> None:
        engine = self.engines[number]
        if key in engine.core or key in engine.uploading:
            return
        with self.acting(engine):
            for victim in sorted(engine.core)[: max(0, len(engine.core) + 1 - engine.slots)]:
                engine.evict(victim)
            engine.tier.store([Move(0, 0, key, 0, False)])

    @precondition(lambda self: any(engine.core for engine in self.engines))
    @rule(pick=st.integers(0, 99))
    def evict(self, pick: int) -> None:
        engine = max(self.engines, key=lambda engine: (engine.owns, len(engine.core)))
        for key in sorted(engine.core - engine.uploading)[pick % 5 : pick % 5 + 1]:
            with self.acting(engine):
                engine.evict(key)

    @rule(number=NUMBERS, arrives=st.booleans(), works=st.booleans())
    def upload_ends(self, number: int, arrives: bool, works: bool) -> None:
        engine = self.engines[number]
        pending = [upload for upload in engine.data.uploads if not upload.over()]
        if pending:
            if arrives or works:
                self.land(pending[0], engine)
            pending[0].state = TransferState.DONE if works else TransferState.FAILED

    def land(self, upload: Upload, by: Engine | None) -> None:
        version = self.bucket.put(upload.name, bytes(ROW), upload.began)
        for engine in self.engines:
            if engine is by:
                engine.seen.add((upload.name, version))
            else:
                engine.late += 1
                engine.late_now += 1

    # What must hold

    @invariant()
    def one_owner_within_its_capacity(self) -> None:
        self.bucket.step += 1
        assert not self.wrong
        owners = [engine for engine in self.engines if engine.owns]
        assert len(owners) <= 1
        for owner in owners:
            most = max(CAPACITY_ROWS * ROW, owner.listed_bytes) + owner.late * ROW
            assert self.bucket.used_bytes <= most

    def teardown(self) -> None:
        try:
            if self.engines:
                self.settle()
        finally:
            for patch in self.patches:
                patch.stop()
            self.region.close()

    def settle(self) -> None:
        """One engine goes on alone: it becomes the owner, and lists what is there."""
        self.strays = []
        for engine in self.engines:
            while any(not upload.over() for upload in engine.data.uploads):
                self.upload_ends(self.engines.index(engine), arrives=True, works=True)
        last = self.engines[0]
        last.connected = True
        for _ in range(60):
            if last.owns:
                break
            self.time_passes(5.0)
            self.all_goes_well(0)
        assert last.owns
        self.store(0, b"one more")
        for _ in range(10):
            self.upload_ends(0, arrives=True, works=True)
            self.all_goes_well(0)
        assert last.tier.used_bytes >= self.bucket.used_bytes - last.late * ROW


def test_delete_that_was_queued_with_the_lease_is_not_sent_without_it() -> None:
    machine = OwnerMachine()
    try:
        machine.begin((1.0, 1.0), (0.0, 0.0))
        machine.all_goes_well(0)
        machine.rows_are_stored(0, {b"k0", b"k1"})
        machine.evict(0)
        machine.time_passes(58.0)
        machine.control(0)
        assert machine.engines[0].tier._control.has_pending_deletes
        assert len(machine.bucket.rows) == 2
        machine.all_goes_well(1)
        machine.time_passes(61.0)
        machine.all_goes_well(1)
        assert machine.engines[1].owns
        machine.control(0)
        machine.one_owner_within_its_capacity()
        assert len(machine.bucket.rows) == 2
    finally:
        machine.teardown()


def test_upload_that_outlives_two_changes_of_the_owner_is_counted_by_its_owner() -> None:
    machine = OwnerMachine()
    try:
        machine.begin((1.0, 1.0), (0.0, 0.0))
        one = machine.engines[0]
        machine.all_goes_well(0)
        for key in (b"k0", b"k1"):
            machine.store(0, key)
        machine.loop(0)
        for owner in (1, 0):
            machine.owner_changes(owner)
            assert machine.engines[owner].owns
            if owner == 1:
                machine.rows_are_stored(1, {b"k2", b"k3", b"k4", b"k5", b"k6"})
                machine.one_owner_within_its_capacity()
        assert len(machine.bucket.rows) == CAPACITY_ROWS
        assert one.tier.used_bytes == (CAPACITY_ROWS + UPLOADS) * ROW
        for _ in range(UPLOADS):
            machine.upload_ends(0, arrives=True, works=True)
            machine.one_owner_within_its_capacity()
        assert len(machine.bucket.rows) == CAPACITY_ROWS + UPLOADS
        machine.all_goes_well(0)
        assert len(machine.bucket.rows) == CAPACITY_ROWS
    finally:
        machine.teardown()


def test_sweep_that_outlives_its_tenure_deletes_nothing() -> None:
    machine = OwnerMachine()
    try:
        machine.begin((1.0, 1.0), (0.0, 0.0))
        one, client = machine.engines[0], machine.engines[0].tier._control.connection.client
        machine.all_goes_well(0)
        machine.rows_are_stored(0, {b"k0"})
        for _ in range(13):
            machine.time_passes(25.0)
            machine.all_goes_well(0)

        def another_owns_the_prefix() -> None:
            machine.owner_changes(1)
            machine.rows_are_stored(1, {b"k0"})
            for _ in range(11):
                machine.time_passes(10.0)
                machine.renew(0)
            for _ in range(4):
                machine.loop(0)

        client.meanwhile = another_owns_the_prefix
        machine.sweep(0)
        machine.control(0)
        assert one.lease.state._held[0] == 2
        (stored_again,) = machine.bucket.rows.values()
        for _ in range(3):
            machine.control(0)
            machine.loop(0)
        assert not machine.wrong
        assert list(machine.bucket.rows.values()) == [stored_again]
        assert one.owns
    finally:
        machine.teardown()


TestOwner = OwnerMachine.TestCase
TestOwner.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
