"""Random load and random faults on a real store, for as long as you like; every byte of every hit is checked.

    python -m tests.soak --minutes 10 --seed 1

A round opens a store over a file tier and an object tier (moto, behind the fault proxy), loads it, and strikes: signals
to movers, troubles of the server, damaged and late transfers of the disk, resets. At its end the faults stop, both
tiers must heal, and the store is closed: nothing may be left. Stored rows live on into the next rounds. The seed
decides what happens in which order; when it happens is up to the machine. Ends with status 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from nixl_tiers.cascade.limits import Limits
from nixl_tiers.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.coordinator import Coordinator
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.store import TieredStore
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule
from nixl_tiers.testing.servers import moto_server
from tests.support.leaks import ResourceCount, resident_bytes
from tests.support.load import LoadGenerator, get, put
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault

CHUNK: Final = 64 << 10
HOST: Final = 8 << 20
CAPACITY: Final = 64 << 20
ROUND_S: Final = 30.0
HEAL_S: Final = 300.0  # a tier that is not up again by then has not healed
GROWTH_BYTES: Final = 32 << 20  # resident memory may grow by so much from a third of the run to its end
LIMITS: Final = replace(
    Limits(), wait_s=2.0, pin_s=5.0, hard_deadline_min_s=10.0, hard_deadline_max_s=20.0, retry_s=1.0
)
SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
GETS: Final = frozenset({"GET"})
S3_FAULTS: Final = (
    ProxyFault(FaultKind.REFUSED),
    ProxyFault(FaultKind.BLACK_HOLE),
    ProxyFault(FaultKind.THROTTLE, bytes_per_s=100),
    ProxyFault(FaultKind.RESET, probability=0.5),
    ProxyFault(FaultKind.EARLY_EOF, methods=GETS, probability=0.5),
    ProxyFault(FaultKind.TRUNCATED, methods=GETS, probability=0.5),
    ProxyFault(FaultKind.BIT_FLIP, probability=0.5),
    ProxyFault(FaultKind.ERROR_STATUS, status=503, code="SlowDown", probability=0.7),
    ProxyFault(FaultKind.ERROR_STATUS, status=500, code="InternalError"),
    ProxyFault(FaultKind.ERROR_STATUS, status=403, code="InvalidAccessKeyId"),
)
DAMAGES: Final = (
    Fault.TORN_WRITE,
    Fault.BIT_FLIP,
    Fault.SHORT_READ,
    Fault.LATE_ERROR,
    Fault.UNAVAILABLE,
    Fault.NO_SPACE,
    Fault.SLOW,
)


@dataclass
class Round:
    """What one round has shown."""

    number: int
    faults: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    chunks: int = 0
    hits: int = 0
    stored_hits: Counter[str] = field(default_factory=Counter)  # by storage tier
    longest_s: float = 0.0
    healed_s: float = 0.0
    resident_bytes: int = 0
    movers_bytes: int = 0
    fds: int = 0


class Soak:
    """One run. `findings` says in sentences what should not have been."""

    def __init__(self, directory: Path, proxy: FaultProxy, bucket: str, seed: int, round_s: float = ROUND_S) -> None:
        self.findings: list[str] = []
        self.rounds: list[Round] = []
        self._random = Random(seed)
        self._seed = seed
        self._round_s = round_s
        self._proxy = proxy
        self._switch = directory / "damage"
        self._names = itertools.count()
        s3 = {"type": "s3", "bucket": bucket, "prefix": f"soak-{seed}", "endpoint": proxy.endpoint}
        self._config = configuration.load(
            {
                "tiers": [
                    {"type": "cpu", "capacity": HOST},
                    {"type": "file", "path": str(directory / "kv"), "capacity": CAPACITY},
                    {**s3, "capacity": CAPACITY},
                ],
                "wait_s": LIMITS.wait_s,
            }
        )
        self._plan = FaultPlan(
            tuple(Rule(fault, chance=0.03, delay_s=0.3) for fault in DAMAGES), seed, str(self._switch)
        )

    def run(self, seconds: float, report: Callable[[Round], None]) -> None:
        """Rounds until `seconds` have passed, at least one; stops at the first finding of a round."""
        end = time.monotonic() + seconds
        before = ResourceCount.take()
        while not self.findings and (not self.rounds or time.monotonic() < end):
            self._round(min(self._round_s, max(5.0, end - time.monotonic())))
            self._rest(before)
            report(self.rounds[-1])
        self._flat()

    # --- a round ----------------------------------------------------------------------------------------------------

    def _round(self, seconds: float) -> None:
        this = Round(len(self.rounds))
        self.rounds.append(this)
        salt = b""  # what is stored with the weights as they were loaded stays true in later rounds
        store = self._open()
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end and not self.findings:
                # One load for each life of the weights: after a reset the same keys stand for other bytes.
                until_s = time.monotonic() + self._random.uniform(0.3, 1.0) * seconds
                with LoadGenerator(store, seed=self._seed, prompts=60, pause_s=0.002, salt=salt) as load:
                    while time.monotonic() < min(until_s, end) and not load.stats.wrong and not load.stats.errors:
                        self._strike(store, this)
                self._count(load, this)
                if time.monotonic() < end:
                    store.reset()
                    this.faults["reset"] += 1
                    salt = b"%d %d" % (this.number, next(self._names))
            self._heal(store, this, salt)
            this.stored_hits.update({name: int(store.stats()[name]["hits"]) for name in self._config.names})
            this.movers_bytes = sum(resident_bytes(pid) for pid in store.coordinator.mover_pids if pid)
        finally:
            self._proxy.clear()
            self._switch.unlink(missing_ok=True)
            store.close()

    def _strike(self, store: TieredStore, this: Round) -> None:
        what = self._random.choice(("signal", "server", "damage", "calm"))
        pause_s = self._random.uniform(0.2, 3.0)
        if what == "signal":
            number, pid = self._random.choice(SIGNALS), self._random.choice(store.coordinator.mover_pids)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    this.faults[number.name] += 1
        elif what == "server":
            trouble = self._random.choice(S3_FAULTS)
            this.faults[trouble.kind.value] += 1
            self._proxy.inject(trouble)
        elif what == "damage":
            this.faults["damage on the disk"] += 1
            self._switch.touch()
        time.sleep(pause_s)
        if self._random.random() < 0.7:
            self._proxy.clear()
            self._switch.unlink(missing_ok=True)

    def _count(self, load: LoadGenerator, this: Round) -> None:
        seen = load.stats
        this.answers += seen.gets
        this.chunks += seen.chunks
        this.hits += seen.hits
        this.longest_s = max(this.longest_s, seen.longest_s)
        if seen.wrong:
            self.findings.append(f"round {this.number}: wrong bytes for {seen.wrong[0]!r}")
        if seen.errors:
            self.findings.append(f"round {this.number}: the store raised {seen.errors[0]}")

    def _heal(self, store: TieredStore, this: Round, salt: bytes) -> None:
        """No more faults: every tier is up, holds what is put now, gives it back, and every host row is free."""
        self._proxy.clear()
        self._switch.unlink(missing_ok=True)
        began = time.monotonic()
        waiting = set(self._config.names)
        while waiting and time.monotonic() < began + HEAL_S:
            earlier = store.stats()
            keys = [b"heal-%d-%d" % (this.number, next(self._names)) for _ in range(4)]
            put(store, keys, salt)
            store.flush(5.0)
            now = store.stats()
            waiting -= {n for n in waiting if now[n]["up"] and now[n]["bytes_written"] > earlier[n]["bytes_written"]}
            # Only what the host has let go comes from a storage tier.
            put(
                store,
                [b"filler-%d-%d" % (this.number, next(self._names)) for _ in range(store.coordinator.region.rows)],
                salt,
            )
            if get(store, keys, salt)[1]:
                self.findings.append(f"round {this.number}: wrong bytes after the faults had ended")
        this.healed_s = time.monotonic() - began
        if waiting:
            self.findings.append(f"round {this.number}: {sorted(waiting)} did not heal within {HEAL_S:g} s")
        if not store.flush(60):
            self.findings.append(f"round {this.number}: cascades that do not end")
        while not self._every_row_is_free(store):
            if time.monotonic() > began + HEAL_S:
                self.findings.append(f"round {this.number}: host rows that do not come back")
                return
            time.sleep(0.1)
        for name, numbers in store.stats().items():
            if not 0 <= numbers["used_bytes"] <= numbers["capacity_bytes"]:
                self.findings.append(f"round {this.number}: {name} holds {numbers['used_bytes']:g} bytes")

    def _every_row_is_free(self, store: TieredStore) -> bool:
        coordinator = store.coordinator
        plan = coordinator.prepare_store(
            [b"claim-%d" % next(self._names) for _ in range(coordinator.region.rows)], "claim"
        )
        coordinator.region.mark(np.array(plan.rows), 0, plan.store_seq, False)
        coordinator.complete_store(plan.keys)
        coordinator.finish_request("claim")
        return len(plan.rows) == coordinator.region.rows

    def _open(self) -> TieredStore:
        geometry = Geometry(cells=1, cell_payload=CHUNK)
        configuration.check_paths(self._config)
        region = HostRegion.create(geometry, HOST // geometry.row_bytes)
        config = with_faults(self._config, self._plan.to_dict())
        coordinator = Coordinator(config, Namespace.of({"of": "the soak"}), region, limits=LIMITS)
        coordinator.start()
        return TieredStore(coordinator)

    # --- what must not grow -----------------------------------------------------------------------------------------

    def _rest(self, before: ResourceCount) -> None:
        """A store was closed: nothing of it may be left."""
        this = self.rounds[-1]
        deadline = time.monotonic() + 60
        while not before.covers(now := ResourceCount.take()):
            if time.monotonic() > deadline:
                self.findings.append(f"round {this.number}: {now} is left of {before}")
                break
            time.sleep(0.1)
        this.fds, this.resident_bytes = now.fds, resident_bytes()

    def _flat(self) -> None:
        sizes = [each.resident_bytes for each in self.rounds]
        if len(sizes) >= 6 and max(sizes[-2:]) - sizes[len(sizes) // 3] > GROWTH_BYTES:
            self.findings.append(f"resident memory has grown: {[size >> 20 for size in sizes]} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    began = time.monotonic()

    def report(this: Round) -> None:
        print(
            f"{time.monotonic() - began:6.0f} s  round {this.number}: {this.answers} answers, {this.chunks} chunks, "
            f"{this.hits} hits ({dict(this.stored_hits)}), longest {this.longest_s:.2f} s, "
            f"healed after {this.healed_s:.1f} s, "
            f"{this.resident_bytes >> 20} MiB, movers {this.movers_bytes >> 20} MiB, {this.fds} fds; "
            + ", ".join(f"{number} {name}" for name, number in sorted(this.faults.items())),
            flush=True,
        )

    with tempfile.TemporaryDirectory(prefix="nixl-tiers-soak-") as folder, moto_server() as server:
        os.environ.update(server.env)
        bucket = server.make_bucket("soak")
        with FaultProxy(server.port, seed=arguments.seed) as proxy:
            soak = Soak(Path(folder), proxy, bucket, arguments.seed)
            soak.run(60 * arguments.minutes, report)
    total = {
        "seed": arguments.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "rounds": len(soak.rounds),
        "answers": sum(each.answers for each in soak.rounds),
        "chunks": sum(each.chunks for each in soak.rounds),
        "hits": sum(each.hits for each in soak.rounds),
        "hits_by_tier": dict(sum((each.stored_hits for each in soak.rounds), Counter())),
        "faults": sum(sum(each.faults.values()) for each in soak.rounds),
        "longest_s": round(max(each.longest_s for each in soak.rounds), 2),
        "slowest_heal_s": round(max(each.healed_s for each in soak.rounds), 1),
        "resident_mib": [each.resident_bytes >> 20 for each in soak.rounds],
    }
    print(json.dumps(total))
    for finding in soak.findings:
        print(f"FINDING: {finding}")
    return 1 if soak.findings else 0


if __name__ == "__main__":
    sys.exit(main())
