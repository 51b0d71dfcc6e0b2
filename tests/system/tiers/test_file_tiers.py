"""Both layouts of file tiers keep the contract of a tier; real movers share a path; the native workers' C by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_digest, xxh3_128_digest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Down, Open, Opened, Store
from nixl_tiers.testing.conformance import StorageTierTests
from nixl_tiers.testing.medium import Medium
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.disk import INCOMING
from tests.mover.harness import NAMESPACE, MoverProcess, key_of, payload
from tests.support.compiled import CSRC, sanitizer_flags
from tests.support.file_tier import LAYOUTS
from tests.system.tiers.media import RowFiles, SlabFiles

GEOMETRY = Geometry(1, 120_000)
ROWS = 32


class TestSlabs(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return SlabFiles(tmp_path)


class TestRowFiles(StorageTierTests):
    @pytest.fixture
    def medium(self, tmp_path: Path) -> Medium:
        return RowFiles(tmp_path)


# --- movers on one path -----------------------------------------------------------------------------------------------


def mover_on(path: Path, layout: str) -> MoverProcess:
    return MoverProcess(LAYOUTS[layout](path, 24 << 20), GEOMETRY, ROWS)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_second_engine_is_down_with_the_holders_name_and_adopts_its_rows_warm(tmp_path: Path, end: str) -> None:
    """A rolling update on one host path: the new pod starts while the old one still runs."""
    with mover_on(tmp_path, "slabs") as old, mover_on(tmp_path, "slabs") as new:
        old.open()
        assert set(old.store(range(ROWS))) == {Outcome.OK}
        new.send(Open(NAMESPACE, 0))
        down = new.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        holder = f"part-0 by process {old.process.pid} (engine {os.getpid()}) on"
        assert down.reason.startswith(f"{tmp_path} is in use: {holder}")
        assert "replicas (1 here) is how many engines may use it at once" in down.reason
        assert set(old.load(range(ROWS))) == {Outcome.OK}
        old.kill() if end == "kill" else old.stop()
        new.expect(lambda m: isinstance(m, Opened))
        assert {int(entry.key[4:]) for entry in new.listed_rows()} == set(range(ROWS))
        assert set(new.load(range(ROWS))) == {Outcome.OK}


def test_two_movers_may_store_the_same_row_at_once(tmp_path: Path) -> None:
    with mover_on(tmp_path, "files") as first, mover_on(tmp_path, "files") as second:
        for mover in (first, second):
            mover.open()
            mover.listed_rows()
        for _ in range(10):
            jobs = []
            for mover in (first, second):
                moves = []
                for row in range(16):
                    mover.region.rows_view[row] = payload(row, GEOMETRY)
                    moves.append(Move(row, row, key_of(row), tick=1, seal=True))
                jobs.append(mover.begin(Store, moves))
            assert set(first.finished(jobs[0]) + second.finished(jobs[1])) <= {Outcome.OK, Outcome.FOUND}
            assert set(first.load(range(16)) + second.load(range(16))) == {Outcome.OK}
            for path in tmp_path.rglob("*.row"):
                path.unlink()
        assert not any((tmp_path / INCOMING).iterdir())


# --- the native workers -----------------------------------------------------------------------------------------------


@pytest.fixture
def gcc() -> str:
    if (found := shutil.which("gcc")) is None:
        pytest.skip("no gcc here")
    return found


def test_hashes_of_every_length_are_those_of_xxhash(gcc: str, tmp_path: Path) -> None:
    """All paths of XXH3, of which a row's shape takes few."""
    source, program = tmp_path / "all.c", tmp_path / "all"
    source.write_text(
        '#include <stdio.h>\n#include <stddef.h>\n#include "pieces.h"\nint main(void) {\n'
        "  static uint8_t data[3000]; size_t n = fread(data, 1, sizeof data, stdin);\n"
        "  for (size_t i = 1; i <= n; i++) {\n"
        "    hash128 h = i < 4 ? (hash128){0, 0} : xxh3_128(data, i); uint64_t fast = 0;\n"
        "    size_t done = fast_pieces(NULL, data, i, 1 << 16, &fast); fast = __builtin_bswap64(fast);\n"
        "    if (done && fast != xxh3_64(data, i)) return 1;\n"
        '    printf("%016lx %016lx%016lx\\n", xxh3_64(data, i), h.high, h.low); }\n}\n'
    )
    subprocess.run([gcc, "-O2", f"-I{CSRC}", "-o", program, source], check=True)
    data = np.random.default_rng(1).bytes(3000)
    lines = subprocess.run([program], input=data, capture_output=True, check=True).stdout.decode().splitlines()
    assert len(lines) == 3000
    for size, line in enumerate(lines, 1):
        short, long = line.split()
        assert short == xxh3_64_digest(data[:size]).hex(), size
        assert size < 4 or long == xxh3_128_digest(data[:size]).hex(), size


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
@pytest.mark.parametrize("driver", ["slab_driver.c", "rowfile_driver.c"])
def test_threads_move_random_units_under_sanitizers(gcc: str, driver: str, sanitizers: str, tmp_path: Path) -> None:
    program, source = tmp_path / "driver", Path(__file__).with_name(driver)
    flags = [*sanitizer_flags(gcc, tmp_path, sanitizers), "-std=c11", "-D_GNU_SOURCE", f"-I{CSRC}"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run([gcc, *flags, *warnings, "-o", program, source, "-lpthread"], check=True)
    for seed in ("1", "2"):
        place = tmp_path / seed
        if driver == "rowfile_driver.c":
            place.mkdir(mode=0o700)
        ended = subprocess.run([program, place, seed], check=False, capture_output=True, text=True)
        if "unexpected memory mapping" in ended.stderr:
            pytest.skip("ThreadSanitizer does not know this kernel's layout of addresses")
        assert ended.stdout == "done\n", ended.stderr[-3000:]
