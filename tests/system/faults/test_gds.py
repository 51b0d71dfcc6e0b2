"""The file tier through NVIDIA's cuFile and NIXL's GDS_MT plugin, the real ones, in faults.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.support.no_gpu import NoGpu
from tests.support.waiting import until
from tests.system.faults.interposer import Interposer
from tests.system.faults.rig import KILLS, TIMEOUT_S, TIMES, FaultRig
from tests.system.faults.test_disk import FAULTS, inject
from tests.system.faults.test_mover import matrix

pytestmark = pytest.mark.timeout(900)

BACKEND = {"backend": "gds_mt"}


@pytest.fixture
def cufile(no_gpu: NoGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """cufile(udev=False): what every mover that is started from here on has of cuFile."""
    if not os.major(tmp_path.stat().st_dev):
        pytest.skip("needs temporary files on a block device")

    def use(**lacks: bool) -> None:
        for name, value in no_gpu.environment(tmp_path, **lacks).items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.parametrize("when", matrix(("idle", "store", "load"), unmarked={("store",)}))
def test_mover_is_killed(make_rig: Callable[..., FaultRig], cufile: Callable[..., None], when: str) -> None:
    cufile()
    rig = make_rig(f"SIGKILL, {when}", "slabs", fields=BACKEND)
    rig.ride_out(lambda: rig.kill(KILLS["SIGKILL"], when), answers=8)


@pytest.mark.parametrize("fault", matrix(tuple(FAULTS), unmarked={("disk full",)}))
def test_disk_fault(
    make_rig: Callable[..., FaultRig], disk: Interposer, cufile: Callable[..., None], fault: str
) -> None:
    cufile()
    inject(make_rig(fault, "slabs", fields=BACKEND), disk, fault)


def test_driver_open_never_returns(
    make_rig: Callable[..., FaultRig],
    cufile: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """cuFile 1.20 spins in cuFileDriverOpen where /proc/modules is missing. The engine is served by its cpu tier."""
    caplog.set_level(logging.INFO)
    cufile(modules=False)
    short = msgspec.structs.replace(TIMES, start_timeout_s=3.0)
    rig = make_rig("cuFileDriverOpen never returns", "slabs", fields=BACKEND, times=short)

    def down() -> list[str]:
        """One line for each outage."""
        return [record.getMessage() for record in caplog.records if " is down: " in record.getMessage()]

    with rig.under_load(warm=False):
        until(down, "the tier to be down", TIMEOUT_S)
        assert not rig.is_up()
        rig.wait_for_answers(20)
        (line,) = down()
        cufile()
        configures = rig.store.coordinator._link.supervisor._configures
        configures[0] = msgspec.structs.replace(configures[0], times=TIMES)
        os.kill(rig.wait_for_mover(), signal.SIGKILL)  # one that spins already
        rig.fault_ended()
        rig.wait_until_healed()
    assert line.endswith("is down: its mover is killed: it did not start in time")
    assert "opening cuFile" in caplog.text
