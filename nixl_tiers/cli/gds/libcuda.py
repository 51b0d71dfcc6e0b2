"""CUDA's driver as a probing child calls it, and memory of the kinds that cuFile may register.

Not `swap.driver`: before every call this one says which it is, and it needs nothing but ctypes.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

from nixl_tiers.cli.children import ProbeFailed, say

LIBRARY: Final = "libcuda.so.1"
MAX_IO_BYTES: Final = 16 << 20

_P, _SIZE, _INT, _UINT, _U64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_uint64
_ATTRIBUTES: Final = {"vmm": 102, "rdma_of_vmm": 110, "rdma": 116}
"""CU_DEVICE_ATTRIBUTE_...: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
GPU_DIRECT_RDMA_SUPPORTED"""


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", _INT), ("handles", _INT), ("location", _INT), ("device", _INT), ("windows", _P),
        ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("rest", _INT),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _INT), ("device", _INT), ("flags", _INT))


class Cuda:
    """What a step needs of the driver. Raises ProbeFailed."""

    def __init__(self) -> None:
        say(at=f"loading {LIBRARY}")
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ProbeFailed(f"there is no CUDA driver here: {error}") from error
        self.call("cuInit", _UINT(0))

    def call(self, name: str, *arguments: Any) -> None:
        say(at=name)
        function = getattr(self._library, name, None)
        if function is None:
            raise ProbeFailed(f"the CUDA driver has no {name}")
        if code := function(*arguments):
            raise ProbeFailed(f"{name} failed with CUDA error {code}")

    def number(self, name: str, *arguments: Any) -> int:
        value = _INT()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def describe(self, ordinal: int) -> dict[str, Any]:
        handle = self._device(ordinal)
        name, address = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
        self.call("cuDeviceGetName", name, _INT(len(name)), handle)
        self.call("cuDeviceGetPCIBusId", address, _INT(len(address)), handle)
        found: dict[str, Any] = {
            "name": name.value.decode(errors="replace"),
            "address": address.value.decode(errors="replace").lower(),
        }
        for attribute, number in _ATTRIBUTES.items():
            try:
                found[attribute] = bool(self.number("cuDeviceGetAttribute", _INT(number), handle))
            except ProbeFailed:  # unknown to this driver
                found[attribute] = False
        return found

    def uuid(self, ordinal: int) -> bytes | None:
        """None if the driver cannot say: then cuFile's counters of the GPU cannot be found."""
        value = ctypes.create_string_buffer(16)
        for name in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):  # the first knows parts of a GPU (MIG)
            try:
                self.call(name, value, self._device(ordinal))
            except ProbeFailed:
                continue
            return value.raw
        return None

    def enter(self, ordinal: int) -> None:
        """Make the GPU's primary context current: cuFile 1.20 aborts a process that registers memory without one."""
        context = _P()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
        self.call("cuCtxSetCurrent", context)

    def _device(self, ordinal: int) -> ctypes.c_int:
        return _INT(self.number("cuDeviceGet", _INT(ordinal)))


class Memory:
    """MAX_IO_BYTES of memory: of the host here, of a GPU in the classes below."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, MAX_IO_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def put(self, data: bytes) -> None:
        self._pages[: len(data)] = data

    def get(self, nbytes: int) -> bytes:
        return self._pages[:nbytes]


class GpuMemory(Memory):
    """From cuMemAlloc."""

    def __init__(self, cuda: Cuda, ordinal: int) -> None:
        self._cuda, self._ordinal = cuda, ordinal
        self.address = self._allocate()

    def put(self, data: bytes) -> None:
        self._cuda.call("cuMemcpyHtoD_v2", _U64(self.address), ctypes.c_char_p(data), _SIZE(len(data)))
        self._cuda.call("cuStreamSynchronize", _P(0))  # from pageable memory the copy may not have ended

    def get(self, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        self._cuda.call("cuMemcpyDtoH_v2", out, _U64(self.address), _SIZE(nbytes))
        return out.raw

    def _allocate(self) -> int:
        address = _U64()
        self._cuda.call("cuMemAlloc_v2", ctypes.byref(address), _SIZE(MAX_IO_BYTES))
        return address.value


class MappedGpuMemory(GpuMemory):
    """From cuMemCreate: can be exported, and marked for GPUDirect RDMA, as a staging ring for direct loads would be."""

    def _allocate(self) -> int:
        call = self._cuda.call
        wanted = AllocationProperties(kind=1, handles=1, location=1, device=self._ordinal, rdma=1)
        unit, address, handle = _SIZE(), _U64(), _U64()
        call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(wanted), _INT(0))
        nbytes = _SIZE(-(-MAX_IO_BYTES // unit.value) * unit.value)
        call("cuMemAddressReserve", ctypes.byref(address), nbytes, _SIZE(0), _U64(0), _U64(0))
        call("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(wanted), _U64(0))
        call("cuMemMap", address, nbytes, _SIZE(0), handle, _U64(0))
        access = Access(location=1, device=self._ordinal, flags=3)  # read and write
        call("cuMemSetAccess", address, nbytes, ctypes.byref(access), _SIZE(1))
        return address.value
