"""Soak test: random load and random faults on a real store, for a given time; every byte of every hit is verified.

    python -m tests.soak --minutes 10 --seed 1

A round opens the stores of two engines over a file tier (two parts of each of two paths, with two movers each) and an
S3 tier (moto, behind the fault proxy) that they share. Both are under load, and faults are injected: signals to movers,
server faults, faults of disk transfers, resets of the first store. At the end of a round the faults stop, all tiers
must recover, and the stores are closed: nothing may leak. Rows stay in the tiers for the next rounds. The seed decides
which faults come in which order; their timing depends on the machine. Exits with status 1 after any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.types import Limits
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule
from tests.support.file_tier import file_tier
from tests.support.leaks import ResourceCount, reclaim_all_host_rows, resident_bytes
from tests.support.load import LoadGenerator, get, put
from tests.support.proxy import FaultKind, FaultProxy, ProxyFault
from tests.support.servers import moto_server
from tests.support.waiting import until

CHUNK: Final = 64 << 10
HOST: Final = 8 << 20
CAPACITY: Final = 64 << 20
WINDOW_SHARE: Final = 8
ROUND_S: Final = 30.0
RECOVERY_S: Final = 300.0  # a tier that does not work again by then is a finding
GROWTH_BYTES: Final = 32 << 20  # tolerated growth of resident memory from a third of the run to its end
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
DISK_FAULTS: Final = (
    Fault.TORN_WRITE,
    Fault.BIT_FLIP,
    Fault.SHORT_READ,
    Fault.LATE_ERROR,
    Fault.UNAVAILABLE,
    Fault.NO_SPACE,
    Fault.SLOW,
)


@dataclass
class RoundResult:
    """The measurements of one round."""

    number: int
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    hits: int = 0
    longest_s: float = 0.0
    recovery_s: float = 0.0
    resident_bytes: int = 0


class Soak:
    """One run. `findings` describes every violation in a sentence."""

    def __init__(self, directory: Path, proxy: FaultProxy, bucket: str, seed: int, round_s: float = ROUND_S) -> None:
        self.findings: list[str] = []
        self.rounds: list[RoundResult] = []
        self._random = Random(seed)
        self._seed = seed
        self._round_s = round_s
        self._proxy = proxy
        self._switch = directory / "disk-faults"
        self._serials = itertools.count()
        place = {"bucket": bucket, "endpoint": proxy.endpoint, "capacity": CAPACITY}
        fast = {"type": "tests.mover.stub_tiers:FastBudgetConfig", "window_share": WINDOW_SHARE}
        s3 = {**fast, **place, "prefix": f"soak-{seed}"}
        cpu = {"type": "cpu", "capacity": HOST}
        file = file_tier(directory, CAPACITY)
        file["path"] = [str(directory / "kv"), str(directory / "kv2")]
        self._config = configuration.load({"tiers": [cpu, file, s3], "replicas": 2, "wait_s": LIMITS.wait_s})
        self._plan = FaultPlan(
            tuple(Rule(fault, chance=0.03, delay_s=0.3) for fault in DISK_FAULTS), seed, str(self._switch)
        )

    def run(self, seconds: float, report: Callable[[RoundResult], None]) -> None:
        """Run rounds until `seconds` have passed, at least two: one begins with rows. Stop after a finding."""
        end = time.monotonic() + seconds
        before = ResourceCount.take()
        while not self.findings and (len(self.rounds) < 2 or time.monotonic() < end):
            self._run_round(min(self._round_s, max(5.0, end - time.monotonic())))
            self._check_no_leaks(before)
            report(self.rounds[-1])
        self._check_memory_growth()

    # --- a round ----------------------------------------------------------------------------------------------------

    def _run_round(self, seconds: float) -> None:
        result = RoundResult(len(self.rounds))
        self.rounds.append(result)
        salt = b""  # rows of the initial weights stay valid in later rounds
        with contextlib.ExitStack() as stack:
            stores = [stack.enter_context(self._open()) for _ in range(2)]
            stack.callback(self._end_faults)  # before they are closed
            store, other = stores
            end = time.monotonic() + seconds
            with LoadGenerator(other, seed=self._seed, threads=1, prompts=60, pause_s=0.01) as beside:
                while time.monotonic() < end and not self.findings:
                    # One load generator per epoch: after a reset the same keys stand for other bytes, as with new
                    # weights.
                    until_s = time.monotonic() + self._random.uniform(0.3, 1.0) * seconds
                    with LoadGenerator(store, seed=self._seed, prompts=60, pause_s=0.002, salt=salt) as load:
                        while time.monotonic() < min(until_s, end) and not load.stats.wrong and not load.stats.errors:
                            self._inject_fault(stores, result)
                    self._collect(load, result)
                    if time.monotonic() < end:
                        store.reset()
                        result.faults["reset"] += 1
                        salt = b"%d %d" % (result.number, next(self._serials))
            self._collect(beside, result)
            self._check_recovery(dict(zip(stores, (salt, b""), strict=True)), result)

    def _inject_fault(self, stores: list[TieredStore], result: RoundResult) -> None:
        what = self._random.choice(("signal", "server", "disk", "none"))
        pause_s = self._random.uniform(0.2, 3.0)
        if what == "signal":
            number = self._random.choice(SIGNALS)
            pid = self._random.choice([pid for store in stores for pid in store.coordinator.mover_pids])
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    result.faults[number.name] += 1
        elif what == "server":
            fault = self._random.choice(S3_FAULTS)
            result.faults[fault.kind.value] += 1
            self._proxy.inject(fault)
        elif what == "disk":
            result.faults["disk faults"] += 1
            self._switch.touch()
        time.sleep(pause_s)
        if self._random.random() < 0.7:
            self._end_faults()

    def _end_faults(self) -> None:
        self._proxy.clear()
        self._switch.unlink(missing_ok=True)

    def _collect(self, load: LoadGenerator, result: RoundResult) -> None:
        stats = load.stats
        result.requests += stats.gets
        result.hits += stats.hits
        result.longest_s = max(result.longest_s, stats.longest_s)
        if stats.wrong:
            self.findings.append(f"round {result.number}: wrong bytes for {stats.wrong[0]!r}")
        if stats.errors:
            self.findings.append(f"round {result.number}: the store raised {stats.errors[0]}")

    def _check_recovery(self, salts: dict[TieredStore, bytes], result: RoundResult) -> None:
        """End all faults: each tier must be up, store new rows and read them back, and every host row must be free."""
        self._end_faults()
        began = time.monotonic()
        failing = {(each, name) for each in salts for name in self._config.names}
        while failing and time.monotonic() < began + RECOVERY_S:
            for store, salt in salts.items():
                earlier = store.stats()
                keys = [b"heal-%d-%d" % (result.number, next(self._serials)) for _ in range(4)]
                put(store, keys, salt)
                store.flush(5.0)
                now = store.stats()
                for name in self._config.names:
                    if now[name]["up"] and now[name]["bytes_written"] > earlier[name]["bytes_written"]:
                        failing.discard((store, name))
                # Fill the host, so that they are evicted and can only come from a storage tier.
                fillers = range(store.coordinator.region.rows)
                put(store, [b"filler-%d-%d" % (result.number, next(self._serials)) for _ in fillers], salt)
                if get(store, keys, salt)[1]:
                    self.findings.append(f"round {result.number}: wrong bytes after the faults had ended")
        result.recovery_s = time.monotonic() - began
        if failing:
            names = sorted({name for _, name in failing})
            self.findings.append(f"round {result.number}: {names} did not recover within {RECOVERY_S:g} s")
        for store in salts:
            try:
                until(lambda store=store: store.flush(1.0), "all rows to be written", timeout_s=60)
                until(lambda store=store: reclaim_all_host_rows(store), "host rows to be free", timeout_s=RECOVERY_S)
            except AssertionError as late:
                self.findings.append(f"round {result.number}: {late}")
            for name, numbers in store.stats().items():
                windows = 2 * CAPACITY // WINDOW_SHARE if name == "s3" and result.number % 2 else 0
                if not 0 <= numbers["used_bytes"] <= numbers["capacity_bytes"] + windows:
                    self.findings.append(f"round {result.number}: {name} holds {numbers['used_bytes']:g} bytes")

    def _open(self) -> TieredStore:
        geometry = Geometry(cells=1, cell_payload=CHUNK)
        configuration.check_paths(self._config)
        region = HostRegion.create(geometry, HOST // geometry.row_bytes)
        config = with_faults(self._config, self._plan.to_dict())
        coordinator = Coordinator(config, Namespace.of({"of": "the soak"}), region, limits=LIMITS)
        coordinator.start()
        return TieredStore(coordinator)

    # --- leaks ------------------------------------------------------------------------------------------------------

    def _check_no_leaks(self, before: ResourceCount) -> None:
        """A closed store must leave nothing."""
        try:
            until(lambda: before.covers(ResourceCount.take()), f"what {before} does not cover to go", timeout_s=60)
        except AssertionError as late:
            self.findings.append(f"round {self.rounds[-1].number}: {late}")
        self.rounds[-1].resident_bytes = resident_bytes()

    def _check_memory_growth(self) -> None:
        sizes = [each.resident_bytes for each in self.rounds]
        if len(sizes) >= 6 and max(sizes[-2:]) - sizes[len(sizes) // 3] > GROWTH_BYTES:
            self.findings.append(f"resident memory has grown: {[size >> 20 for size in sizes]} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # movers import the tests' tiers by name
    with tempfile.TemporaryDirectory(prefix="nixl-tiers-soak-") as folder, moto_server() as server:
        os.environ.update(server.env)
        with FaultProxy(server.port, seed=arguments.seed) as proxy:
            soak = Soak(Path(folder), proxy, server.make_bucket("soak"), arguments.seed)
            soak.run(60 * arguments.minutes, lambda result: print(result, flush=True))
    for finding in soak.findings:
        print(f"FINDING: {finding}")
    return 1 if soak.findings else 0


if __name__ == "__main__":
    sys.exit(main())
