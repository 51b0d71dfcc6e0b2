"""GPU memory by calls of the CUDA driver alone, allocated in one process and mapped in another. The tests have the fake
driver (tests/swap/fake_cuda.cpp) as libcuda.so.1; the calls and their structures are CUDA's.

Run as a program it is the process that owns the memory: `gpu_memory.py SOCKET NBYTES`, on an inherited socket.
"""

from __future__ import annotations

import ctypes
import socket
import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PINNED = DEVICE = DESCRIPTOR = 1
READ_WRITE = 3


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("unused", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Gpu:
    """The first GPU, with its primary context current in this thread."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxPushCurrent_v2", context)

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, by cuMemAlloc."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def create(self, nbytes: int) -> tuple[int, int]:
        """New memory by cuMemCreate: (its address, a descriptor for other processes)."""
        about = Properties(PINNED, DESCRIPTOR, Location(DEVICE, 0), None, 0, 1, 0)
        handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(about), ctypes.c_uint64())
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, DESCRIPTOR, ctypes.c_uint64())
        return self._mapped(handle, nbytes), descriptor.value

    def attach(self, descriptor: int, nbytes: int) -> int:
        """The address in this process of another one's memory."""
        handle = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), DESCRIPTOR)
        return self._mapped(handle, nbytes)

    def write(self, address: int, content: NDArray[np.uint8]) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), content.ctypes, ctypes.c_size_t(content.nbytes))

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        content = np.zeros(nbytes, np.uint8)
        self._call("cuMemcpyDtoH_v2", content.ctypes, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return content

    def counted(self, call: str) -> int:
        """How often the fake driver was called so."""
        return int(self._driver.fake_calls(call.encode()))

    def violations(self) -> str:
        self._driver.fake_why.restype = ctypes.c_char_p
        return str(self._driver.fake_why().decode()) if self._driver.fake_violations() else ""

    def _mapped(self, handle: ctypes.c_uint64, nbytes: int) -> int:
        address, size, none = ctypes.c_uint64(), ctypes.c_size_t(nbytes), ctypes.c_uint64()
        access = Access(Location(DEVICE, 0), READ_WRITE)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(), none, none)
        self._call("cuMemMap", address, size, ctypes.c_size_t(), handle, none)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value

    def _call(self, name: str, *arguments: object) -> None:
        error = self._driver[name](*arguments)
        if error:
            raise RuntimeError(f"{name} returned {error}")


def pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def own(arguments: Sequence[str]) -> None:
    """Memory with pattern 1 is handed over; when the other process has answered, what is in it must be pattern 2."""
    connection, nbytes = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    gpu = Gpu()
    address, descriptor = gpu.create(nbytes)
    gpu.write(address, pattern(1, nbytes))
    gpu.read(address, 1)  # the copy has ended
    socket.send_fds(connection, [b"memory"], [descriptor])
    assert connection.recv(16) == b"loaded"
    right = np.array_equal(gpu.read(address, nbytes), pattern(2, nbytes))
    connection.sendall(b"right" if right else b"wrong")


if __name__ == "__main__":
    own(sys.argv[1:])
