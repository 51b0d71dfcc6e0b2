"""The native worker's C by itself: with sanitizers, and all lengths that XXH3 knows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from xxhash import xxh3_64_digest, xxh3_128_digest

from tests.support.compiled import CSRC, sanitizer_flags


def test_hashes_of_every_length_are_those_of_xxhash(tmp_path: Path) -> None:
    """All paths of XXH3, of which a row's shape takes few."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    source = tmp_path / "all.c"
    source.write_text(
        '#include <stdio.h>\n#include <stddef.h>\n#include "pieces.h"\nint main(void) {\n'
        "  static uint8_t data[3000]; size_t n = fread(data, 1, sizeof data, stdin);\n"
        "  for (size_t i = 1; i <= n; i++) {\n"
        "    hash128 h = i < 4 ? (hash128){0, 0} : xxh3_128(data, i); uint64_t fast = 0;\n"
        "    size_t done = fast_pieces(NULL, data, i, 1 << 16, &fast); fast = __builtin_bswap64(fast);\n"
        "    if (done && fast != xxh3_64(data, i)) return 1;\n"
        '    printf("%016lx %016lx%016lx\\n", xxh3_64(data, i), h.high, h.low); }\n}\n'
    )
    program = tmp_path / "all"
    subprocess.run([compiler, "-O2", f"-I{CSRC}", "-o", program, source], check=True)
    data = np.random.default_rng(1).bytes(3000)
    lines = subprocess.run([program], input=data, capture_output=True, check=True).stdout.decode().splitlines()
    assert len(lines) == 3000
    for size, line in enumerate(lines, 1):
        short, long = line.split()
        assert short == xxh3_64_digest(data[:size]).hex(), size
        assert size < 4 or long == xxh3_128_digest(data[:size]).hex(), size


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
        ended = subprocess.run([program, tmp_path / "rows", seed], check=False, capture_output=True, text=True)
        if "unexpected memory mapping" in ended.stderr:
            pytest.skip("ThreadSanitizer does not know this kernel's layout of addresses")
        assert ended.stdout == "done\n", ended.stderr[-3000:]
