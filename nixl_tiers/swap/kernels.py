"""The swap's kernels on one GPU: built with the package, else compiled here and kept on disk, else none.

Sources are in csrc/ of a checkout, and beside this file in an installed package, where the build leaves a fatbin too.
An image is named after a digest of the sources it was made from: a stale one is never used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from nixl_tiers.swap.cache import cache_folder, write_whole
from nixl_tiers.swap.driver import CudaError, Device
from nixl_tiers.swap.nvrtc import CompileError, Nvrtc, open_nvrtc

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
