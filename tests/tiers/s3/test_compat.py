"""Engines of older releases beside those of this one on a prefix: who writes and deletes. Old ones are modelled by what
they do with their leases: `.owner` of a private prefix and `.janitor` of a shared one."""

from __future__ import annotations

import itertools
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nixl_tiers.tiers.s3 import budget as budget_module
from nixl_tiers.tiers.s3.budget import COUNTER_NAME, USAGE_NAME
from nixl_tiers.tiers.s3.compat import JANITOR_NAME, OWNER_NAME, old_engine_now
from nixl_tiers.tiers.s3.takeover import Terms
from tests.tiers.s3.memory_bucket import ROW, Bucket, Mover, row

CAPACITY_ROWS, WINDOW_ROWS = 640, 10
LEASES = [OWNER_NAME, JANITOR_NAME]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    made = Bucket()
    monkeypatch.setattr(budget_module, "budget_clock", lambda: made.now_s)
    return made


@dataclass
class Old:
    """An engine before this release. It takes a lease over that has not changed for `lease_s` of its clock."""

    bucket: Bucket
    name: str
    engine: str = "old"
    holds: bool = False
    _etag: str | None = None
    _seen_s: float = 0.0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def turn(self) -> None:
        found = self.bucket.objects.get(f"p/{self.name}")
        lease_s = 60.0 if self.name == OWNER_NAME else 30.0
        etag = None if found is None else found[1]
        if etag != self._etag:
            self._etag, self._seen_s, self.holds = etag, self.bucket.now_s, False
        if found is None or self.holds or self._is_free(found[0]) or self.bucket.now_s - self._seen_s >= lease_s:
            body = self._body(self.engine)
            self.bucket.store(f"p/{self.name}", body)
            self._etag, self.holds = self.bucket.objects[f"p/{self.name}"][1], True

    def close(self) -> None:
        self.bucket.store(f"p/{self.name}", self._body(""))

    def _is_free(self, raw: bytes) -> bool:
        return not (json.loads(raw)["engine"] if self.name == OWNER_NAME else raw)

    def _body(self, engine: str) -> bytes:
        write = next(self._numbers)
        if self.name == OWNER_NAME:
            return json.dumps({"engine": engine, "since": 1.0, "lease": 60.0, "write": write}).encode()
        return f"{engine} {write}".encode() if engine else b""


def new_engine(bucket: Bucket, name: str = "new") -> Mover:
    return Mover(bucket, name, capacity_rows=CAPACITY_ROWS, terms=Terms(confirm_s=0))


def passes(seconds: float, *engines: Old | Mover) -> None:
    until_s = engines[0].bucket.now_s + seconds
    while engines[0].bucket.now_s < until_s:
        engines[0].bucket.now_s += 5.0
        for each in engines:
            each.turn() if isinstance(each, Old) else each.budget.step()


@pytest.mark.parametrize("name", LEASES)
def test_an_old_engine_that_lives_is_waited_for_and_told(bucket: Bucket, name: str) -> None:
    old, new = Old(bucket, name), new_engine(bucket)
    old.turn()
    passes(300.0, new, old)
    assert not new.quota.ready
    assert old.holds
    assert "engine old of an older release uses the prefix" in new.denials.current()["prefix"]
    assert old_engine_now(bucket, "b", "p") == "old"
    passes(100.0, new)
    assert new.quota.ready, "it has crashed"
    assert old_engine_now(bucket, "b", "p") == ""
    passes(60.0, new)
    assert new.denials.current() == {}


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "crashed"])
def test_what_a_private_engine_has_stored_beside_a_record_counts(bucket: Bucket, closed: bool) -> None:
    """As after a rollback: it neither reads the record nor changes it."""
    first, old = new_engine(bucket, "first"), Old(bucket, OWNER_NAME)
    passes(60.0, first)
    first.budget.end()
    passes(100.0, old)
    for number in range(CAPACITY_ROWS):
        bucket.store(row(number))
    if closed:
        old.close()
    later = new_engine(bucket, "later")
    for number in range(CAPACITY_ROWS, 2 * CAPACITY_ROWS):
        passes(5.0, later)
        if later.quota.try_acquire(ROW):
            bucket.store(row(number))
            later.quota.upload_ended(ROW, bucket.now_s)
        assert len(bucket.rows) <= CAPACITY_ROWS
    assert later.writes


@pytest.mark.parametrize("name", LEASES)
def test_while_a_new_engine_writes_no_old_one_gets_a_lease(bucket: Bucket, name: str) -> None:
    """It would delete the rows of others, or list and delete beside this one."""
    old, new = Old(bucket, name), new_engine(bucket)
    new.budget.step()
    for _ in range(3):
        passes(600.0, new, old)
        assert new.quota.ready
        assert not old.holds
        later = new_engine(bucket, f"{new.quota.mover}+")  # another one goes on with the old names
        new.budget.end()
        new = later
    assert bucket.count(f"PUT {OWNER_NAME}") <= 3 * 600 / 15 + 6


def test_from_an_old_janitors_record_nothing_is_subtracted_before_a_sweep(bucket: Bucket) -> None:
    """It does not say when everything was listed."""
    for number in range(20):
        bucket.store(row(number))
    record = {"bytes": CAPACITY_ROWS * ROW, "counted": {}, "oldest": int(bucket.now_s) - 100}
    bucket.store(f"p/{USAGE_NAME}", json.dumps(record).encode())
    bucket.store(f"p/{COUNTER_NAME}old", b"12345")
    new = new_engine(bucket)
    new.budget.step()
    assert new.writes
    assert len(bucket.rows) == 20
    assert bucket.record.nbytes == 20 * ROW
    assert bucket.record.counted == {"new": 0, "old": 12345}


STORED = Path(__file__).with_name("stored-by-3229999f.tar.xz")
"""Objects as that version has stored them, by its kind of prefix and how its last engine has ended: 12 rows of 8 KiB of
each of two namespaces, where row n is filled with n + 1."""


def stored_before(kind: str) -> dict[str, bytes]:
    """Names begin with "p/"."""
    with tarfile.open(STORED) as tar:
        found = [(each.name.split("/", 1), tar.extractfile(each)) for each in tar]
        return {name: file.read() for (state, name), file in found if state == kind and file is not None}


@pytest.mark.parametrize(
    ("kind", "within_s"),
    [("private-closed", 0.0), ("private-killed", 65.0), ("shared-closed", 0.0), ("shared-killed", 35.0)],
)
def test_what_an_earlier_version_has_stored_stays_and_counts(bucket: Bucket, kind: str, within_s: float) -> None:
    for name, body in stored_before(kind).items():
        bucket.store(name, body)
    before, began_s = bucket.rows, bucket.now_s
    assert len(before) == 24
    new = new_engine(bucket)
    new.budget.step()
    while not new.quota.ready:
        passes(5.0, new)
        assert bucket.now_s <= began_s + within_s
    passes(60.0, new)
    assert bucket.rows == before
    assert bucket.record.nbytes == len(before) * ROW
    assert new.denials.current() == {}
