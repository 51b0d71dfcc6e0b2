"""Each of these planted bugs in the record's account, its takeover or its sweeps must be caught by the simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from nixl_tiers.tiers.s3 import record as record_module
from nixl_tiers.tiers.s3 import sweep as sweep_module
from nixl_tiers.tiers.s3 import takeover as takeover_module
from nixl_tiers.tiers.s3.record import MAX_WINDOWS, Account, Counter, Record, UploadQuota
from nixl_tiers.tiers.s3.sweep import Listed, Sweeper
from nixl_tiers.tiers.s3.takeover import COUNTERS, WRITE, Ask, Steps, Takeover, Terms
from tests.tiers.s3 import test_record as scenes
from tests.tiers.s3.record_machine import CAPACITY, ROW, SHARE, explore

SEEDS = 400


class SuccessorBringsNoWindow(Account):
    def _add(self, mover: str, ended: int) -> None:
        self.counted[mover] = ended
        self.nbytes += ended
        self.windows += 1


class RunningSweepDropsNewWindows(Account):
    """Of movers that were added while it ran, too."""

    def end_sweep(self, counters: Mapping[str, Counter], oldest: int) -> None:
        assert self.sweep is not None
        self.read(counters)
        self.sweep.windows = self.windows
        super().end_sweep(counters, oldest)


class DeletesAreSubtractedBeforeASweep(Takeover):
    """The record that is made where there is none counts as swept."""

    def _first(self, *, unseen: bool) -> Record:
        record = super()._first(unseen=unseen)
        return record if self.record is not None else replace(record, swept=1, oldest=990_000)


class OldCounterIsAddedWithoutASweep(Account):
    def read(self, counters: Mapping[str, Counter]) -> None:
        super().read(counters)
        for mover in counters.keys() - self.counted.keys():
            self.counted[mover] = counters[mover].ended


class CountsFall(Account):
    """A counter that is read late, or of an older write, replaces what was counted."""

    def read(self, counters: Mapping[str, Counter]) -> None:
        super().read(counters)
        for mover, counter in counters.items():
            if mover in self.counted:
                self.nbytes += min(0, counter.ended - self.counted[mover])
                self.counted[mover] = counter.ended


class CountersAreReadBehindTheListing(Account):
    def end_sweep(self, counters: Mapping[str, Counter], oldest: int) -> None:
        assert self.sweep is not None
        self.read(counters)
        self.sweep.baseline |= self.counted
        super().end_sweep(counters, oldest)


class DeletesAreSubtractedTwice(Account):
    """From the last sweep and from the one that runs, whether that has found the rows or not."""

    def deleted(self, nbytes: int, *, by_running: bool) -> None:
        super().deleted(nbytes, by_running=by_running or self.sweep is not None)


class UnknownPrefixCountsAsEmpty(Takeover):
    def _first(self, *, unseen: bool) -> Record:
        return replace(self.record or Record(0), writer=self.quota.mover, write=self._nonce())


class TakerBeginsAnew(Takeover):
    """It keeps nothing of the record that it replaces, and counts whoever it finds."""

    def _account(self, counters: Mapping[str, Counter]) -> Account:
        counted = {mover: counter.ended for mover, counter in counters.items()}
        self.record = replace(self.record or Record(0), counted=counted)
        return super()._account(counters)


class TakeoverIsOneWrite(Takeover):
    """No look whether it stayed, and the counters are those from before it."""

    def _take(self, now: float) -> Steps[float]:
        now, counters = yield Ask(COUNTERS)
        self.record = self._first(unseen=False)
        account = self._account(counters)
        wrote, now = yield from self._write(account.record(self.quota.mover, self._nonce()), now)
        if wrote:
            self.account = account
        return now


class CountersAreReadBeforeTheRecord(Takeover):
    """Those of an earlier turn serve."""

    _counters: Mapping[str, Counter] | None = None

    def renew(self, now: float) -> Steps[float]:
        steps = super().renew(now)
        answer = None
        while True:
            try:
                asked = steps.send(answer) if answer is not None else next(steps)
            except StopIteration as end:
                return float(end.value)
            answer = yield asked
            if asked.what == COUNTERS:
                late, self._counters = self._counters, answer[1]
                answer = answer[0], self._counters if late is None else late


class WritesAreUnconditional(Takeover):
    def _write(self, record: Record, now: float) -> Steps[tuple[bool, float]]:
        steps = super()._write(record, now)
        next(steps)
        try:
            steps.send((yield Ask(WRITE, (record, ""))))
        except StopIteration as end:
            wrote: tuple[bool, float] = end.value
        return wrote


class OthersNameIsNoReasonToForget(Takeover):
    def read(self) -> Steps[float]:
        account = self.account
        now = yield from super().read()
        self.account = account
        return now


class SweepOfAnEarlierTenureGoesOn(Sweeper):
    """What it found before another mover wrote the record still counts."""

    def work(self, now: float) -> Steps[float]:
        account = self._takeover.account
        if account is not None and self._account is not None and account is not self._account:
            account.sweep, account.swept = self._account.sweep, 1
            self._account = account
        if account is None:
            return now
        return (yield from super().work(now))


class NamesServeBeforeTheirAccount(Sweeper):
    """Though the record that would have counted them could not be written."""

    def _swap(self) -> None:
        assert self._account is not None
        sweep = self._account.sweep
        if self._account.ended is not None:
            self._account.sweep = None
        super()._swap()
        self._account.sweep = sweep


class DeletesGoOnWithoutAWrite(Takeover):
    """However long ago the record was last written."""

    def may_delete(self, now: float) -> bool:
        return self.account is not None


class NonceIsTheMovers(Takeover):
    """So that two writes of the same content are one to the server."""

    def __init__(self, quota: UploadQuota, terms: Terms, **named: Any) -> None:
        super().__init__(quota, terms, **named | {"nonce": lambda: quota.mover})


class FailedUploadsNeedNoSweep(Account):
    @property
    def sweep_first(self) -> bool:
        return not self.swept or self.windows > MAX_WINDOWS


class RowsDeletedEarlyAreNamesToo(Sweeper):
    """They are deleted again, and subtracted once more."""

    def _found(self, each: Listed) -> None:
        super()._found(each)
        running, row = self._running, self._names.parse(each.name)
        assert running is not None
        if row is not None and each.modified_s < running.early_s:
            running.victims.add(each.modified_s, bytes.fromhex(row[0]) + row[1], each.nbytes)


class AnyRowIsDeletedEarly(Sweeper):
    """Whatever the sweep has found so far, as if all of it were among the oldest."""

    def _found(self, each: Listed) -> None:
        assert self._running is not None
        if self._rows is None:
            self._running.early_s = float("inf")
        super()._found(each)


class WindowIsNotKeptFree(UploadQuota):
    def try_acquire(self, nbytes: int) -> bool:
        self.capacity_bytes += self.window_bytes
        try:
            return super().try_acquire(nbytes)
        finally:
            self.capacity_bytes -= self.window_bytes


class UploadsAreNotBoundByAWindow(UploadQuota):
    def try_acquire(self, nbytes: int) -> bool:
        started, self._started = self._started, 0
        granted = super().try_acquire(nbytes)
        self._started = started + nbytes * granted
        return granted


class UncountedMoverUploads(UploadQuota):
    def refresh(self, record: Record) -> None:
        super().refresh(replace(record, counted={self.mover: 0} | dict(record.counted)))


class FailedUploadEndsAtOnce(UploadQuota):
    def upload_ended(self, nbytes: int, now: float, *, done: bool = True) -> None:
        super().upload_ended(nbytes, now)


KINDS = (Account, Takeover, Sweeper, UploadQuota)
MUTANTS = [each for each in vars().values() if isinstance(each, type) and issubclass(each, KINDS) and each not in KINDS]
SCENE: dict[type, Callable[..., None]] = {
    RunningSweepDropsNewWindows: scenes.windows_of_movers_added_during_a_sweep_stay,
    OldCounterIsAddedWithoutASweep: scenes.a_counter_above_a_window_waits_for_a_sweep,
    TakerBeginsAnew: scenes.a_taker_goes_on_from_the_record_that_it_replaces,
    TakeoverIsOneWrite: scenes.a_write_that_did_not_stay_makes_no_writer,
    CountersAreReadBeforeTheRecord: scenes.counters_are_read_after_the_record_that_is_replaced,
    WritesAreUnconditional: scenes.a_write_replaces_what_its_writer_has_read,
    NamesServeBeforeTheirAccount: scenes.names_serve_with_their_account,
    NonceIsTheMovers: scenes.an_idle_writer_is_not_replaced,
    FailedUploadsNeedNoSweep: scenes.refused_uploads_do_not_empty_the_prefix,
    OthersNameIsNoReasonToForget: scenes.who_finds_another_name_forgets_its_account,
}
"""What shows at once those that a random walk seldom meets."""
RACY: dict[str, Any] = {"racy": True, "stale_s": 0.0, "rates": {"pause": 3, "kill": 3}}
NAMED: dict[type, tuple[int, dict[str, Any]]] = {
    SuccessorBringsNoWindow: (31, RACY),
    DeletesAreSubtractedBeforeASweep: (46, RACY),
    CountsFall: (201, RACY),
    CountersAreReadBehindTheListing: (14, RACY),
    DeletesAreSubtractedTwice: (85, RACY),
    SweepOfAnEarlierTenureGoesOn: (23, RACY),
}
"""Worlds that catch these soon today, and the first seed."""


BROKEN: Final = r"beyond the bound|below the truth|more was deleted|a delete long after|an early delete"


def plant(mutant: type, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the simulation is given to have it."""
    if issubclass(mutant, Account):
        patch.setattr(takeover_module, "Account", mutant)
        return {}
    if issubclass(mutant, UploadQuota):
        return {"quota": lambda name: mutant(name, CAPACITY, ROW)}
    return {"takeover": mutant} if issubclass(mutant, Takeover) else {"sweeper": mutant}


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each not in SCENE], ids=lambda mutant: mutant.__name__)
def test_planted_bug_is_caught(mutant: type, monkeypatch: pytest.MonkeyPatch) -> None:
    named = plant(mutant, monkeypatch)
    first, world = NAMED.get(mutant, (0, {}))
    with pytest.raises(AssertionError, match=BROKEN):
        explore(range(first, first + SEEDS), **named, **world)


@pytest.mark.parametrize("mutant", SCENE, ids=lambda mutant: mutant.__name__)
def test_planted_bug_breaks_its_scene(mutant: type, monkeypatch: pytest.MonkeyPatch) -> None:
    named = plant(mutant, monkeypatch)
    with pytest.raises(AssertionError):
        SCENE[mutant](*named.values())


@pytest.fixture(autouse=True)
def _small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "WINDOW_SHARE", SHARE)
    monkeypatch.setattr(sweep_module, "MIN_VICTIMS", 8)
