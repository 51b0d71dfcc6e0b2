"""Structures of CUDA's calls for virtual memory, for the GPU day."""

from __future__ import annotations

import ctypes

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
