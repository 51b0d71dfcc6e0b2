"""What GPUDirect Storage does in a directory, decided from what children found: native, compatibility, unavailable.

cuFile falls back to ordinary I/O without a word, so that it works proves nothing. "native" takes two witnesses that
agree: the driver says that it has a direct way, and counters say that every transfer of the test took it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from nixl_tiers.cli.children import Step

_P2P_FEATURE: Final = 1 << 4  # CU_FILE_P2P_SUPPORTED in the feature flags
_P2PDMA_FLAG: Final = 1 << 0  # CUFILE_P2PDMA in the flags of a kind of storage
_DIRECTIONS: Final = ("reads", "writes")

INSTALL: Final = "install the package nvidia-cufile-cu12 (CUDA 12) or nvidia-cufile (CUDA 13), or NVIDIA's gds package"

Counters = dict[str, int]


class Kind(StrEnum):
    NATIVE = "native"
    COMPATIBILITY = "compatibility"
    UNAVAILABLE = "unavailable"


EXIT_CODES: Final = {Kind.NATIVE: 0, Kind.COMPATIBILITY: 3, Kind.UNAVAILABLE: 4}


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    reason: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Probes:
    """Steps that were run; None was not, because an earlier one failed or there is no GPU."""

    gpus: Step
    library: Step
    driver: Step | None = None
    host: Step | None = None
    allocated: Step | None = None
    """Memory of the GPU from cuMemAlloc."""
    mapped: Step | None = None
    """Memory of the GPU from cuMemCreate."""
    plugin: Step | None = None
    plugin_path: str = ""
    """What LD_LIBRARY_PATH must begin with for the plugin to open, if it does not open without."""


def decide(probes: Probes) -> Verdict:
    """The plugin counts too: cuFile is of no use to a tier without it."""
    verdict = _of_cufile(probes)
    if verdict.kind is Kind.UNAVAILABLE or probes.plugin is None or not probes.plugin.error:
        return verdict
    why = f"the plugin opens only with LD_LIBRARY_PATH={probes.plugin_path}"
    return Verdict(
        Kind.UNAVAILABLE,
        f"{why if probes.plugin_path else probes.plugin.error} (cuFile without NIXL: {verdict})",
    )


def claimed_way(driver: Step) -> str:
    """The direct way that cuFile's driver says it has: "nvidia-fs", "PCI P2PDMA" or ""."""
    said = driver.get("driver") or {}
    if said.get("force_compat_mode"):
        return ""
    if said.get("nvidia_fs"):
        return "nvidia-fs"
    p2p = (said.get("feature_flags") or 0) & _P2P_FEATURE or (said.get("nvme_p2p_flags") or 0) & _P2PDMA_FLAG
    return "PCI P2PDMA" if p2p else ""


def not_direct(step: Step, way: str) -> str:
    """Why counters do not show that all transfers of a step were direct, or ""."""
    transfers = step.get("transfers") or 0
    before, after = (step.get(when) or {} for when in ("before", "after"))
    counted = _difference(before.get("cufile"), after.get("cufile"))
    if counted is not None:
        direct = {d: counted[f"nvfs_{d}"] + counted[f"p2p_{d}"] for d in _DIRECTIONS}
        posix = sum(counted[f"posix_{d}"] for d in _DIRECTIONS)
        if transfers and not posix and all(count >= transfers for count in direct.values()):
            return ""
        return (
            f"of {transfers} reads and {transfers} writes cuFile's statistics count {direct['reads']} and "
            f"{direct['writes']} as direct, and {posix} as POSIX"
        )
    if way != "nvidia-fs":
        return "this cuFile has no statistics of its GPUs, and nothing else counts P2PDMA"
    machine = _difference(before.get("nvidia_fs"), after.get("nvidia_fs"))
    if machine is None:
        return "neither cuFile nor nvidia-fs counts (set rw_stats_enabled=1 for the module nvidia_fs)"
    if transfers and all(machine[direction] >= transfers for direction in _DIRECTIONS):
        return ""
    return (
        f"of {transfers} reads and {transfers} writes nvidia-fs counts {machine['reads']} and {machine['writes']}, for "
        "the whole machine"
    )


def _of_cufile(probes: Probes) -> Verdict:
    if wrong := _wrong_bytes(probes):
        return Verdict(Kind.UNAVAILABLE, wrong)
    if probes.library.error:
        return Verdict(Kind.UNAVAILABLE, f"libcufile cannot be loaded: {probes.library.error}; {INSTALL}")
    if probes.driver is None or probes.driver.error:
        error = probes.driver.error if probes.driver else "cuFile's driver was not opened"
        return Verdict(Kind.UNAVAILABLE, error)
    if probes.allocated is None:
        if probes.host is None or probes.host.error:
            return Verdict(Kind.UNAVAILABLE, probes.host.error if probes.host else "nothing was written")
        return Verdict(Kind.COMPATIBILITY, "host memory only, as there is no GPU")
    if probes.allocated.error:
        return Verdict(Kind.UNAVAILABLE, f"GPU memory: {probes.allocated.error}")
    way = claimed_way(probes.driver)
    if not way:
        forced = (probes.driver.get("driver") or {}).get("force_compat_mode")
        why = "the configuration forces it" if forced else "cuFile finds neither nvidia-fs nor PCI P2PDMA"
        return Verdict(Kind.COMPATIBILITY, f"{why}; bytes go through host memory")
    if missing := not_direct(probes.allocated, way):
        return Verdict(Kind.COMPATIBILITY, f"cuFile says {way}, but {missing}")
    return Verdict(Kind.NATIVE, f"{way}, and its counters show every transfer")


def _wrong_bytes(probes: Probes) -> str:
    steps = (probes.host, probes.allocated, probes.mapped)
    return next((step.error for step in steps if step and step.error.startswith("wrong bytes")), "")


def _difference(before: Counters | None, after: Any) -> Counters | None:
    """None where nothing was counted. Counters that appear with the first transfer began at zero."""
    if not after or any(value is None for value in after.values()):
        return None
    return {name: value - ((before or {}).get(name) or 0) for name, value in after.items()}
