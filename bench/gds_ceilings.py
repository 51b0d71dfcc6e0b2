"""What other programs reach on the same disk: fio into host memory, and NVIDIA's gdsio into GPU memory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

GDSIO: Final = "/usr/local/cuda/gds/tools/gdsio"
FIO_MISSING: Final = "fio is not installed (apt install fio)"
GDSIO_MISSING: Final = f"{GDSIO} is not installed (it comes with the package gds-tools)"
_PATIENCE_S: Final = 60.0

Ceiling = dict[str, Any]  # gb_per_s with p50_ms and p99_ms, or unavailable: a sentence


def fio(file: Path, row_bytes: int, depth: int, seconds: float) -> Ceiling:
    """Random reads with O_DIRECT and libaio from an existing file."""
    program = shutil.which("fio")
    if program is None:
        return {"unavailable": FIO_MISSING}
    return _run(
        [
            *(program, "--name=ceiling", f"--filename={file}", "--rw=randread", "--direct=1", "--ioengine=libaio"),
            *(f"--bs={row_bytes}", f"--iodepth={depth}", f"--size={file.stat().st_size}", "--time_based"),
            *(f"--runtime={max(1, round(seconds))}", "--output-format=json", "--invalidate=1", "--norandommap"),
        ],
        parse_fio,
    )


def gdsio(file: Path, row_bytes: int, depth: int, seconds: float, gpu: int) -> Ceiling:
    """Sequential reads by `depth` threads straight into GPU memory (its transfer type 0)."""
    program = shutil.which("gdsio") or (GDSIO if Path(GDSIO).exists() else None)
    if program is None:
        return {"unavailable": GDSIO_MISSING}
    size = file.stat().st_size // depth // row_bytes * row_bytes
    return _run(
        [
            *(program, "-f", str(file), "-d", str(gpu), "-w", str(depth), "-s", str(max(size, row_bytes))),
            *("-i", str(row_bytes), "-x", "0", "-I", "0", "-T", str(max(1, round(seconds)))),
        ],
        parse_gdsio,
    )


def parse_fio(text: str) -> Ceiling:
    """Of its JSON, which may stand behind warnings. ValueError, KeyError."""
    read = json.loads(text[text.index("{") :])["jobs"][0]["read"]
    percentiles = read["clat_ns"]["percentile"]
    return {
        "gb_per_s": read["bw_bytes"] / 1e9,
        "p50_ms": percentiles["50.000000"] / 1e6,
        "p99_ms": percentiles["99.000000"] / 1e6,
    }


def parse_gdsio(text: str) -> Ceiling:
    """Of "... Throughput: 3.07 GiB/sec, Avg_Latency: 5083.3 usecs ops: ...". ValueError."""
    found = re.search(r"Throughput: ([\d.]+) GiB/sec, Avg_Latency: ([\d.]+) usecs", text)
    if not found:
        raise ValueError(text.strip().splitlines()[-1] if text.strip() else "it printed nothing")
    return {"gb_per_s": float(found[1]) * (1 << 30) / 1e9, "average_ms": float(found[2]) / 1e3}


def _run(command: Sequence[str], parse: Any) -> Ceiling:
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unavailable": f"{name}: {error}"}
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {"unavailable": f"{name} ended with {done.returncode}: {lines[-1] if lines else 'it says nothing'}"}
    try:
        found: Ceiling = parse(done.stdout)
    except (ValueError, KeyError, IndexError) as error:
        return {"unavailable": f"the output of {name} is not understood: {error}"}
    return found
