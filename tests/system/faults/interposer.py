"""Builds interpose.c, and controls through a shared page which faults it injects."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

FIELDS: Final = ("write_errno", "read_errno", "change_errno", "delay_us", "clock_offset_s", "injected")


def build(directory: Path) -> Path:
    """The shared object, in `directory`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "the tests of a failing disk need a C compiler"
    library = directory / "interpose.so"
    source = Path(__file__).with_name("interpose.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


class Interposer:
    """Injects faults into the I/O below `path` of the processes that are started with `env`."""

    def __init__(self, library: Path, directory: Path, path: Path) -> None:
        page = directory / "control"
        page.write_bytes(bytes(4096))
        self.env = {"LD_PRELOAD": str(library), "FAULT_CONTROL": str(page), "FAULT_PATH": str(path)}
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 4096)

    def inject(self, **fields: int) -> None:
        """Instead of what was injected before; nothing without fields."""
        for number, name in enumerate(FIELDS[:-1]):
            struct.pack_into("q", self._page, 8 * number, fields.get(name, 0))

    @property
    def injected(self) -> int:
        """How many calls have failed or been given a shifted time."""
        value: int = struct.unpack_from("q", self._page, 8 * FIELDS.index("injected"))[0]
        return value

    def close(self) -> None:
        self.inject()
        self._page.close()
