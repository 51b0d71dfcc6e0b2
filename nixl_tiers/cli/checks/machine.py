"""What this machine and environment have, whatever the configuration is; and whether its memory is enough for one."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Final

from nixl_tiers.base import native
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.mounts import memory_at
from nixl_tiers.base.policies import HugePages
from nixl_tiers.cli.checks.finding import Finding, advise, broken, not_tried, ok, warning
from nixl_tiers.config.fields import format_size
from nixl_tiers.config.schema import FileConfig, TiersConfig
from nixl_tiers.memory import pages
from nixl_tiers.memory.cgroup import Room, rooms, shortage
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES, advice, hugetlb_rooms, transparent_bytes, transparent_setting
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap import kernels, self_check
from nixl_tiers.swap.driver import CudaError, NoDriver, open_driver

OLDEST_VLLM: Final = (0, 32)
_REGION: Final = Geometry(cells=1, cell_payload=2 << 20)
_ROWS: Final = 32
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_AIO: Final = Path("/proc/sys/fs")
_AIO_ENGINE: Final = 4096  # events that an engine with a few tiers asks for


def examine(config: TiersConfig | None) -> Iterator[Finding]:
    """Starts nothing on a GPU."""
    yield _vllm()
    yield from _libraries()
    yield from _pages(config)
    yield from _memory(config)
    yield from _limits()
    yield from _gpus()


def _vllm() -> Finding:
    names = packages_distributions().get("vllm", [])
    parts = {name: _version(name) for name in ("nixl-tiers", "nixl", "torch")}
    others = ", ".join(f"{name} {found}" for name, found in parts.items() if found)
    if not names:
        change = "install nixl_tiers into the environment of vLLM; `nixl_tiers.open` works without"
        return warning("vLLM", f"is not in this environment ({others})", change, **parts)
    found = _version(names[0])
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if len(numbers) == 2 and numbers < OLDEST_VLLM:
        return broken("vLLM", f"{found} ({others})", "vLLM {}.{} or newer".format(*OLDEST_VLLM), vllm=found, **parts)
    return ok("vLLM", f"{found} ({others})", vllm=found, **parts)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _libraries() -> Iterator[Finding]:
    """Nothing if all are there."""
    try:
        native.require()
    except native.NotBuilt as error:
        yield broken("libraries", f"{error.problem}: no engine would start", native.AGAIN)


def _pages(config: TiersConfig | None) -> Iterator[Finding]:
    """What a region of this process really gets."""
    pool = min(room.free_bytes for room in hugetlb_rooms())
    setting = transparent_setting() or "unknown to this kernel"
    if config is not None and config.cpu.huge_pages is HugePages.HUGETLB:
        text = f"{pool // HUGE_PAGE_BYTES} pages of 2 MiB in the pool are free for this process"
        if pool < config.cpu.capacity:
            need = -(-config.cpu.capacity // HUGE_PAGE_BYTES)
            change = f"vm.nr_hugepages of at least {need} more free ones, or the region gets what `auto` gets"
            yield warning("huge pages", text, change, free_bytes=pool)
        else:
            yield ok("huge pages", text, free_bytes=pool)
        return
    region = HostRegion.create(_REGION, _ROWS)
    region.rows_view[:] = 0
    huge = transparent_bytes(region.address, region.nbytes)
    region.close()
    text = f"{format_size(huge)} of {format_size(_ROWS * _REGION.row_bytes)} of shared memory came in pages of 2 MiB"
    details = {"setting": setting, "huge_bytes": huge, "pool_bytes": pool}
    text += f" (shmem_enabled: {setting}; {pool // HUGE_PAGE_BYTES} in the pool)"
    if change := advice():
        yield advise("huge pages", text, change, **details)
    else:
        yield ok("huge pages", text, **details)


def _memory(config: TiersConfig | None) -> Iterator[Finding]:
    if config is None:
        return
    capacity, bounds = config.cpu.capacity, rooms()
    yield from _shared_memory(config, bounds)
    if config.cpu.huge_pages is HugePages.HUGETLB and not shortage(capacity, hugetlb_rooms()):
        yield ok("memory", f"{format_size(capacity)} for the cpu tier fit into the pool of 2 MiB pages now")
        return
    problem = shortage(capacity, bounds)
    if not problem:
        yield ok("memory", f"{format_size(capacity)} for the cpu tier fit into this process's limits now")
        return
    if capacity > min([_physical_bytes(), *(room.limit_bytes or capacity for room in bounds)]):
        change = "a smaller capacity of the cpu tier, or a higher limit: the engine would not start"
        yield broken("memory", problem, change)
    else:
        change = "nothing, if the engine runs already; else stop what uses the memory, or the engine would not start"
        yield warning("memory", problem, change)


def _shared_memory(config: TiersConfig, bounds: Sequence[Room]) -> Iterator[Finding]:
    """Row files on a file system in memory: their pages count as those of whoever stored them, and stay after it."""
    shared = [tier for tier in config.storage if isinstance(tier, FileConfig) and memory_at(tier.path)]
    pool = config.cpu.huge_pages is HugePages.HUGETLB
    need = (0 if pool else config.cpu.capacity) + sum(tier.capacity for tier in shared)
    machine = Room("the machine", 0, _physical_bytes())
    limits = [
        room for room in (*bounds, machine) if shared and room.limit_bytes is not None and room.limit_bytes < need
    ]
    for room in limits[:1]:
        text = f"{shared[0].path} is in memory, with the cpu tier {format_size(need)}, and {room.whose} has a limit"
        change = f"a limit above {format_size(need)} and what the engine takes, or smaller capacities"
        yield warning("shared memory", f"{text} of {format_size(room.limit_bytes or 0)}", change)


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    yield ok("memlock", f"{limit}; the CUDA driver page-locks memory without it", bytes=soft)
    with suppress(OSError, ValueError):
        most, used = (int((_AIO / name).read_text()) for name in ("aio-max-nr", "aio-nr"))
        text = f"{used} of {most} events of asynchronous I/O are taken on this machine"
        if most - used < _AIO_ENGINE:
            change = f"fs.aio-max-nr of {max(1 << 20, 4 * most)}: file tiers cannot be opened when none are left"
            yield warning("aio", text, change, max=most, used=used)
        else:
            yield ok("aio", text, max=most, used=used)


def _gpus() -> Iterator[Finding]:
    try:
        driver = open_driver()
        count = driver.device_count()
    except (NoDriver, CudaError) as error:
        yield not_tried("GPU", str(error))
        return
    cuda = f"CUDA {driver.version // 1000}.{driver.version % 1000 // 10}{_driver_version()}"
    if driver.batches:
        yield ok("driver", f"{cuda}, copies in batches", cuda=driver.version)
    else:
        change = "driver 570 or newer: copies in batches keep the host's threads free"
        yield advise("driver", f"{cuda}, copies one by one", change, cuda=driver.version)
    for ordinal in range(count):
        capability, address = driver.capability(ordinal), driver.pci_address(ordinal)
        arch, node = "sm_{}{}".format(*capability), pages.node_of(address)
        origins = [origin for origin, _ in kernels.images(arch, driver.version // 1000)]
        usable = bool(origins) and capability >= kernels.MIN_CAPABILITY
        found = origins[0] if usable else "none (copy engine only)"
        place = "" if node is None else f", NUMA node {node}"
        yield ok(f"GPU {ordinal}", f"{driver.device_name(ordinal)} at {address}{place}; kernels: {found}")
    yield ok("copy strategy", f"{self_check.ENVIRONMENT}={os.environ.get(self_check.ENVIRONMENT, 'auto')}")


def _driver_version() -> str:
    with suppress(OSError):
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", _DRIVER.read_text())
        return f", driver {match[1]}" if match else ""
    return ""
