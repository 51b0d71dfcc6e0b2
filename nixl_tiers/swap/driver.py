"""The CUDA driver through ctypes, opened on first use: no CUDA is needed to install or import this.

The driver's own interface rather than the runtime's or torch's: it is the same for every build of torch, and a failed
call leaves no sticky error for the next caller. Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LIBRARY: Final = "libcuda.so.1"
ALREADY_REGISTERED: Final = 712

_BATCH_VERSION: Final = 12080  # the first that has batches; this number also selects which arguments they take
_NON_BLOCKING: Final = 1  # no order with the legacy default stream except by events
_BLOCKING: Final = 1
_NO_TIMING: Final = 2
_CAPABILITY: Final = (75, 76)
_PORTABLE_AND_MAPPED: Final = 0x1 | 0x2
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_MEMORY_TYPE, _HOST_MEMORY = 2, 1  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_HOST

_P, _U64, _SIZE, _INT, _UINT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGet": (_P, _INT),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGetName": (_P, _INT, _INT),
    "cuDeviceGetAttribute": (_P, _INT, _INT),
    "cuDeviceGetPCIBusId": (_P, _INT, _INT),
    "cuDevicePrimaryCtxRetain": (_P, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxPushCurrent_v2": (_P,),
    "cuCtxPopCurrent_v2": (_P,),
    "cuCtxGetStreamPriorityRange": (_P, _P),
    "cuStreamCreateWithPriority": (_P, _UINT, _INT),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuStreamWaitEvent": (_P, _P, _UINT),
    "cuEventCreate": (_P, _UINT),
    "cuEventDestroy_v2": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuEventSynchronize": (_P,),
    "cuEventElapsedTime": (_P, _P, _P),
    "cuMemAlloc_v2": (_P, _SIZE),
    "cuMemFree_v2": (_U64,),
    "cuMemcpyHtoD_v2": (_U64, _P, _SIZE),
    "cuMemcpyDtoH_v2": (_P, _U64, _SIZE),
    "cuMemcpyAsync": (_U64, _U64, _SIZE, _P),
    "cuMemsetD8_v2": (_U64, ctypes.c_ubyte, _SIZE),
    "cuMemHostRegister_v2": (_P, _SIZE, _UINT),
    "cuMemHostUnregister": (_P,),
    "cuPointerGetAttribute": (_P, _INT, _U64),
    "cuThreadExchangeStreamCaptureMode": (_P,),
    "cuModuleLoadData": (_P, _P),
    "cuModuleUnload": (_P,),
    "cuModuleGetFunction": (_P, _P, ctypes.c_char_p),
    "cuLaunchKernel": (_P, _UINT, _UINT, _UINT, _UINT, _UINT, _UINT, _UINT, _P, _P, _P),
    "cuGetProcAddress_v2": (ctypes.c_char_p, _P, _INT, _U64, _P),
    "cuGetErrorName": (_INT, _P),
}
_BATCH: Final = ctypes.CFUNCTYPE(_INT, _P, _P, _P, _SIZE, _P, _P, _SIZE, _P, _P)


class CudaError(RuntimeError):
    """A call of the driver failed: `call` is its name, `code` the CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({code})")
        self.call = call
        self.code = code


class NoDriver(RuntimeError):
    """There is no CUDA driver here, or none that works. One sentence that says why."""


