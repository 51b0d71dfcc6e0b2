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
def open_nvrtc(path: str | None = None) -> Nvrtc | None:
    """The compiler at `path`, else NVIDIA's wheel's, else the system's; None where there is none."""
    for candidate in [path] if path else _candidates():
        try:
            return Nvrtc(ctypes.CDLL(candidate))
        except (OSError, AttributeError):
            continue
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

    def compile(self, source: str, headers: dict[str, str], arch: str) -> bytes:
        """Machine code for `arch` ("sm_90"). Raises CompileError, also for an architecture that it does not know."""
        library, program = self._library, ctypes.c_void_p()
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        created = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"swap.cu", len(headers), texts, names
        )
        self._check("nvrtcCreateProgram", created)
        try:
            options = (ctypes.c_char_p * 2)(f"--gpu-architecture={arch}".encode(), b"--std=c++17")
            if library.nvrtcCompileProgram(program, len(options), options):
                raise CompileError(f"NVRTC cannot compile for {arch}: {self._log(program)}")
            size = ctypes.c_size_t()
            self._check("nvrtcGetCUBINSize", library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
            image = ctypes.create_string_buffer(size.value)
            self._check("nvrtcGetCUBIN", library.nvrtcGetCUBIN(program, image))
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
