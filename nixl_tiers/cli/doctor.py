"""`nixl-tiers doctor`: what this machine has for copies between GPU and host, and the strategies that were measured."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator

from nixl_tiers.memory.huge_pages import HUGE_PAGE_BYTES, advice, hugetlb_rooms, transparent_setting
from nixl_tiers.swap import autotune, kernels, numa
from nixl_tiers.swap.driver import CudaError, NoDriver, open_driver
from nixl_tiers.swap.host import backend


def examine() -> int:
    """Print what is found, one line a thing. Starts nothing on a GPU; 0 also where there is none."""
    print("\n".join([*_host(), *_gpus(), *_measured()]))
    return 0


def _host() -> Iterator[str]:
    yield f"copies in host memory: {'compiled' if backend() == 'c' else 'numpy (the library was not built)'}"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield f"memory that may be locked: {'unlimited' if limit == resource.RLIM_INFINITY else f'{limit >> 10} KiB'}"
    pool = min(room.free_bytes for room in hugetlb_rooms())
    yield f"transparent huge pages for shared memory: {transparent_setting() or 'unknown to this kernel'}"
    yield f"pages of 2 MiB in a pool (`huge_pages: hugetlb`): {pool // HUGE_PAGE_BYTES} free for this process"
    if hint := advice():
        yield f"  {hint}"


def _gpus() -> Iterator[str]:
    try:
        driver = open_driver()
        count = driver.device_count()
    except (NoDriver, CudaError) as error:
        yield f"GPU: {error}"
        return
    batches = "copies in batches" if driver.batches else "copies one by one: drivers from 570 on take batches"
    yield f"CUDA driver: {driver.version // 1000}.{driver.version % 1000 // 10}, {batches}"
    for ordinal in range(count):
        capability, address = driver.capability(ordinal), driver.pci_address(ordinal)
        arch, node = "sm_{}{}".format(*capability), numa.node_of(address)
        origins = [origin for origin, _ in kernels.images(arch, driver.version // 1000)]
        found = origins[0] if origins and capability >= kernels.MIN_CAPABILITY else "none (copy engine only)"
        place = "" if node is None else f", NUMA node {node}"
        yield f"GPU {ordinal}: {driver.device_name(ordinal)} at {address}{place}; kernels: {found}"


def _measured() -> Iterator[str]:
    yield f"copy strategy ({autotune.ENVIRONMENT}): {os.environ.get(autotune.ENVIRONMENT, 'auto')}"
    folder = kernels.cache_folder()
    for kept in sorted(folder.glob("choice-*.json") if folder else ()):
        measured = autotune.read(kept)
        if measured is None:
            continue
        about = json.loads(kept.read_bytes()).get("about", {})
        yield f"measured on {about.get('gpu')}, driver {about.get('driver')} ({kept.name}):"
        try:
            yield from (f"  {line}" for line in autotune.lines(measured))
        except (AttributeError, KeyError, TypeError, ValueError):
            yield "  it cannot be read, and is measured again at the next start"
