"""Row files keep the contract of a tier, and their native worker runs under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from tests.support.compiled import CSRC, sanitizer_flags
from tests.system.tiers.media import RowFiles


class TestFilesStorage(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return RowFiles(tmp_path)


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_threads_move_random_units_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    compiler, program = shutil.which("gcc"), tmp_path / "driver"
    if compiler is None:
        pytest.skip("no gcc here")
    flags = [*sanitizer_flags(compiler, tmp_path, sanitizers), "-std=c11", "-D_GNU_SOURCE", f"-I{CSRC}"]
    source = Path(__file__).with_name("worker_driver.c")
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, *warnings, "-o", program, source, "-lpthread"], check=True)
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir(mode=0o700)
        ended = subprocess.run([program, folder, seed], check=False, capture_output=True, text=True)
        if "unexpected memory mapping" in ended.stderr:
            pytest.skip("ThreadSanitizer does not know this kernel's layout of addresses")
        assert ended.stdout == "done\n", ended.stderr[-3000:]
