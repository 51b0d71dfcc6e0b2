"""What a tier knows of a directory of row files, compared with a plain model: this engine and others store, replace and
delete rows in any order, also while a directory is read; rows are listed, expire and are evicted."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.disk import HealthMonitor
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.eviction import Evictor
from nixl_tiers.tiers.rowfile.names import RowPath, fanout_of
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.packed_rows import decoded
from nixl_tiers.tiers.rowfile.quota import DirQuota, FanoutDir
from nixl_tiers.tiers.rowfile.scanner import DirScanner
from tests.tiers.rowfile.test_books import CAPACITY, GEOMETRY, KEYS, OTHER, OURS, ROW

SLOTS = 40
KEY = st.sampled_from(KEYS)
NAMESPACES = st.sampled_from([OURS, OURS, OURS, OTHER])
AGE_S = 1000.0


class Books(RuleBasedStateMachine):
    """`files`: what is there, (namespace, key) -> modification time in seconds. `core`: what the core has indexed."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.place = tempfile.TemporaryDirectory()
        self.path = Path(self.place.name)
        self.quota = DirQuota(CAPACITY, ROW)
        self.directory = RowDirectory(self.path, self.quota)
        self.directory.prepare(OURS)
        log_once = LogOnce(logging.getLogger(__name__))
        self.evictor = Evictor(self.directory, self.quota, log_once)
        self.scanner = DirScanner(self.directory, self.quota, self.evictor, log_once)
        self.scanner.served = OURS
        self.rows = NamespaceRows(
            OURS, Sealer(GEOMETRY, bytes(16), 0), SLOTS, cast("HealthMonitor", None), self.quota, lambda: 0
        )
        self.now_s = int(time.time())
        self.files: dict[tuple[str, bytes], int] = {}
        self.newest: dict[tuple[str, bytes], int] = {}  # a later file of this name, also after a delete, is not older
        self.core: set[bytes] = set()
        self.meanwhile: list[Callable[[bytes], None]] = []  # done to a row of the directory that is read
        self.changed: set[bytes] = set()
        end_dir = self.quota.end_dir

        def end_dir_after_changes(directory: FanoutDir, *args: object) -> None:
            (namespace, fanout), *_ = [name for name, known in self.quota.directories() if known is directory]
            while self.meanwhile and namespace == OURS:
                key = self.draw.choice([key for key in KEYS if fanout_of(key) == fanout])
                self.changed.add(key)
                self.meanwhile.pop()(key)
            end_dir(directory, *args)  # type: ignore[arg-type]

        self.quota.end_dir = end_dir_after_changes  # type: ignore[method-assign]

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.directory.close()
            self.place.cleanup()

    # --- what other engines do --------------------------------------------------------------------------------------

    def file(self, namespace: str, key: bytes) -> Path:
        return self.directory.absolute(RowPath.of(namespace, key))

    @rule(namespace=NAMESPACES, key=KEY, age_s=st.integers(0, 3000))
    def other_engine_stores(self, namespace: str, key: bytes, age_s: int) -> None:
        file, written_s = self.file(namespace, key), max(self.now_s - age_s, self.newest.get((namespace, key), 0))
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        file.parent.chmod(0o700)
        file.parent.parent.chmod(0o700)
        temporary = self.path / "row"
        temporary.write_bytes(bytes(ROW))
        os.utime(temporary, (written_s,) * 2)
        temporary.rename(file)
        self.files[namespace, key] = self.newest[namespace, key] = written_s

    @rule(namespace=NAMESPACES, key=KEY)
    def other_engine_deletes(self, namespace: str, key: bytes) -> None:
        self.file(namespace, key).unlink(missing_ok=True)
        self.files.pop((namespace, key), None)

    @rule(namespace=NAMESPACES)
    def other_engine_deletes_all(self, namespace: str) -> None:
        for key in [key for name, key in self.files if name == namespace]:
            self.other_engine_deletes(namespace, key)
            self.directory.remove_if_empty(RowPath.of(namespace, key))

    # --- what this engine does --------------------------------------------------------------------------------------

    def store(self, key: bytes) -> None:
        file, temporary = self.file(OURS, key), self.path / "row"
        temporary.write_bytes(bytes(ROW))
        file.parent.mkdir(0o700, parents=True, exist_ok=True)
        file.parent.parent.chmod(0o700)
        temporary.rename(file)
        self.quota.record(RowPath.of(OURS, key), file.stat(), self.now_s, stored=True)
        self.files[OURS, key] = self.newest[OURS, key] = int(file.stat().st_mtime)
        self.core.add(key)

    def delete(self, key: bytes) -> None:
        """As the core's delete: a file that was used since is kept."""
        path = RowPath.of(OURS, key)
        if self.quota.forget(path):
            assert key in self.core
            self.directory.delete_unless_used(path)
        self.core.discard(key)
        if not self.file(OURS, key).exists():
            self.files.pop((OURS, key), None)

    @rule(key=KEY)
    def engine_stores(self, key: bytes) -> None:
        if key not in self.core:
            self.store(key)

    @rule(key=KEY)
    def engine_deletes(self, key: bytes) -> None:
        if key in self.core:
            self.delete(key)

    @rule()
    def engine_stores_while_a_directory_is_read(self) -> None:
        self.meanwhile.append(self.engine_stores)

    @rule()
    def engine_deletes_while_a_directory_is_read(self) -> None:
        self.meanwhile.append(self.engine_deletes)

    @rule(key=KEY)
    def engine_loads(self, key: bytes) -> None:
        """As a load that finds no file: the core forgets the row."""
        if key in self.core and self.directory.stat(RowPath.of(OURS, key)) is None:
            self.quota.forget(RowPath.of(OURS, key))
            self.core.remove(key)

    @rule()
    def medium_goes_away_and_comes_back(self) -> None:
        """The core keeps its index; the first listing corrects it."""
        self.rows.begin(again=True)
        self.scan()
        self.check_known()
        listed = self.list_new()
        lost = {key for keys in self.rows.lost_rows() for key in keys}
        self.core = self.core - lost | listed
        self.check_core()

    # --- scans, listings, expiry, eviction --------------------------------------------------------------------------

    def scan(self) -> None:
        """The first one reads while this engine stores and deletes: what it did counts, not what was read before."""
        self.changed.clear()
        self.scanner._scan_all()
        for key in self.changed:
            assert (self.quota.get(RowPath.of(OURS, key)) is not None) == ((OURS, key) in self.files)
        self.meanwhile.clear()
        self.scanner._scan_all()

    @rule()
    def books_are_what_is_there_after_a_scan(self) -> None:
        self.scan()
        self.check_known()
        assert self.quota.used_bytes >= ROW * len(self.files)
        assert self.quota._rows_bytes == ROW * len(self.files)

    @rule()
    def core_is_what_is_there_after_a_listing(self) -> None:
        self.scan()
        gone = {key for keys in self.rows.gone_rows() for key in keys if self.rows.confirm_gone(key)}
        assert gone == {key for key in self.core if (OURS, key) not in self.files}
        self.core -= gone
        self.core |= self.list_new()
        self.check_core()

    def list_new(self) -> set[bytes]:
        pairs = [pair for band in self.rows.new_rows() for pair in band.pairs()]
        assert [mtime_ns for mtime_ns, _ in pairs] == sorted(mtime_ns for mtime_ns, _ in pairs)
        assert all(mtime_ns // 10**9 <= self.files[OURS, key] for mtime_ns, key in pairs)  # older if replaced since
        return {key for _, key in pairs}

    @rule()
    def expired_rows_are_deleted(self) -> None:
        """Without seals, rows age from their modification times."""
        self.scan()
        self.evictor.expire(self.now_s, AGE_S)
        self.files = {name: mtime_s for name, mtime_s in self.files.items() if mtime_s > self.now_s - AGE_S}
        self.check_known()
        assert set(self.path.rglob("*.row")) == {self.file(*name) for name in self.files}

    @rule(count=st.integers(1, 5))
    def coldest_rows_are_evicted(self, count: int) -> None:
        self.scan()
        ages = sorted(self.files.values())
        self.quota._limit_bytes = self.quota.used_bytes
        self.quota._requested_bytes = count * ROW
        self.evictor.make_room(self.scanner._scan_all)
        self.quota._limit_bytes = CAPACITY
        self.files = {name: mtime_s for name, mtime_s in self.files.items() if self.file(*name).exists()}
        assert sorted(self.files.values()) == ages[count:]
        self.check_known()

    def check_known(self) -> None:
        known = {
            (namespace, decoded(raw))
            for (namespace, _), directory in self.quota.directories()
            for raw in directory.rows.present_keys().tolist()
        }
        assert known == set(self.files)

    def check_core(self) -> None:
        assert self.core == {key for namespace, key in self.files if namespace == OURS}
        assert self.rows.room == SLOTS - SLOTS // 16 - len(self.core)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


def test_row_that_is_found_later_and_is_colder_is_evicted_first() -> None:
    """The evictor still has candidates from before, which are all warmer."""
    books = Books()
    books.begin(seed=0)
    books.other_engine_stores(OURS, KEYS[0], age_s=100)
    books.other_engine_stores(OURS, KEYS[1], age_s=50)
    books.coldest_rows_are_evicted(1)
    books.other_engine_stores(OTHER, KEYS[2], age_s=2000)
    books.coldest_rows_are_evicted(1)
    assert set(books.files) == {(OURS, KEYS[1])}
    books.teardown()


def test_row_that_was_used_since_and_is_still_the_coldest_is_evicted() -> None:
    books = Books()
    books.begin(seed=0)
    books.other_engine_stores(OURS, KEYS[0], age_s=100)
    books.other_engine_stores(OURS, KEYS[1], age_s=50)
    books.other_engine_stores(OURS, KEYS[2], age_s=10)
    books.scan()
    books.other_engine_stores(OURS, KEYS[0], age_s=80)
    books.coldest_rows_are_evicted(1)
    assert set(books.files) == {(OURS, KEYS[1]), (OURS, KEYS[2])}
    books.teardown()
