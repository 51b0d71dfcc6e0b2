"""The swap's kernels on one GPU: built with the package, else compiled here and kept on disk, else none.

Sources are in csrc/ of a checkout, and beside this file in an installed package, where the build leaves a fatbin too.
An image is named after a digest of the sources it was made from: a stale one is never used. `Nvrtc` is NVIDIA's
run-time compiler through ctypes, which makes machine code without nvcc and without a driver.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from nixl_tiers.base.cache import cache_folder, write_whole
from nixl_tiers.swap.driver import CudaError, Device

log = logging.getLogger(__name__)

SOURCE: Final = "swap.cu"
HEADERS: Final = ("swap.h",)
THREADS: Final = 256  # WARPS * WARP of swap.cu
CAPACITIES: Final = (480, 3968)  # pairs that fit into a launch's parameters, small and large
MIN_CAPABILITY: Final = (8, 0)  # the oldest that setup.py builds for

_HERE: Final = Path(__file__).parent
_PLACES: Final = (_HERE / "csrc", _HERE.parents[1] / "csrc")


@dataclass(frozen=True)
class Kernels:
    """Functions by capacity. `origin` says where they came from, for logs."""

    origin: str
    module: int
    stage: dict[int, int]


def load(device: Device) -> Kernels | None:
    """The kernels, loaded into the device's context; None, with the reason logged, if there are none."""
    capability = device.capability
    if capability < MIN_CAPABILITY:
        log.info(
            "nixl_tiers: no swap kernels for compute capability %d.%d, the copy engine copies everything", *capability
        )
        return None
    arch = "sm_{}{}".format(*capability)
    reasons = []
    for origin, image in images(arch, device.driver.version // 1000):
        try:
            return _loaded(device, origin, image())
        except (CudaError, CompileError, OSError) as error:
            reasons.append(f"{origin}: {error}")
    log.warning(
        "nixl_tiers: no swap kernels, the copy engine copies everything (%s)", "; ".join(reasons) or "no source"
    )
    return None


def images(arch: str, driver_major: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Where an image for `arch` may come from, best first: what to call it, and how to get it. `driver_major`: 13 for
    a driver of CUDA 13."""
    digest = source_digest()
    if digest is None:
        return
    built = _HERE / fatbin_name(digest)
    if built.exists():
        yield "built with the package", built.read_bytes
    compiler = open_nvrtc(newest=driver_major)
    if compiler is not None:
        yield (
            "compiled by NVRTC {}.{}".format(*compiler.version),
            lambda: compile_cached(compiler, arch, cache_folder()),
        )


def compile_cached(compiler: Nvrtc, arch: str, folder: Path | None) -> bytes:
    """The image for `arch` out of `folder`, or compiled and left there, if there is one. Raises CompileError."""
    texts = sources()
    if texts is None:
        raise CompileError("the kernels' source is not installed")
    cached = folder and folder / "swap-{}-{}-nvrtc{}.{}.cubin".format(source_digest(), arch, *compiler.version)
    if cached:
        with contextlib.suppress(OSError):
            image = cached.read_bytes()
            body, seal = image[:-32], image[-32:]
            if hashlib.sha256(body).digest() == seal:
                return body
    body = compiler.compile(texts[SOURCE], {name: texts[name] for name in HEADERS}, arch)
    if cached:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a fifth of a second at every start
            write_whole(cached, body + hashlib.sha256(body).digest())
    return body


def fatbin_name(digest: str) -> str:
    """What the build calls the image of these sources (setup.py computes the same)."""
    return f"_swap-{digest}.fatbin"


@cache
def sources() -> dict[str, str] | None:
    """The kernels' files by name, or None where they are not installed."""
    for place in _PLACES:
        with contextlib.suppress(OSError):
            return {name: (place / name).read_text() for name in (*HEADERS, SOURCE)}
    return None


@cache
def source_digest() -> str | None:
    texts = sources()
    return digest_of(texts) if texts else None


def digest_of(texts: dict[str, str]) -> str:
    """16 hex digits over the files' contents, in the order of their names."""
    return hashlib.sha256("\0".join(texts[name] for name in sorted(texts)).encode()).hexdigest()[:16]


def _loaded(device: Device, origin: str, image: bytes) -> Kernels:
    with device.current() as driver:
        module = driver.load_module(image)
        try:
            stage = {n: driver.function(module, f"nixl_tiers_stage_{n}") for n in CAPACITIES}
        except CudaError:
            driver.unload_module(module)
            raise
    return Kernels(origin, module, stage)


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
