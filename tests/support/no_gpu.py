"""NVIDIA's cuFile and NIXL's GDS_MT plugin, the real ones, in a process on a machine without a GPU.

cuFile has a compatibility mode, which moves the bytes with pread and pwrite and needs neither a GPU nor nvidia-fs. So
everything of `backend: gds_mt` runs but the DMA. What a process needs for it is in its environment before it starts, so
that these tests have child processes: movers, or a pytest of their own.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

LABEL: Final = "cuFile compatibility mode, no GPU: says nothing about GPU-direct speed"
NEEDED: Final = {"nvidia-cufile": "libcufile.so.0", "nvidia-cuda-runtime-cu12": "libcudart.so.12"}
"""Wheel -> the library of it that NIXL's plugin for CUDA 12 is linked against."""


class NoCuFileError(Exception):
    """One sentence: what is missing here."""


def libraries() -> list[Path]:
    """The folders of the libraries that the plugin is linked against. Raises NoCuFileError."""
    folders = []
    for wheel, name in NEEDED.items():
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        found = [file for file in files if file.name == name]
        if not found:
            raise NoCuFileError(f"needs {name} of the wheel {wheel} (of the group dev in pyproject.toml)")
        folders.append(Path(str(found[0].locate())).parent)
    return folders


def build(folder: Path) -> Path:
    """no_gpu.c as a library in `folder`. Raises NoCuFileError."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCuFileError("needs a C compiler")
    library = folder / "no_gpu.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).with_name("no_gpu.c")
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return library


@dataclass(frozen=True)
class NoGpu:
    """What a process needs to run cuFile here."""

    preload: Path
    libraries: Sequence[Path]
    folder: Path
    """Of its own, for the configuration, the log and what cuFile shall see of /proc/modules and /run/udev."""

    def environment(
        self, place: Path, *, udev: bool = True, modules: bool = True, cuda: Path | None = None
    ) -> dict[str, str]:
        """Variables of the child process, beside the ones that this process has. Without `udev` no block device has a
        udev record, as in containers that lack /run/udev. Without `modules` cuFileDriverOpen never returns.

        `place`: a directory on the file system that cuFile shall take files of. `cuda`: a folder with the fake driver.
        """
        configuration = self.folder / "cufile.json"
        configuration.write_text(json.dumps(CONFIGURATION | {"logging": {"dir": str(self.folder), "level": "ERROR"}}))
        (self.folder / "modules").write_text("")
        self._records.mkdir(parents=True, exist_ok=True)
        if udev:
            self.record(place)
        return {
            "LD_PRELOAD": _before(self.preload, os.environ.get("LD_PRELOAD", "")),
            "LD_LIBRARY_PATH": _before(cuda or "", *self.libraries, os.environ.get("LD_LIBRARY_PATH", "")),
            "CUFILE_ENV_PATH_JSON": str(configuration),
            "CUFILE_FORCE_COMPAT_MODE": "true",  # also where there is a GPU
            "NO_GPU_PROC_MODULES": str(self.folder / ("modules" if modules else "missing")),
            "NO_GPU_RUN_UDEV": str(self._records.parent),
        }

    def record(self, place: Path) -> None:
        """From here on the block device below `place` has a udev record, with what cuFile asks of it."""
        device = place.stat().st_dev
        kind = "xfs" if _file_system(place) == "xfs" else "ext4"
        record = f"E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE={kind}\n"
        (self._records / f"b{os.major(device)}:{os.minor(device)}").write_text(record)

    def log(self) -> str:
        """What cuFile has logged in all processes so far."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("cufile*.log")))

    @property
    def _records(self) -> Path:
        return self.folder / "udev" / "data"


CONFIGURATION: Final = {
    "profile": {"cufile_stats": 1},  # the counters below
    "properties": {"allow_compat_mode": True},
}


def _before(*first: Path | str) -> str:
    return os.pathsep.join(str(part) for part in first if str(part))


def _file_system(place: Path) -> str:
    """The type of the file system at `place`, as /proc/mounts has it."""
    real = place.resolve()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    over = [(len(point), kind) for _, point, kind, *_ in mounts if real.is_relative_to(point)]
    return max(over)[1]


# --- cuFile's own statistics ------------------------------------------------------------------------------------------


class Counters(NamedTuple):
    """What cuFile says that this process has moved through it, in bytes."""

    read: int
    written: int


def counters() -> Counters:
    """Of this process, since NIXL's plugin opened cuFile's driver. Zeros while no agent holds it open."""
    library = ctypes.CDLL("libcufile.so.0")  # the one that is loaded: by its name, not by a path
    level_1 = (ctypes.c_uint64 * 512)()  # CUfileStatsLevel1_t, with room for what newer versions append
    if library.cuFileGetStatsL1(level_1):
        return Counters(0, 0)
    return Counters(level_1[12], level_1[13])  # behind six pairs of (good, failed) calls


def bypassed(before: Counters, after: Counters, least: Counters, most: Counters) -> str:
    """One sentence if cuFile has counted less than the transfers that ended well (`least`), or more than all that were
    begun (`most`); else "". Bytes that it has not counted went another way."""
    for name in Counters._fields:
        counted = getattr(after, name) - getattr(before, name)
        if not getattr(least, name) <= counted <= getattr(most, name):
            return f"cuFile's own statistics have {counted} bytes {name}, NIXL's transfers {getattr(least, name)}"
    return ""
