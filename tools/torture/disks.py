"""File systems with faults, for all sides alike: a small one in an image, and a FUSE pass-through. Both need root."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.torture.sides import CACHE

ROOT: Final = Path(__file__).resolve().parents[2]
MODULES: Final = CACHE / "fuse"
MOUNT_S: Final = 30.0


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A mounted ext4 of that size, without a journal or reserved blocks."""
    image, place = folder / "image", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(mebibytes << 20)
    run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image)
    run("mount", "-o", "loop", image, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
        image.unlink()


class PassThrough:
    """A folder seen through FUSE."""

    def __init__(self, folder: Path) -> None:
        self.place, self._control = folder / "mounted", folder / "control"
        for made in (self.place, folder / "behind"):
            made.mkdir()
        self.let("none")
        paths = os.pathsep.join([str(ROOT), str(MODULES), os.environ.get("PYTHONPATH", "")])
        with (folder / "fuse.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.torture.fuse", str(folder / "behind"), str(self.place), self._control],
                env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        until = time.monotonic() + MOUNT_S
        while not os.path.ismount(self.place):  # Path.is_mount resolves, which may hang
            if self._process.poll() is not None or time.monotonic() > until:
                raise OSError(errno.EIO, f"FUSE: {(folder / 'fuse.log').read_text()[-300:]}")
            time.sleep(0.05)

    def let(self, fault: str) -> None:
        """`eio`: every tenth write fails; `hang`: no call returns; `none`."""
        draft = self._control.with_suffix(".new")
        draft.write_text(fault)
        draft.rename(self._control)

    def met(self) -> int:
        """How many calls had a fault."""
        file = self._control.with_suffix(".met")
        return file.stat().st_size if file.exists() else 0

    def close(self) -> None:
        """What hangs in it gets errors: its server is gone."""
        self.let("none")
        self._process.kill()
        self._process.wait()
        subprocess.run(["umount", "-l", str(self.place)], check=False, capture_output=True)


def lacking() -> str:
    """What the cells with FUSE lack here; empty: nothing."""
    if os.geteuid() or not Path("/dev/fuse").exists() or not shutil.which("fusermount3"):
        return "needs root, /dev/fuse and fuse3"
    return "" if (MODULES / "mfusepy.py").exists() else "needs mfusepy"
