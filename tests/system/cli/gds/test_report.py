"""`nixl-tiers doctor --gds DIR` on a fake CUDA driver and a fake cuFile that misbehave in every known way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.cli import main
from nixl_tiers.cli.gds.report import inspect
from nixl_tiers.cli.gds.verdict import EXIT_CODES, Kind
from tests.mover.harness import has_exited

Behave = Callable[[str], None]
Doctor = Callable[..., tuple[int, str]]

VERDICTS = {
    "no_vmm": "native: nvidia-fs, and its counters show every transfer",
    "claims": "compatibility: cuFile says nvidia-fs, but of 13 reads and 13 writes cuFile's statistics count 0 and 0 "
    "as direct, and 26 as POSIX",
    "refuse": "unavailable: GPU memory: cuFileHandleRegister failed with error 5018 (",
    "abort": "unavailable: GPU memory: the process died in cuFileBufRegister: SIGABRT",
    "wrong": "unavailable: wrong bytes in memory after a read of 4096 bytes",
    "short": "unavailable: GPU memory: cuFileRead of 1048576 bytes returned 524288",
}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def run(directory: Path, *options: str) -> tuple[int, str]:
        code = main(["doctor", "--gds", str(directory), *options])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize("behaviour", VERDICTS)
def test_verdict_follows_what_cufile_did(behaviour: str, cufile: Behave, doctor: Doctor, tmp_path: Path) -> None:
    cufile(behaviour)
    code, text = doctor(tmp_path)
    assert text.splitlines()[-1].startswith(f"verdict: {VERDICTS[behaviour]}")
    assert code == EXIT_CODES[Kind(VERDICTS[behaviour].partition(":")[0])]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_open_that_spins_is_killed_and_reported(cufile: Behave, tmp_path: Path) -> None:
    cufile("spin")
    found = inspect(tmp_path)
    assert str(found.verdict) == "unavailable: cuFileDriverOpen did not return within 0.5 s"
    assert found.probes.driver is not None
    assert has_exited(found.probes.driver.get("pid")), "the child was killed"
    skipped = [check.name for check in found.checks if check.status == "not tried"]
    assert skipped == ["host memory", "GPU, cuMemAlloc", "GPU, cuMemCreate", "NIXL GDS_MT"], "it hangs only once"


def test_doctor_works_without_the_dependencies_of_the_package(cufile: Behave, tmp_path: Path) -> None:
    cufile("no_vmm")
    packages = ("pydantic", "numpy", "msgspec", "boto3", "yaml", "typer", "rich")
    missing = f"import sys, runpy; sys.modules |= dict.fromkeys({packages}); "
    call = f"sys.argv[1:] = [{str(tmp_path)!r}, '--json']; runpy.run_module('nixl_tiers.cli.gds', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", missing + call], capture_output=True, text=True, check=False)
    assert done.returncode in EXIT_CODES.values(), done.stderr
    assert json.loads(done.stdout)["verdict"] in set(Kind)
