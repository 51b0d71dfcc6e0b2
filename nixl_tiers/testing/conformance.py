"""StorageTierTests: what every storage tier must do. A tier passes by subclassing (docs/writing-a-tier.md).

    class TestMyTier(StorageTierTests):
        @pytest.fixture
        def medium(self) -> Medium:
            return MyMedium()

Tests of what a medium cannot do skip themselves: see Medium. In every test, every batch is also checked as Rig
describes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from nixl_tiers.base.chunk import MAX_KEY_BYTES, Geometry, Key, Namespace, Outcome
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.testing.corruption import DAMAGES, OTHER_NAMESPACE, SMALL
from nixl_tiers.testing.medium import NAMESPACE, Medium, Rig, content, keys
from nixl_tiers.tiers.base import Move

ROWS = 40
GEOMETRIES = {
    "4KiB": Geometry(1, 4 << 10),
    "seal-in-padding": Geometry(1, 60_000),
    "60KB-in-3-blocks": SMALL,
    "4x16KiB-in-4-blocks": Geometry(4, 16 << 10, 4),
    "256KiB": Geometry(1, 256 << 10, 16),
    "8x90KB": Geometry(8, 90_112, 16),
    "2MiB": Geometry(1, 2 << 20, 64),
}
ODD_KEYS = [
    b"\0", b"/", b"..", b"a b+c%2F?&#", b"\xff" * MAX_KEY_BYTES, b"\0" * MAX_KEY_BYTES, b"\n\r\t", "schlüssel".encode(),
    b"x" * 36, b"x" * 35 + b"y",
]  # fmt: skip
LARGE = GEOMETRIES["256KiB"]
TIGHT_BYTES = 8 << 20
NOT_OURS = {Outcome.MISSING, Outcome.CORRUPT}


class StorageTierTests:
    """Subclass it as Test..., with a `medium` fixture that returns a fresh, empty medium."""

    @pytest.fixture
    def medium(self) -> Medium:
        raise NotImplementedError("a subclass overrides the fixture `medium`")

    @pytest.fixture
    def rig(self, medium: Medium) -> Iterator[Rig]:
        """A tier that serves NAMESPACE, empty, with SMALL rows."""
        with Rig(medium, SMALL, ROWS) as rig:
            assert rig.open() == {}, "the medium fixture must return an empty medium"
            yield rig

    # --- rows come back ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", GEOMETRIES)
    def test_rows_of_every_geometry_come_back(self, medium: Medium, shape: str) -> None:
        with Rig(medium, GEOMETRIES[shape], 6) as rig:
            rig.open()
            rows = keys(6, first=1)
            assert rig.store(rows) == [Outcome.OK] * 6
            assert rig.load(dict(reversed(rows.items()))) == [Outcome.OK] * 6

    def test_one_row_at_a_time(self, rig: Rig) -> None:
        for slot, key in keys(4, first=3).items():
            assert rig.store({slot: key}) == [Outcome.OK]
            assert rig.load({slot: key}) == [Outcome.OK]

    def test_key_may_be_any_bytes(self, rig: Rig) -> None:
        rows = dict(enumerate(ODD_KEYS))
        assert set(rig.store(rows)) == {Outcome.OK}
        assert set(rig.load(rows)) == {Outcome.OK}

    def test_slots_need_not_be_used_in_order(self, rig: Rig) -> None:
        last = rig.slots - 1
        rows = {last: b"last", 0: b"first", last // 2: b"middle"}
        assert set(rig.store(rows)) == {Outcome.OK}
        assert set(rig.load(rows)) == {Outcome.OK}

    def test_empty_batch_is_reported(self, rig: Rig) -> None:
        assert rig.finish(rig.begin_store({}), rig.begin_load({})) == [[], []]

    def test_large_batch(self, medium: Medium) -> None:
        with Rig(medium, GEOMETRIES["4KiB"], 256) as rig:
            rig.open()
            assert set(rig.store(keys(256))) == {Outcome.OK}
            assert set(rig.load(keys(256))) == {Outcome.OK}

    def test_many_batches_at_once_in_both_directions(self, rig: Rig) -> None:
        rig.store(keys(16))
        batch_ids = []
        for turn in range(8):
            batch_ids.append(rig.begin_load(keys(2, first=2 * turn)))
            batch_ids.append(rig.begin_store(keys(2, first=16 + 2 * turn)))
        assert rig.finish(*batch_ids) == [[Outcome.OK] * 2] * 16
        assert set(rig.load(keys(32))) == {Outcome.OK}

    def test_busy_ends(self, rig: Rig) -> None:
        rig.finish(rig.begin_store(keys(8)))
        rig.finish(rig.begin_load(keys(8)))
        rig.settle()
        assert not rig.tier.busy
        assert rig.tier.poll() == []

    # --- slots and keys ---------------------------------------------------------------------------------------------

    def test_row_that_was_never_stored_is_a_miss(self, rig: Rig) -> None:
        rig.store(keys(2))
        outcomes = rig.load({0: b"unknown", 7: b"unknown too", rig.slots - 1: b"unknown, last slot", 1: keys(2)[1]})
        assert set(outcomes[:3]) <= NOT_OURS
        assert outcomes[3] is Outcome.OK

    def test_deleted_row_is_gone_and_its_neighbours_are_not(self, rig: Rig) -> None:
        rig.store(keys(4))
        rig.delete({1: keys(4)[1]})
        if rig.medium.erases:
            rig.until(lambda: set(rig.load({1: keys(4)[1]})) <= NOT_OURS, "the deleted row to be gone")
        outcomes = rig.load(keys(4))  # OK for row 1, where only its slot is free now, still means: the right bytes
        assert [outcomes[place] for place in (0, 2, 3)] == [Outcome.OK] * 3

    def test_slot_of_a_deleted_row_may_be_stored_into_at_once(self, rig: Rig) -> None:
        rig.store(keys(4))
        for turn in range(3):
            old, new = b"turn-%d" % (turn - 1) if turn else keys(1)[0], b"turn-%d" % turn
            rig.delete({0: old})
            assert rig.store({0: new}) == [Outcome.OK]
            assert rig.load({0: new}) == [Outcome.OK]
            if rig.medium.physical_slots or rig.medium.erases:
                rig.until(lambda old=old: set(rig.load({0: old})) <= NOT_OURS, "the old key to be gone")  # type: ignore[misc]
        assert set(rig.load(keys(3, first=1))) == {Outcome.OK}

    @pytest.mark.parametrize("slot", [2, 5], ids=["same-slot", "other-slot"])
    def test_deleted_key_may_be_stored_again(self, rig: Rig, slot: int) -> None:
        key = keys(4)[2]
        rig.store(keys(4))
        for version in range(1, 4):
            rig.delete({2 if version == 1 else slot: key})
            assert rig.store({slot: key}, version=version) == [Outcome.OK]
            assert rig.load({slot: key}) == [Outcome.OK]

    def test_row_may_be_stored_over_itself(self, rig: Rig) -> None:
        """A row that was found bad elsewhere is written again where it stood."""
        self._not_if_asked(rig.medium)
        rig.store(keys(3))
        assert rig.store({1: keys(2)[1]}, version=1) == [Outcome.OK]
        assert rig.load(keys(3)) == [Outcome.OK] * 3

    def test_late_delete_does_not_take_the_new_row(self, rig: Rig) -> None:
        rig.store({0: b"old"})
        rig.delete({0: b"old"})
        rig.store({0: b"new"})
        rig.delete({0: b"old"})
        rig.settle()
        assert rig.load({0: b"new"}) == [Outcome.OK]
        if rig.medium.keeps_rows:
            self._expect(rig, rig.reopen(), {0: b"new"})

    def test_deleting_an_unknown_row_changes_nothing(self, rig: Rig) -> None:
        rig.store(keys(2))
        rig.delete({1: b"never stored", 6: b"never stored either", rig.slots - 1: b"nor this"})
        rig.delete({})
        assert rig.load(keys(2)) == [Outcome.OK] * 2

    # --- the seal ---------------------------------------------------------------------------------------------------

    def test_sealed_row_is_moved_as_it_is(self, rig: Rig) -> None:
        """Rig checks that the row in the region is not touched; here: nor is it on its way."""
        move = Move(rig.take_row(), 0, keys(1)[0], 1, seal=False)
        row = rig.region.rows_view[move.row]
        row[:] = content(move.key, 0, SMALL)
        Sealer(SMALL, NAMESPACE, 0).seal(row, move.key, present=0b101, sealed_at=12345)
        before = row.copy()
        rig.finish(rig.begin_moves([move]))
        assert rig.medium.read(NAMESPACE, 0, move.key) == before.tobytes()

    def test_missing_sub_blocks_are_sealed_as_absent_and_come_back_as_zeros(self, rig: Rig) -> None:
        """The bytes there belong to another row. Rig checks every cell."""
        for missing in range(SMALL.sub_blocks):
            rows = keys(2, first=2 * missing)
            assert rig.finish(rig.begin_store(rows, missing=missing)) == [[Outcome.OK] * 2]
            assert rig.load(rows) == [Outcome.OK] * 2

    def test_unsealed_row_is_never_a_hit(self, rig: Rig) -> None:
        """Only the caller asks for a seal: a tier that seals every row would certify any bytes."""
        rig.finish(rig.begin_store(keys(2), seal=False))
        assert set(rig.load(keys(2))) <= NOT_OURS

    def test_medium_holds_the_sealed_row(self, rig: Rig) -> None:
        """Padding is zeroed: the bytes there belong to another row."""
        rig.store(keys(1))
        row = np.frombuffer(rig.medium.read(NAMESPACE, 0, keys(1)[0]), np.uint8)
        assert Sealer(SMALL, NAMESPACE, 0).verify(row, keys(1)[0]) == 0

    # --- restarts and namespaces ------------------------------------------------------------------------------------

    def test_restart_keeps_every_row_and_no_other(self, rig: Rig) -> None:
        self._needs_rows_kept(rig)
        rig.store(keys(20))
        rig.delete(keys(5))
        rig.store({3: b"again in 3", 30: keys(5)[4]})
        expected = keys(15, first=5) | {3: b"again in 3", 30: keys(5)[4]}
        rig.settle()
        self._wait_for_rows(rig, len(expected))
        for _ in range(3):
            self._expect(rig, rig.reopen(), expected)

    def test_touched_row_is_listed_last(self, rig: Rig) -> None:
        self._needs_rows_kept(rig)
        rig.store(keys(4))
        rig.delete({3: keys(4)[3]})
        rig.tier.touch([1, 3, 1 << 20], [100, 101, 102])  # only one of them holds a row
        rig.settle()
        self._wait_for_rows(rig, 3)
        found = rig.reopen()
        self._expect(rig, found, keys(3))
        assert not rig.medium.keeps_recency or list(found) == [0, 2, 1]

    def test_other_namespace_sees_nothing(self, rig: Rig) -> None:
        rig.store(keys(8))
        for found in (rig.open(OTHER_NAMESPACE), rig.reopen(OTHER_NAMESPACE)):
            assert found == {}
            assert set(rig.load(keys(8))) <= NOT_OURS

    def test_other_epoch_sees_nothing(self, medium: Medium) -> None:
        before, after = Namespace.of({"model": "m"}), Namespace.of({"model": "m"}, epoch=77)
        with Rig(medium, SMALL, ROWS) as rig:
            rig.open(before.digest, before.epoch)
            rig.store(keys(8))
            assert rig.open(after.digest, after.epoch) == {}
            assert set(rig.load(keys(8))) <= NOT_OURS
            assert set(rig.store(keys(4), version=1)) == {Outcome.OK}
            assert set(rig.load(keys(4))) == {Outcome.OK}

    def test_epoch_counts_even_under_the_same_digest(self, rig: Rig) -> None:
        rig.store(keys(4))
        rig.open(NAMESPACE, epoch=1)
        assert set(rig.load(keys(4))) <= NOT_OURS

    def test_namespace_finds_its_own_rows_again(self, rig: Rig) -> None:
        if not rig.medium.keeps_namespaces:
            pytest.skip("this medium holds one namespace")
        rig.store(keys(6))
        rig.open(OTHER_NAMESPACE)
        rig.store(keys(4, first=4), version=3)
        self._expect(rig, rig.open(), keys(6))
        if rig.medium.keeps_rows:
            self._expect(rig, rig.reopen(OTHER_NAMESPACE), keys(4, first=4))

    # --- damage -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", DAMAGES)
    @pytest.mark.parametrize("running", [True, False], ids=["under-a-running-tier", "while-closed"])
    def test_corrupted_row_is_a_miss(self, rig: Rig, kind: str, running: bool) -> None:
        """Every second row is corrupted, each in another way."""
        if not running:
            self._needs_rows_kept(rig)
        rows = keys(2 * len(DAMAGES[kind]) + 1)
        damaged = dict(zip(DAMAGES[kind], list(rows.items())[1::2], strict=True))
        rig.store(rows)
        rig.settle() if running else rig.restart()
        for name, (slot, key) in damaged.items():
            DAMAGES[kind][name](rig.medium, slot, key)
        if not running:
            found = rig.open()
            assert set(found.values()) <= set(rows.values())
        self._expect_damaged(rig, rows, damaged)

    @pytest.mark.parametrize("running", [True, False], ids=["under-a-running-tier", "while-closed"])
    def test_swapped_rows_are_misses(self, rig: Rig, running: bool) -> None:
        if not running:
            self._needs_rows_kept(rig)
        one, two = keys(2).items()
        rig.store(keys(5))
        rig.settle() if running else rig.restart()
        first, second = rig.medium.read(NAMESPACE, *one), rig.medium.read(NAMESPACE, *two)
        rig.medium.write(NAMESPACE, *one, second)
        rig.medium.write(NAMESPACE, *two, first)
        if not running:
            rig.open()
        self._expect_damaged(rig, keys(5), {"one": one, "other": two})

    def _expect_damaged(self, rig: Rig, rows: dict[int, Key], damaged: dict[str, tuple[int, Key]]) -> None:
        """The damaged rows are no hits, in one batch with the others, which are, and alone; and stores heal them."""
        answers = dict(zip(rows, rig.load(rows), strict=True))
        found = {name: answers[slot] for name, (slot, _) in damaged.items()}
        assert set(found.values()) <= NOT_OURS, f"neither MISSING nor CORRUPT: {found}"
        lost = dict(damaged.values())
        assert {slot for slot, outcome in answers.items() if outcome is not Outcome.OK} == set(lost)
        found = {name: rig.load({slot: key})[0] for name, (slot, key) in damaged.items()}
        assert set(found.values()) <= NOT_OURS, f"neither MISSING nor CORRUPT: {found}"
        rig.delete(lost)
        assert set(rig.store(lost)) == {Outcome.OK}
        assert set(rig.load(rows)) == {Outcome.OK}

    # --- the budget -------------------------------------------------------------------------------------------------

    def test_used_bytes_is_what_the_medium_holds(self, rig: Rig) -> None:
        self._not_if_asked(rig.medium)
        rig.store(keys(10))
        self._expect_account(rig)
        rig.delete(keys(6))
        rig.settle()
        self._expect_account(rig)
        self._wait_for_rows(rig, 4)
        rig.open(OTHER_NAMESPACE)
        rig.store(keys(3))
        self._expect_account(rig)

    def test_every_slot_can_be_filled_and_nothing_beyond_the_capacity(self, medium: Medium) -> None:
        self._not_if_asked(medium)
        with Rig(medium, LARGE, 16, TIGHT_BYTES) as rig:
            rig.open()
            assert rig.slots * LARGE.row_bytes > TIGHT_BYTES // 2, "a budget is not kept by leaving it unused"
            before: dict[int, Key] = {}
            for turn in range(2):
                rows = {slot: b"%d-%d" % (turn, slot) for slot in range(rig.slots)}
                for slots in (range(0, rig.slots, 2), range(1, rig.slots, 2)):
                    rig.delete({slot: before[slot] for slot in slots if slot in before})
                    assert set(rig.store({slot: rows[slot] for slot in slots})) == {Outcome.OK}
                    self._expect_within(rig)
                assert set(rig.load(rows)) == {Outcome.OK}
                before = rows

    def test_other_namespaces_count(self, medium: Medium) -> None:
        """Rows of namespaces that are not served are evicted: they share the capacity."""
        self._not_if_asked(medium)
        with Rig(medium, LARGE, 16, TIGHT_BYTES) as rig:
            for number in range(3):
                rig.open(bytes([number]) * 16)
                rows = keys(rig.slots * 2 // 3)
                assert set(rig.store(rows)) == {Outcome.OK}
                self._expect_within(rig)
                assert set(rig.load(rows)) == {Outcome.OK}

    def _expect_within(self, rig: Rig) -> None:
        assert rig.medium.held_bytes() <= rig.capacity_bytes
        assert rig.tier.used_bytes <= rig.capacity_bytes

    # --- the end ----------------------------------------------------------------------------------------------------

    def test_close_may_be_called_twice(self, rig: Rig) -> None:
        rig.store(keys(2))
        rig.settle()
        rig.tier.close()
        rig.tier.close()
        if rig.medium.keeps_rows:
            rig.tier = rig.medium.make(SMALL, rig.region, rig.capacity_bytes)
            self._expect(rig, rig.open(), keys(2))

    def test_close_without_open(self, medium: Medium) -> None:
        with Rig(medium, SMALL, 2) as rig:
            rig.tier.close()

    @pytest.mark.parametrize("seed", range(2))
    def test_random_operations(self, rig: Rig, seed: int) -> None:
        """Stores, loads, deletes and restarts at random, many at once: what is held is what was stored last."""
        rng = random.Random(seed)
        held: dict[int, Key] = {}
        names = [b"name-%02d" % number for number in range(40)]
        for turn in range(15):
            victims = rng.sample(sorted(held), min(len(held), rng.randrange(6)))
            rig.delete({slot: held.pop(slot) for slot in victims})
            free = [slot for slot in range(24) if slot not in held]
            fresh = sorted(set(names) - set(held.values()))
            loads = dict(rng.sample(sorted(held.items()), min(len(held), rng.randrange(12))))
            stores = dict(zip(rng.sample(free, min(len(free), rng.randrange(8))), rng.sample(fresh, 8), strict=False))
            begun = [rig.begin_load(part) for part in _parts(loads, rng)]
            storing = [rig.begin_store(part, version=turn) for part in _parts(stores, rng)]
            assert all(set(outcomes) == {Outcome.OK} for outcomes in rig.finish(*storing, *begun))
            held |= stores
            if turn % 5 == 4 and rig.medium.keeps_rows:
                rig.settle()
                self._wait_for_rows(rig, len(held))
                found = rig.reopen()
                self._expect(rig, found, held)
                if not rig.medium.physical_slots:
                    held = found
        if not rig.medium.asked:
            self._expect_account(rig)

    # --- what several tests need ------------------------------------------------------------------------------------

    def _not_if_asked(self, medium: Medium) -> None:
        if medium.asked:
            pytest.skip("engines share this medium: what is there is not written again, and others make room")

    def _needs_rows_kept(self, rig: Rig) -> None:
        if not rig.medium.keeps_rows:
            pytest.skip("this medium is empty after a restart")

    def _expect(self, rig: Rig, found: dict[int, Key], expected: dict[int, Key]) -> None:
        """What is listed is what was stored, in its place if that is a place, and all of it loads."""
        if rig.medium.physical_slots:
            assert found == expected
        assert sorted(found.values()) == sorted(expected.values())
        assert set(rig.load(found)) <= {Outcome.OK}

    def _expect_account(self, rig: Rig) -> None:
        medium, tier = rig.medium, rig.tier
        rig.until(lambda: medium.held_bytes() <= tier.used_bytes, "used_bytes to cover what the medium holds")
        assert tier.used_bytes <= rig.capacity_bytes
        if medium.exact:
            rig.until(lambda: medium.held_bytes() == tier.used_bytes, "used_bytes to be what the medium holds")

    def _wait_for_rows(self, rig: Rig, count: int) -> None:
        """Deletes may take a moment to reach the medium."""
        rig.until(lambda: rig.medium.held_rows(rig.namespace) == count, f"the medium to hold {count} rows")


def _parts(rows: dict[int, Key], rng: random.Random) -> list[dict[int, Key]]:
    """The rows in batches of random sizes."""
    items, parts = list(rows.items()), []
    while items:
        size = rng.randint(1, len(items))
        parts.append(dict(items[:size]))
        items = items[size:]
    return parts
