"""The native workers of file tiers, whose calls a test sees and may have fail: that of slabs, with their records
(hooked_worker.c), and that of row files (hooked_files.c)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_tiers.base import native
from nixl_tiers.tiers.rowfile import worker as files_worker
from nixl_tiers.tiers.slab import journal, worker
from tests.support.compiled import CSRC

WRITE, FLUSH, ROW_WRITE, CUT = range(4)
DONE: Final = -100000
SlabHook = Callable[[int, int, bytes, int], int]
"""What is about to be written: WRITE of the records, FLUSH, ROW_WRITE, or CUT (to a size); the descriptor, the bytes,
and where. Returns 0, or the errno with which it fails."""
FilesHook = Callable[[str, int, str, int], int]
"""What is about to be called, with which descriptor, name and flags. Returns 0; an errno with which it fails; that
negative, if it fails once it has done what it is to do; or DONE, if the hook has done it."""
_SLABS: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
)
_FILES: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)


def build(folder: Path, name: str) -> str:
    """Path of the library, compiled into `folder`. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    path, source = folder / "hooked.so", Path(__file__).with_name(f"{name}.c")
    flags = ["-O1", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, "-o", path, source, "-lpthread"], check=True)
    return str(path)


@contextmanager
def slab_writes(path: str, hook: SlabHook) -> Iterator[ctypes.CDLL]:
    """In place of the package's library; closed by then is what was opened within."""

    def call(what: int, descriptor: int, address: int | None, nbytes: int, at: int) -> int:
        return hook(what, descriptor, ctypes.string_at(address, nbytes) if address else b"", at)

    with _installed(path, _SLABS(call), "ROW_WORKER", journal._library, worker._library) as library:
        yield library


@contextmanager
def files_calls(path: str, hook: FilesHook) -> Iterator[ctypes.CDLL]:
    """As `slab_writes`."""

    def call(what: bytes, descriptor: int, name: bytes, flags: int) -> int:
        return hook(what.decode(), descriptor, name.decode(), flags)

    with _installed(path, _FILES(call), "ROW_FILES", files_worker._library) as library:
        yield library


@contextmanager
def _installed(path: str, hook: Any, name: str, *loaders: Any) -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(path)
    library.nixl_tiers_hook(hook)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, name, getattr(native, name)._replace(path=path))
        for loader in loaders:
            loader.cache_clear()
        try:
            yield library
        finally:
            library.nixl_tiers_hook(None)
            for loader in loaders:
                loader.cache_clear()
