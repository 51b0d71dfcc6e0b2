"""The native table of rows under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.compiled import CSRC, sanitizer_flags

_WALK = """
import importlib.util, random, sys
spec = importlib.util.spec_from_file_location("_tier_rows", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
draw, rows = random.Random(int(sys.argv[2])), module.TierRows(64)
keys = [draw.randbytes(draw.choice((1, 36, 37, 112, 255))) for _ in range(40_000)]
taken = bytearray(70_000)
assert all([rows.add(b"first %d" % number, number, 0, True) for number in range(9)]), "0 is no row's id"
for step in range(20_000):
    key = keys[draw.randrange(min(len(keys), 200 + 2 * step))]
    match draw.randrange(16):
        case 0 | 1 | 2 | 3: rows.add(key, draw.randrange(70_000), draw.randrange(step + 1), draw.random() < 0.9)
        case 4: rows.has_many(draw.choices(keys, k=50), True)
        case 5: rows.touch_many(draw.choices(keys, k=20), step)
        case 6: rows.evict(draw.randrange(4))
        case 7: rows.select(draw.randrange(3))
        case 8: rows.cancel(key, draw.choice((0, step)))
        case 9: rows.remove(key, 0)
        case 10:
            if pinned := rows.pin(key): rows.unpin(key, pinned[1])
        case 11: rows.take_used(draw.randrange(9))
        case 12:
            if draw.random() < 0.1: rows.begin_listing()
            rows.sweep(draw.randrange(50_000), 64, 70_000, 0, 70_000)
        case 13:  # as a mover that is not trusted may send them
            slots, ticks, records = (draw.randbytes(size) for size in (4 * 32, 8 * 32, 32 * 41))
            rows.list_columns(slots, ticks, records, 41, 0, 32, draw.choice((taken, None)), 70_000)
        case 14: rows.pin_many(draw.choices(keys, k=4) if draw.random() < 0.5 else rows.select(2))
        case 15:
            rows.unpin_many(draw.choices(keys, k=50))
            rows.stored_many(draw.choices(keys, k=4))
            if draw.random() < 0.05: rows.cancel_all()
left = len(rows)
del rows
print("done", left)
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native table with AddressSanitizer and UBSan."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").is_file():
        pytest.skip("no headers of Python here")
    library = tmp_path_factory.mktemp("sanitized") / "_tier_rows.so"
    flags = [*sanitizer_flags(compiler, library.parent), "-std=c11", "-shared", "-fPIC"]
    source = library.with_suffix(".c")  # where a process is that has taken nearly all numbers that ids can be
    source.write_text(
        f'#include "{CSRC / "tier_rows.c"}"\n'
        "__attribute__((constructor)) static void late(void) { last_id = UINT32_MAX - 4; }\n"
    )
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, f"-I{include}", *warnings, "-o", str(library), str(source)], check=True)
    return library


@pytest.mark.parametrize("seed", [1, 2])
def test_native_table_under_sanitizers(seed: int, sanitized: Path) -> None:
    """Whatever is called, and whatever a mover lists."""
    preload = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = os.environ | {"LD_PRELOAD": preload.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0"}
    walk = [sys.executable, "-c", _WALK, str(sanitized), str(seed)]
    ended = subprocess.run(walk, check=False, capture_output=True, text=True, env=environment)
    assert ended.stdout.startswith("done"), ended.stderr[-3000:]
