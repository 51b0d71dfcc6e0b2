"""The machine that a bench runs on, for its output."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path


def machine() -> dict[str, object]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": cpu[1] if cpu else platform.machine(),
        "processors": os.cpu_count(),
        "memory_gib": round(memory / (1 << 30)),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def gpu() -> str:
    """Name, driver version and memory of the first GPU; "" without one."""
    return _first_line("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")


def file_system(path: Path) -> str:
    """Device and type of the file system that `path` lies on; "" where `findmnt` is missing."""
    return _first_line("findmnt", "--noheadings", "--output", "SOURCE,FSTYPE", "--target", str(path))


def drives() -> list[str]:
    """Name, size and model of each; empty where `lsblk` is missing."""
    return _lines("lsblk", "--nodeps", "--noheadings", "--output", "NAME,SIZE,MODEL")


def _first_line(*command: str) -> str:
    return next(iter(_lines(*command)), "")


def _lines(*command: str) -> list[str]:
    """Of what the command prints, without needless spaces; none where it is missing, or fails."""
    if not shutil.which(command[0]):
        return []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [" ".join(line.split()) for line in done.stdout.splitlines()] if done.returncode == 0 else []
