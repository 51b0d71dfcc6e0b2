"""A core with one file tier of several movers, which do at once what they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Job, TierSpec
from tests.support.core import empty_host, opened, put, rows_of

MEMBERS: Final = 4
SLOTS: Final = 16  # of a member
TOKENS: Final = 16
PROMPT: Final = [b"chunk-%02d" % number for number in range(16)]


class Machine:
    """A core whose movers do at once what they are sent, but for those that `hang`."""

    def __init__(self, host: int = 256) -> None:
        spec = TierSpec("file", Write.THROUGH, physical_slots=True, members=MEMBERS)
        self.core = TierManager(host, 4096, [spec])
        self.tier = self.core.tiers[0]
        self.now = 0.0
        self.hang: set[int] = set()
        self.sent: list[Job] = []
        self.deleted: list[tuple[int, int, Key]] = []  # (mover, slot, key)
        for member in self.tier.members:
            self.open(member.number, [])

    def open(self, mover: int, rows: Sequence[tuple[int, Key, int]]) -> None:
        opened(self.core, mover, SLOTS)
        self.core.events.listed(mover, rows, last=True)

    def turn(self) -> None:
        for _ in range(20):
            self.now += 0.01
            jobs = self.core.turn(self.now, self.now)
            for member in self.core.movers:
                for batch in member.delete_batches(256):
                    self.deleted += [(member.number, slot, key) for slot, key in batch]
            self.sent += jobs
            for job in jobs:
                if job.mover not in self.hang:
                    self.core.events.finished(job.mover, job.id, [Outcome.OK] * len(job.moves), self.now)

    def store(self, keys: Sequence[Key]) -> None:
        put(self.core, keys)
        self.turn()

    def forget_host(self) -> None:
        empty_host(self.core)

    def load(self, keys: Sequence[Key], name: str) -> int:
        """How many chunks a request finds from its beginning on, after its wait; it ends then."""
        chain = Chain((Group(list(keys), TOKENS),))
        scan = self.core.look_up(name, chain, 0, self.now)
        for _ in range(5):
            if scan.waits:
                self.core.end_step()
                self.turn()
                scan = self.core.look_up(name, chain, 0, self.now)
        assert not scan.waits
        self.core.count_misses(name, keys[scan.end // TOKENS :], self.now)
        self.core.finish(name)
        self.core.end_step()
        return scan.end // TOKENS

    def die(self, mover: int) -> list[tuple[int, Key, int]]:
        """Returns what its medium lists when it is opened again."""
        member = self.core.movers[mover]
        held = [
            (row.slot - member.first_slot, key, row.tick)
            for key, row in rows_of(self.tier).items()
            if self.tier.member_of(key) is member
        ]
        self.core.events.lost(mover, self.now)
        return held

    def first_at(self, mover: int, keys: Sequence[Key] = PROMPT) -> int:
        return next(n for n, key in enumerate(keys) if self.tier.member_of(key).number == mover)
