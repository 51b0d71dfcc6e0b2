"""libcufile as a probing child calls it. Structures and numbers are those of cufile.h of cuFile 1.20."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from nixl_tiers.cli.children import ProbeFailed, say

_P, _SIZE, _INT, _UINT, _I64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_int64
_FD: Final = 1  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
_NVME: Final = 4  # CU_FILE_NVME_SUPPORTED
_PARAMETERS: Final = {"allow_compat_mode": 1, "force_compat_mode": 2, "use_pci_p2pdma": 7}
_STATS_BYTES: Final = 64 << 10  # CUfileStatsLevel3_t has 5 KiB
_GPU_WORDS: Final = 32
_GPU_COUNTERS: Final = {  # places in CUfilePerGpuStats, in words of 8 bytes; the first two are the GPU's UUID
    "reads": 6, "p2p_reads": 7, "nvfs_reads": 8, "posix_reads": 9,
    "writes": 19, "p2p_writes": 20, "nvfs_writes": 21, "posix_writes": 22,
}  # fmt: skip

MEANINGS: Final = {
    5001: "nvidia-fs is not loaded, and compatibility mode is not allowed",
    5007: "this platform is not supported",
    5008: "not supported on this file",
    5009: "not supported on this GPU",
    5011: "a call of the CUDA driver failed",
    5013: "this kind of memory cannot be registered",
    5018: "this file system is not supported",
    5025: "no permission",
    5027: "the file could not be looked at: a udev record is missing",
    5030: "an internal error",
    5033: "nvidia-fs could not be set up, and compatibility mode is not possible",
    5036: "GPU memory could not be pinned",
}


class CuFileError(ctypes.Structure):
    """CUfileError_t."""

    _fields_ = (("code", _INT), ("cuda", _INT))


class DriverProperties(ctypes.Structure):
    """The beginning of CUfileDrvProps_t, with room for what later versions append."""

    _fields_ = (
        ("major", _UINT), ("minor", _UINT), ("poll", _SIZE), ("direct", _SIZE), ("status", _UINT), ("control", _UINT),
        ("features", _UINT), ("rest", _UINT * 61),
    )  # fmt: skip


class Descriptor(ctypes.Structure):
    """CUfileDescr_t."""

    _fields_ = (("kind", _INT), ("fd", _P), ("operations", _P))


class CuFile:
    """libcufile with its driver open. Raises ProbeFailed."""

    def __init__(self, path: str) -> None:
        say(at="loading libcufile")
        self._library = ctypes.CDLL(path)
        for name in ("cuFileRead", "cuFileWrite"):
            function = getattr(self._library, name)
            function.restype = ctypes.c_ssize_t
            function.argtypes = (_P, _P, _SIZE, _I64, _I64)
        self._optional("cuFileSetStatsLevel", _INT(3))
        self._call("cuFileDriverOpen")
        self._optional("cuFileStatsStart")

    def properties(self) -> dict[str, Any]:
        """What the driver says of itself. None: this version cannot say."""
        found = DriverProperties()
        self._call("cuFileDriverGetProperties", ctypes.byref(found))
        parameters: dict[str, bool | None] = {}
        for name, number in _PARAMETERS.items():
            value = ctypes.c_bool()
            known = self._optional("cuFileGetParameterBool", _INT(number), ctypes.byref(value))
            parameters[name] = value.value if known else None
        flags = _UINT()
        known = self._optional("cuFileDriverGetP2PFlags", _INT(_NVME), ctypes.byref(flags))
        return {
            "nvidia_fs": f"{found.major}.{found.minor}" if found.major else None,
            "storage_flags": found.status,
            "feature_flags": found.features,
            "nvme_p2p_flags": flags.value if known else None,
            **parameters,
        }

    def bar1_bytes(self, gpu: int) -> int | None:
        size = _SIZE()
        return size.value << 10 if self._optional("cuFileGetBARSizeInKB", _INT(gpu), ctypes.byref(size)) else None

    def counters(self, uuid: bytes) -> dict[str, int] | None:
        """cuFile's own, of one GPU in this process; None before 1.15, and for a GPU that they do not have."""
        raw = ctypes.create_string_buffer(_STATS_BYTES)
        if not self._optional("cuFileGetStatsL3", raw):
            return None
        # What is before the GPUs' statistics has grown from version to version: the UUID shows where they begin.
        at = raw.raw.find(uuid)
        if at < 0:
            return None
        words = (ctypes.c_uint64 * _GPU_WORDS).from_buffer_copy(raw.raw, at)
        return {name: int(words[place]) for name, place in _GPU_COUNTERS.items()}

    def register_file(self, descriptor: int) -> int:
        handle = _P()
        self._call("cuFileHandleRegister", ctypes.byref(handle), ctypes.byref(Descriptor(_FD, descriptor, None)))
        return handle.value or 0

    def deregister_file(self, handle: int) -> None:
        say(at="cuFileHandleDeregister")
        self._library.cuFileHandleDeregister(_P(handle))

    def register_memory(self, address: int, nbytes: int) -> None:
        self._call("cuFileBufRegister", _P(address), _SIZE(nbytes), _INT(0))

    def deregister_memory(self, address: int) -> None:
        self._call("cuFileBufDeregister", _P(address))

    def transfer(self, name: str, handle: int, address: int, nbytes: int, offset: int) -> None:
        """cuFileRead or cuFileWrite, all of it."""
        what = f"{name} of {nbytes} bytes"
        say(at=what)
        moved = getattr(self._library, name)(handle, address, nbytes, offset, 0)
        if moved != nbytes:
            raise ProbeFailed(f"{what} returned {moved}{_meaning(-moved)}")

    def close(self) -> None:
        if not self._optional("cuFileDriverClose_v2"):
            self._optional("cuFileDriverClose")

    def _call(self, name: str, *arguments: Any) -> None:
        say(at=name)
        function = getattr(self._library, name)
        function.restype = CuFileError
        error = function(*arguments)
        if error.code:
            cuda = f", CUDA error {error.cuda}" if error.cuda else ""
            raise ProbeFailed(f"{name} failed with error {error.code}{_meaning(error.code)}{cuda}")

    def _optional(self, name: str, *arguments: Any) -> bool:
        """A call that older versions lack, or that may be refused."""
        if not hasattr(self._library, name):
            return False
        try:
            self._call(name, *arguments)
        except ProbeFailed:
            return False
        return True


def version_of(library: ctypes.CDLL) -> str:
    """Such as "1.20"; "" before 1.8, which cannot say."""
    if not hasattr(library, "cuFileGetVersion"):
        return ""
    number = _INT()
    library.cuFileGetVersion.restype = CuFileError
    library.cuFileGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _meaning(code: int) -> str:
    return f" ({MEANINGS[code]})" if code in MEANINGS else ""
