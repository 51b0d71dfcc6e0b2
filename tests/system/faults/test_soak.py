"""Random load and random faults, every byte verified: two short rounds, or as many as MINUTES=n has room for, as in
`make soak`. SEED=n has the faults of a run again; their timing depends on the machine."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule
from tests.support.file_tier import file_tier
from tests.support.leaks import resident_bytes
from tests.support.proxy import FaultProxy
from tests.system.faults.rig import CAPACITY, FaultRig, MatrixRow
from tests.system.faults.test_s3 import S3_FAULTS

MINUTES = float(os.environ.get("MINUTES", "0"))
pytestmark = [pytest.mark.faults, pytest.mark.timeout(900 + 120 * MINUTES)]

ROUND_S = 30.0 if MINUTES else 8.0
GROWTH_BYTES = 32 << 20  # tolerated growth of resident memory from a third of the run to its end
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
DISK_FAULTS = (
    *(Fault.TORN_WRITE, Fault.BIT_FLIP, Fault.SHORT_READ, Fault.LATE_ERROR),
    *(Fault.UNAVAILABLE, Fault.NO_SPACE, Fault.SLOW),
)


def test_random_faults_cost_no_byte_and_no_memory(
    proxy: FaultProxy, bucket: str, s3_prefix: str, tmp_path: Path
) -> None:
    """Two directories above S3, each with a mover. At the end of each round the faults stop, the tier recovers, and the
    store is closed; rows stay for the next rounds."""
    seed, end_s = int(os.environ.get("SEED", "3")), time.monotonic() + 60 * MINUTES
    draw, switch, resident = Random(seed), tmp_path / "disk-faults", list[int]()
    tier: dict[str, Any] = {**file_tier("", CAPACITY), "path": [str(tmp_path / "a"), str(tmp_path / "b")]}
    below = {"type": "s3", "bucket": bucket, "prefix": s3_prefix, "endpoint": proxy.endpoint, "capacity": CAPACITY}
    plan = FaultPlan(tuple(Rule(fault, chance=0.03, delay_s=0.3) for fault in DISK_FAULTS), seed, str(switch))

    def strike(rig: FaultRig) -> None:
        what = draw.choice(("signal", "server", "disk", "reset"))
        if what == "signal":
            pid = draw.choice(rig.store.coordinator.mover_pids)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, draw.choice(SIGNALS))
        elif what == "server":
            proxy.inject(draw.choice([*S3_FAULTS.values()]))
        elif what == "disk":
            switch.touch()
        else:
            rig.store.reset()

    def stop() -> None:
        proxy.clear()
        switch.unlink(missing_ok=True)

    while len(resident) < 2 or time.monotonic() < end_s:
        rig = FaultRig(MatrixRow("soak", "file, s3"), tier, below=below, plan=plan)
        with rig.under_load():
            until_s = time.monotonic() + ROUND_S
            while time.monotonic() < until_s:
                strike(rig)
                time.sleep(draw.uniform(0.2, 3.0))
                rig.wait_for_answers()
                if draw.random() < 0.7:
                    stop()
            stop()
            rig.fault_ended()
            rig.wait_until_healed()
        assert rig.load.stats.hits
        resident.append(resident_bytes())
        print(f"SEED={seed}: {rig.row}, {resident[-1] >> 20} MiB")
    if len(resident) >= 6:
        assert max(resident[-2:]) - resident[len(resident) // 3] <= GROWTH_BYTES, resident
