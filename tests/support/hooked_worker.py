"""The native worker and the records of slabs, whose writes a test sees and may refuse (hooked_worker.c), also with bugs
planted in the C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from nixl_tiers.base import native
from nixl_tiers.tiers.slab import journal, worker
from tests.support.compiled import CSRC

WRITE, FLUSH, ROW_WRITE, CUT = range(4)
Hook = Callable[[int, int, bytes, int], int]
"""What is about to be written: WRITE of the records, FLUSH, ROW_WRITE, or CUT (to a size); the descriptor, the bytes,
and where. Returns 0, or the errno with which it fails."""
_HOOK: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
)


def build(folder: Path, bugs: Mapping[str, str] | None = None) -> str:
    """Path of the library, compiled into `folder`. `bugs`: what to write in place of what stands once in csrc/. Skips
    without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    sources = {path.name: path.read_text() for path in (*CSRC.glob("*.h"), CSRC / "row_worker.c")}
    for right, wrong in (bugs or {}).items():
        (name,) = [name for name, text in sources.items() if right in text]
        assert sources[name].count(right) == 1, right
        sources[name] = sources[name].replace(right, wrong)
    folder.mkdir(exist_ok=True)
    for name, text in sources.items():
        (folder / name).write_text(text)
    path, source = folder / "hooked.so", Path(__file__).with_suffix(".c")
    flags = ["-O1", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-shared", "-fPIC", f"-I{folder}"]
    subprocess.run([compiler, *flags, "-o", path, source, "-lpthread"], check=True)
    return str(path)


@contextmanager
def installed(path: str, hook: Hook) -> Iterator[ctypes.CDLL]:
    """In place of the package's library; closed by then is what was opened within."""

    def call(what: int, descriptor: int, address: int | None, nbytes: int, at: int) -> int:
        return hook(what, descriptor, ctypes.string_at(address, nbytes) if address else b"", at)

    kept, library = _HOOK(call), ctypes.CDLL(path)
    library.nixl_tiers_hook(kept)
    loaders = (journal._library, worker._library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "ROW_WORKER", native.ROW_WORKER._replace(path=path))
        for loader in loaders:
            loader.cache_clear()
        try:
            yield library
        finally:
            library.nixl_tiers_hook(None)
            for loader in loaders:
                loader.cache_clear()
