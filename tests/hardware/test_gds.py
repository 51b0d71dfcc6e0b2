"""GPUDirect Storage on the machine's own GPU and drives: `make test-gds DIR=/mnt/nvme`, or with a directory on them in
NIXL_TIERS_GDS_DIR. Skipped, with the doctor's reason, where it is unavailable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.gds import Child
from bench.gds_paths import Setup
from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.cli.gds.report import Report, inspect
from nixl_tiers.cli.gds.verdict import Kind
from tests.mover.harness import MoverProcess
from tests.support.file_tier import file_tier

VARIABLE = "NIXL_TIERS_GDS_DIR"
pytestmark = pytest.mark.gds


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    base = os.environ.get(VARIABLE)
    if not base:
        pytest.skip(f"{VARIABLE} is not set: make test-gds DIR=...")
    with TemporaryDirectory(dir=base, prefix="nixl-tiers-gds-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def doctor(directory: Path) -> Report:
    report = inspect(directory)
    if report.verdict.kind is Kind.UNAVAILABLE:
        pytest.skip(f"GPUDirect Storage is {report.verdict}")
    return report


@pytest.fixture
def gpu(doctor: Report) -> int:
    if 0 not in doctor.probes.gpus.all("gpu"):
        pytest.skip("there is no GPU")
    return 0


@pytest.mark.usefixtures("doctor")
def test_file_tier_over_gds_mt_loads_what_it_stored(directory: Path) -> None:
    geometry = Geometry(1, 1 << 20)
    tier = file_tier(directory / "slabs", 256 << 20, backend="gds_mt")
    numbers = range(16)
    with MoverProcess(tier, geometry, len(numbers)) as mover:
        mover.open()
        mover.listed_rows()
        assert set(mover.store(numbers)) == {Outcome.OK}
        assert set(mover.load(numbers)) == {Outcome.OK}
        mover.stop()


@pytest.mark.parametrize("kind", ["host", "direct"])
@pytest.mark.parametrize("payload_bytes", [256 << 10, 16 << 20])
def test_rows_arrive_in_gpu_memory_unchanged(
    kind: str, payload_bytes: int, gpu: int, directory: Path, tmp_path: Path
) -> None:
    """The child compares every byte of a load before it is ready."""
    (directory / kind).mkdir(exist_ok=True)
    setup = Setup(str(directory / kind), payload_bytes, rows=16, depth=8, gpu=gpu)
    child = Child("bench.gds_paths", kind, json.dumps(asdict(setup)), log=tmp_path / "log")
    try:
        child.start()
        assert "label" in child.ready, child.ready
    finally:
        child.close()


def test_every_read_and_write_is_direct_where_cufile_says_so(doctor: Report) -> None:
    if doctor.verdict.kind is not Kind.NATIVE:
        pytest.skip(f"GPUDirect Storage is {doctor.verdict}")
    assert doctor.probes.allocated is not None
    assert len(doctor.probes.allocated.all("size")) == 13
    assert doctor.probes.allocated.get("registered") is True
