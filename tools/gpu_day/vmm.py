"""KV blocks in memory of cuMemCreate: one allocation, as in vLLM's sleep mode, and a range of addresses over many, with
pages across their borders, as in torch's expandable segments. Every byte is compared."""

from __future__ import annotations

import ctypes
from typing import Any

from nixl_tiers.base.chunk import align
from nixl_tiers.swap.driver import LIBRARY
from nixl_tiers.swap.strategies import NAMES
from tests.system.tiers.gds.gpu_memory import DEVICE, PINNED, READ_WRITE, Access, Location, Properties
from tools.gpu_day.here import Blocks, Gpu, Here

LAYERS = 8
PAGES = {"one": 64 << 10, "many": 48 << 10}  # their bytes, by allocations


def run(here: Here) -> None:
    gpu = here.gpu
    here.left_out("many allocations: the fake driver takes what is behind a border for foreign memory")
    for name, page in PAGES.items():
        if here.rehearsed and name == "many":
            continue
        count = here.size(1024, 64)
        base, allocations = reserved(gpu, count * page * LAYERS, one=name == "one")
        here.tell(f"{name}_allocations", allocations)
        blocks = Blocks(gpu, count, page, LAYERS, base)
        for strategy in NAMES:
            swap = blocks.swap(strategy)
            here.tell(f"{name}_by_{strategy}", blocks.round_trip(swap))
            swap.close()


def reserved(gpu: Gpu, nbytes: int, *, one: bool) -> tuple[int, int]:
    """The address of `nbytes` in one allocation, or in as many as there can be, and how many these are."""
    about = Properties(PINNED, 0, Location(DEVICE, 0), None, 0, 0, 0)
    access = Access(Location(DEVICE, 0), READ_WRITE)
    size, address, none = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
    library = ctypes.CDLL(LIBRARY)

    def call(name: str, *arguments: Any) -> None:
        if code := library[name](*arguments):
            raise gpu.driver.error(name, code)

    with gpu.device.current():
        call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(about), 0)
        whole = align(nbytes, size.value)
        size.value = whole if one else size.value
        call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(whole), ctypes.c_size_t(), none, none)
        for at in range(address.value, address.value + whole, size.value):
            handle, place = ctypes.c_uint64(), ctypes.c_uint64(at)
            call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(about), none)
            call("cuMemMap", place, size, ctypes.c_size_t(), handle, none)
            call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))
    return address.value, whole // size.value
