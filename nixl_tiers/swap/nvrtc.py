"""NVIDIA's run-time compiler through ctypes: machine code for a GPU without nvcc, and without a driver."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("libnvrtc.so.13", "libnvrtc.so.12")
_WHEELS: Final = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")  # where NVIDIA's wheels of either generation put it


class CompileError(RuntimeError):
    """The compiler refused; the message ends with what it said."""


@cache
def open_nvrtc(path: str | None = None, newest: int | None = None) -> Nvrtc | None:
    """The compiler at `path`, else NVIDIA's wheel's, else the system's; None where there is none.

    `newest`: the major version of the driver, which takes nothing that a compiler of a later one has made.
    """
    for candidate in [path] if path else _candidates():
        try:
            found = Nvrtc(ctypes.CDLL(candidate))
        except (OSError, AttributeError, CompileError):
            continue
        if newest is None or found.version[0] <= newest:
            return found
    return None


def _candidates() -> list[str]:
    spec = find_spec("nvidia")
    roots = [Path(place).parent for place in (spec and spec.submodule_search_locations) or ()]
    found = [root / folder / name for root in roots for folder in _WHEELS for name in NAMES]
    return [*(str(library) for library in found if library.exists()), *NAMES]


class Nvrtc:
    """`version`: (major, minor)."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def architectures(self) -> list[int]:
        """What it compiles for, ascending: 90 for sm_90."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", self._library.nvrtcGetSupportedArchs(found))
        return sorted(found)

    def compile(self, source: str, headers: dict[str, str], arch: str) -> bytes:
        """Machine code for `arch` ("sm_90"); for a GPU that is newer than the compiler PTX of the newest architecture
        that it knows, which the driver translates. Raises CompileError."""
        library, program = self._library, ctypes.c_void_p()
        number = int(arch.removeprefix("sm_"))
        older = [known for known in self.architectures() if known <= number]
        if not older:
            raise CompileError(f"NVRTC {self.version[0]}.{self.version[1]} does not know {arch} or anything before it")
        exact = older[-1] == number
        target = arch if exact else f"compute_{older[-1]}"
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        created = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"swap.cu", len(headers), texts, names
        )
        self._check("nvrtcCreateProgram", created)
        try:
            options = (ctypes.c_char_p * 2)(f"--gpu-architecture={target}".encode(), b"--std=c++17")
            if library.nvrtcCompileProgram(program, len(options), options):
                raise CompileError(f"NVRTC cannot compile for {target}: {self._log(program)}")
            kind, size = "CUBIN" if exact else "PTX", ctypes.c_size_t()
            self._check(f"nvrtcGet{kind}Size", getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
            image = ctypes.create_string_buffer(size.value)
            self._check(f"nvrtcGet{kind}", getattr(library, f"nvrtcGet{kind}")(program, image))
            return image.raw
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _log(self, program: Any) -> str:
        size = ctypes.c_size_t()
        if self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or not size.value:
            return "no log"
        text = ctypes.create_string_buffer(size.value)
        self._library.nvrtcGetProgramLog(program, text)
        return text.value.decode(errors="replace").strip()

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise CompileError(f"{call} failed with code {code}")
