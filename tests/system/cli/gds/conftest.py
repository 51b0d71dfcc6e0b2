"""A fake CUDA driver with a fake cuFile (fake_gds.c), found by the children of the doctor as the real ones would be."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.cli import children
from tests.support.waiting import until

SLOW_MACHINE_S = 120.0
SPIN_S = 0.5
SOURCE = Path(__file__).parent / "fake_gds.c"


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libcuda.so.1 and libcufile.so.0."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fake_gds")
    library = folder / "libcufile.so.0"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    (folder / "libcuda.so.1").symlink_to(library)
    return folder


class CalledPopen(subprocess.Popen[bytes]):
    """A child whose deadline begins when it has called cuFile, however long it took until then."""

    def __init__(self, *arguments: Any, cwd: Path, **fields: Any) -> None:
        super().__init__(*arguments, cwd=cwd, **fields)
        self._out = cwd / "out"

    def wait(self, timeout: float | None = None) -> int:
        until(lambda: self.poll() is not None or b"cuFileDriverOpen" in self._out.read_bytes(), "a call of cuFile")
        return super().wait(timeout)


@pytest.fixture
def cufile(fake_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets how the fake behaves. NIXL's plugin is as if it had opened: it needs more of cuFile than the fake has."""
    run = children.Children.run

    def behave(how: str) -> None:
        def replaced(self: children.Children, *arguments: str, **_: object) -> children.Step:
            if arguments == ("plugin",):
                return children.Step(({"nixl": "1.5.1"}, {"plugin": "GDS_MT"}), "", 0.0)
            return run(self, *arguments, deadline_s=SPIN_S if how == "spin" else SLOW_MACHINE_S)

        before = os.environ.get("LD_LIBRARY_PATH")
        monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(filter(None, (str(fake_libraries), before))))
        monkeypatch.setenv("FAKE_CUFILE", how)
        monkeypatch.setattr(children.Children, "run", replaced)
        if how == "spin":
            monkeypatch.setattr(subprocess, "Popen", CalledPopen)

    return behave