@cache
def open_driver() -> Driver:
    """The machine's driver, initialised. Raises NoDriver; is cheap to ask again only once it succeeded."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NoDriver(f"there is no CUDA driver here: {error}") from error
    try:
        return Driver(library)
    except (CudaError, AttributeError) as error:
        raise NoDriver(f"the CUDA driver does not work: {error}") from error


class Driver:
    """What this package uses of the driver. Streams, events, contexts, modules and functions are plain numbers.

    Every method may raise CudaError. Those from `stream` on need a current context (Device.current).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions: dict[str, Any] = {}
        for name, arguments in _CALLS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = _INT
            self._functions[name] = function
        self._call("cuInit", 0)
        self.version = self._number("cuDriverGetVersion")
        self._batch = self._resolve_batch()

    @property
    def batches(self) -> bool:
        """Whether copies can be handed over in batches (driver 570 and later)."""
        return self._batch is not None

    # ---- devices ----

    def device_count(self) -> int:
        return self._number("cuDeviceGetCount")

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, len(text), self._device(device))
        return text.value.decode(errors="replace")

    def pci_address(self, device: int) -> str:
        """As sysfs names it: 0000:1b:00.0."""
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device(device))
        return text.value.decode(errors="replace").lower()

    def capability(self, device: int) -> tuple[int, int]:
        handle = self._device(device)
        major, minor = (self._number("cuDeviceGetAttribute", attribute, handle) for attribute in _CAPABILITY)
        return major, minor

    def retain_context(self, device: int) -> int:
        """The primary context, which torch uses too."""
        return self._handle("cuDevicePrimaryCtxRetain", self._device(device))

    def release_context(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", self._device(device))

    def _device(self, ordinal: int) -> int:
        return self._number("cuDeviceGet", ordinal)

    def push(self, context: int) -> None:
        self._call("cuCtxPushCurrent_v2", context)

    def pop(self) -> None:
        self._handle("cuCtxPopCurrent_v2")

    # ---- streams and events ----

    def stream(self, *, urgent: bool) -> int:
        """A stream without implicit synchronisation, of the highest priority or of the lowest."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        priority = greatest.value if urgent else least.value
        return self._handle("cuStreamCreateWithPriority", _NON_BLOCKING, priority)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Later work of `stream` waits for the work that `event` was last recorded behind."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def event(self, *, timed: bool = False, blocking: bool = False) -> int:
        """`timed`: for elapsed_s. `blocking`, or timed: a thread that waits for it sleeps, instead of spinning."""
        return self._handle("cuEventCreate", _BLOCKING if timed else _NO_TIMING | (_BLOCKING if blocking else 0))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def wait(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def elapsed_s(self, begin: int, end: int) -> float:
        """Seconds between two timed events that have both happened."""
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value / 1e3

    # ---- memory ----

    def allocate(self, nbytes: int) -> int:
        """Address of memory on the current context's GPU."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def upload(self, address: int, data: NDArray[Any]) -> None:
        """Copy to the GPU; returns when the bytes are there."""
        whole = np.ascontiguousarray(data)
        self._call("cuMemcpyHtoD_v2", address, whole.ctypes.data, whole.nbytes)
        # From pageable memory the call may return before the last bytes are there, and our streams would not wait.
        self._call("cuStreamSynchronize", 0)

    def download(self, address: int, out: NDArray[Any]) -> None:
        """Copy from the GPU into a contiguous array; returns when the bytes are there."""
        self._call("cuMemcpyDtoH_v2", out.ctypes.data, address, out.nbytes)

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Set bytes on the GPU; returns when that is done."""
        self._call("cuMemsetD8_v2", address, value, nbytes)
        self._call("cuStreamSynchronize", 0)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock host memory for every context, and map it for kernels."""
        # Else a graph that another thread captures, in the mode that vLLM uses, would be invalid.
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE_AND_MAPPED)
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def page_locked(self, address: int) -> bool:
        """Whether host memory was page-locked by the driver, by any code in this process."""
        kind = ctypes.c_uint()
        code = self._functions["cuPointerGetAttribute"](ctypes.byref(kind), _MEMORY_TYPE, address)
        return code == 0 and kind.value == _HOST_MEMORY

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", to, source, nbytes, stream)

    # ---- kernels ----

    def load_module(self, image: bytes) -> int:
        """A fatbin, cubin or (ending in a zero byte) PTX."""
        return self._handle("cuModuleLoadData", image)

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        """A kernel."""
        return self._handle("cuModuleGetFunction", module, name.encode())

    # ---- how calls are made ----

    def address(self, name: str) -> int:
        """Of a function of the driver, for csrc/swap_submit.c."""
        return ctypes.cast(self._functions[name], ctypes.c_void_p).value or 0

    def batch_address(self) -> int | None:
        """Of cuMemcpyBatchAsync, where the driver has it."""
        return None if self._batch is None else ctypes.cast(self._batch, ctypes.c_void_p).value

    def error(self, call: str, code: int) -> CudaError:
        """What a call that returned `code` raises."""
        text = ctypes.c_char_p()
        known = self._functions["cuGetErrorName"](code, ctypes.byref(text)) == 0 and text.value
        return CudaError(call, code, text.value.decode() if known and text.value else "unknown error")

    def _resolve_batch(self) -> Any:
        if self.version < _BATCH_VERSION:
            return None
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._functions["cuGetProcAddress_v2"](
            b"cuMemcpyBatchAsync", ctypes.byref(address), _BATCH_VERSION, 0, ctypes.byref(status)
        )
        return _BATCH(address.value) if code == 0 and address.value else None

    def _call(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code:
            raise self.error(name, code)

    def _handle(self, name: str, *arguments: Any) -> int:
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def _number(self, name: str, *arguments: Any) -> int:
        number = ctypes.c_int()
        self._call(name, ctypes.byref(number), *arguments)
        return number.value


class Device:
    """One GPU's primary context, held until `close`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.context = driver.retain_context(ordinal)
        self._closing = threading.Lock()
        self._closed = False

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        return self.driver.capability(self.ordinal)

    @contextmanager
    def current(self) -> Iterator[Driver]:
        """Make the context the calling thread's for a while.

        Raises CudaError where it cannot be had: the GPU failed, or the driver has left because the process ends.
        Nothing can be released then, and nothing needs to be.
        """
        self.driver.push(self.context)
        try:
            yield self.driver
        finally:
            with suppress(CudaError):  # errors of earlier work, which its own waiter reports
                self.driver.pop()

    def close(self) -> None:
        """Let the context go. May be called twice."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        with suppress(CudaError):  # a failed GPU releases nothing, which must not stop the shutdown
            self.driver.release_context(self.ordinal)
