"""The native worker of row files, whose calls a test sees and may have fail (hooked_files.c)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from nixl_tiers.base import native
from nixl_tiers.tiers.rowfile import worker
from tests.support.compiled import CSRC

DONE: Final = -100000
Hook = Callable[[str, int, str, int], int]
"""What is about to be called, with which descriptor, name and flags. Returns 0; an errno with which it fails; that
negative, if it fails once it has done what it is to do; or DONE, if the hook has done it."""
_HOOK: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)


def build(folder: Path) -> str:
    """Path of the library, compiled into `folder`. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    path, source = folder / "hooked.so", Path(__file__).with_suffix(".c")
    flags = ["-O1", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, "-o", path, source, "-lpthread"], check=True)
    return str(path)


@contextmanager
def installed(path: str, hook: Hook) -> Iterator[None]:
    """In place of the package's library; closed by then is what was opened within."""

    def call(what: bytes, descriptor: int, name: bytes, flags: int) -> int:
        return hook(what.decode(), descriptor, name.decode(), flags)

    kept, library = _HOOK(call), ctypes.CDLL(path)
    library.nixl_tiers_hook(kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "ROW_FILES", native.ROW_FILES._replace(path=path))
        worker._library.cache_clear()
        try:
            yield
        finally:
            library.nixl_tiers_hook(None)
            worker._library.cache_clear()
