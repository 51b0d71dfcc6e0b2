"""bench.gds: what it recommends for which figures, how it reads other programs, and a whole run without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench import gds_ceilings, gds_paths
from bench.gds_advice import Case, Findings, recommend, report
from tests.cli.gds.conftest import build as build_fake_cufile
from tests.swap.fake_gpu import FakeGpu
from tests.swap.fake_gpu import build as build_fake_gpu

ROOT = Path(__file__).parents[2]
NATIVE = "native: nvidia-fs, and its counters show every transfer"
HOST = {"gb_per_s": 4.0, "cpu_s_per_gb": 0.2, "p50_ms": 5.0, "p99_ms": 10.0, "loads": 100}
STEPS = {"p50_ms": 1.0, "p99_ms": 2.0, "steps": 500}


def findings(
    direct: dict[str, float] | None,
    verdict: str = NATIVE,
    steps: float = 2.0,
    missing: dict[str, str] | None = None,
) -> Findings:
    figures = {"host": HOST, **({"direct": {**HOST, **direct}} if direct is not None else {})}
    beside = {"host": STEPS, "direct": {**STEPS, "p99_ms": steps}} if direct is not None else {}
    case = Case(1 << 20, 16, dict(figures), dict(figures), beside)
    return Findings({"date": "2026-11-22"}, verdict, "doctor's lines", [case], [], STEPS, missing or {})


@pytest.mark.parametrize(
    ("direct", "worth_it"),
    [
        ({"gb_per_s": 4.7}, True),
        ({"gb_per_s": 4.5}, False),
        ({"gb_per_s": 8.0, "p99_ms": 11.0}, False),
        ({"cpu_s_per_gb": 0.1}, True),
        ({"cpu_s_per_gb": 0.1, "gb_per_s": 3.0}, False),
        ({"cpu_s_per_gb": 0.1, "p99_ms": 11.0}, False),
        ({}, False),
    ],
)
def test_direct_loads_must_be_faster_or_take_half_the_cpu(direct: dict[str, float], worth_it: bool) -> None:
    text = recommend(findings(direct))
    assert text.startswith("direct loads are worth having here: " if worth_it else "direct loads are not worth having")


def test_direct_loads_must_not_slow_the_steps_beside_them() -> None:
    text = recommend(findings({"gb_per_s": 8.0}, steps=3.0))
    assert text.startswith("direct loads are not worth having here: steps beside them have 1.50x the 99th percentile; ")


def test_figures_of_compatibility_mode_recommend_nothing() -> None:
    text = recommend(findings({"gb_per_s": 8.0}, "compatibility: cuFile finds neither nvidia-fs nor PCI P2PDMA"))
    assert text.startswith("direct loads are not worth having here: cuFile does not bypass host memory (compatibility")


def test_what_could_not_be_measured_is_named() -> None:
    missing = {"direct": "there is no GPU", "fio": "fio is not installed"}
    found = findings(None, "unavailable: no libcufile", missing=missing)
    assert recommend(found) == "no recommendation: direct loads could not be measured here (there is no GPU)"
    text = report(found)
    assert "- direct: unavailable: there is no GPU\n- fio: unavailable: fio is not installed\n" in text
    assert "doctor's lines" in text
    raw = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    assert raw["cases"][0]["alone"]["host"]["gb_per_s"] == 4.0


def test_fio_is_read_behind_its_warnings() -> None:
    read = {"bw_bytes": 3_400_000_000, "clat_ns": {"percentile": {"50.000000": 1_500_000, "99.000000": 9_000_000}}}
    text = "fio: a warning\n" + json.dumps({"fio version": "fio-3.33", "jobs": [{"read": read}]})
    assert gds_ceilings.parse_fio(text) == {"gb_per_s": 3.4, "p50_ms": 1.5, "p99_ms": 9.0}


def test_gdsio_is_read_from_its_line_and_an_error_is_passed_on() -> None:
    line = (
        "IoType: READ XferType: GPUD Threads: 16 DataSetSize: 9961472/4194304(KiB) IOSize: 1024(KiB) "
        "Throughput: 3.25 GiB/sec, Avg_Latency: 4801.25 usecs ops: 9728 total_time 2.9 secs"
    )
    found = gds_ceilings.parse_gdsio(line)
    assert found == {"gb_per_s": pytest.approx(3.4897, abs=1e-3), "average_ms": pytest.approx(4.80125)}
    with pytest.raises(ValueError, match="file register error"):
        gds_ceilings.parse_gdsio("Error: file register error: GPUDirect Storage not supported on current file\n")


def test_program_that_is_missing_or_fails_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    program = tmp_path / "fio"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gds_ceilings.fio(file, 4096, 1, 1)["unavailable"].startswith("fio is not installed")
    program.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    program.chmod(0o700)
    assert gds_ceilings.fio(file, 4096, 1, 1)["unavailable"] == "fio ended with 3: no such engine"


def test_host_path_delivers_rows_to_blocks_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    library = build_fake_gpu(tmp_path_factory.mktemp("fake_gpu"))
    if library is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("NIXL_TIERS_SWAP", "copy_engine")
    driver = FakeGpu(library).driver
    monkeypatch.setattr(gds_paths, "open_driver", lambda: driver)
    setup = gds_paths.Setup(str(tmp_path), 128 << 10, rows=24, depth=8, gpu=0)
    with ExitStack() as stack:
        path = gds_paths.HostPath(setup, stack)
        gds_paths.check(path, setup)
        assert path.label == "POSIX -> page-locked row -> GPU blocks"
        found = gds_paths.measure(path, setup.rows, 4, 0.0)
        assert found["loads"] == gds_paths.MIN_LOADS
        monkeypatch.setattr(path, "load", lambda rows: None)
        with pytest.raises(SystemExit, match="wrong bytes"):
            gds_paths.check(path, setup)


def test_run_without_a_gpu_ends_with_a_report(tmp_path: Path) -> None:
    libraries = build_fake_cufile(tmp_path)
    if libraries is None:
        pytest.skip("no C compiler")
    options = ["--rows", "131072", "--depths", "1,8", "--megabytes", "4", "--rounds", "1", "--seconds", "0.1"]
    command = [sys.executable, "-m", "bench.gds", "--path", str(tmp_path), "--out", str(tmp_path / "out"), *options]
    environment: dict[str, Any] = {"LD_LIBRARY_PATH": str(libraries), "FAKE_CUFILE": "native", "FAKE_NO_GPU": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, check=True, stdout=subprocess.PIPE, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "no recommendation: direct loads could not be measured here (there is no GPU)"
    assert "direct: unavailable: there is no GPU" in lines
    text = (tmp_path / "out" / "report.md").read_text()
    assert "128 KiB     8  host    alone" in text
    assert "GPU            unavailable: " in text
