"""One NIXL agent with one backend, as a mover needs it: register memory and files, start and poll transfers.

The only module that imports NIXL. It works around what is unsafe or awkward in NIXL:
- the agent is created without backends and in strict thread mode (its defaults crash at exit and under threads);
- a failure raises inside NIXL at several places; here it is a state of one transfer, and the agent stays usable;
- NIXL's errors have no common base class but Exception, so that is what is caught here, only around calls into it;
- a handle is released only in a terminal state: after the release of a running one, bytes still land in memory later.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, Final, Literal, TypeVar

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.memory.region import HostRegion

logger = logging.getLogger(__name__)

Span = tuple[int, int, int, int]
"""address, bytes, offset in the file or object, device (from Registration.devices)"""

RDMA_LIBRARY: Final = "libcuobjclient.so.1"  # cuObject
_NAME = "mover"  # the remote agent of a transfer to storage is the agent itself


class AgentError(RuntimeError):
    """A backend is not available, or a registration failed. One sentence."""


class TransferState(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


_STATES: Final = {"DONE": TransferState.DONE, "PROC": TransferState.PENDING}


class Registration:
    """Memory, files or objects that NIXL knows. `devices` holds one number for each file or object, in order."""

    def __init__(self, descriptors: Any, devices: tuple[int, ...]) -> None:
        self.descriptors = descriptors
        self.devices = devices


class Registrar(ABC):
    """Who has to know memory and files before it moves rows between them."""

    backend: str

    @abstractmethod
    def register_dram(self, address: int, nbytes: int) -> Registration:
        """Register `nbytes` of host memory at `address`. Raises AgentError."""

    @abstractmethod
    def register_file(self, path: str, nbytes: int, *, direct: bool) -> Registration:
        """Open an existing file for reads and writes below `nbytes` (it may grow up to that later).

        By path, not by descriptor: NIXL keeps only the number, and a reused number would redirect I/O.
        `direct`: O_DIRECT, where address, offset and length are multiples of 4096. Raises AgentError.
        """

    @abstractmethod
    def deregister(self, registration: Registration) -> None:
        """Deregister memory, files (which are closed) or objects. No transfer of theirs may be pending."""


class Transfer:
    """One running or ended transfer. DONE says that NIXL saw no error, not that the bytes are right or complete
    (a short object ends as DONE): the caller verifies. FAILED may have moved any part of it."""

    def __init__(self, api: Any, handle: Any, state: TransferState) -> None:
        self._api = api
        self._handle = handle
        self._state = state

    def state(self) -> TransferState:
        """Poll: file transfers make progress only in this call, about 64 I/Os each."""
        if self._state is TransferState.PENDING:
            self._state = _state_after(self._api.check_xfer_state, self._handle)
        return self._state

    def release(self) -> None:
        """Free the handle. Raises RuntimeError while the transfer is pending: it could still write to memory."""
        if self._state is TransferState.PENDING:
            raise RuntimeError("a pending transfer cannot be released")
        handle, self._handle = self._handle, None
        if handle is not None:
            try:
                handle.release()
            except Exception as error:  # noqa: BLE001 (the transfer has ended; only NIXL's bookkeeping is left)
                logger.warning("releasing a transfer: %s", error)


class Agent(Registrar):
    """A NIXL agent over one backend: `posix` or `gds_mt` for files, `obj` for objects.

    Calls from several threads are safe. Nothing here waits for the medium, except close and file registration.
    """

    def __init__(self, backend: str, parameters: Mapping[str, str], remote: Literal["FILE", "OBJ"]) -> None:
        """Raises AgentError without NIXL or the backend. `parameters` may hold secrets: never logged."""
        self.backend = backend
        self._remote = remote
        self._devices = itertools.count(1)
        self._log_once = LogOnce(logger)
        try:
            nixl = importlib.import_module(f"{flavour(backend)}._api")
            config = nixl.nixl_agent_config(backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
            self._api = nixl.nixl_agent(_NAME, config)
            self._api.create_backend(backend, dict(parameters))
        except Exception as error:
            raise AgentError(f"NIXL backend {backend} is not available here ({type(error).__name__})") from error

    @classmethod
    def posix(cls) -> Agent:
        """Files through Linux AIO. Not io_uring, whose reads still land when the process that began them is dead and
        gone (tests/system/faults/test_reaped.py); nor POSIX AIO, which stays broken after its first error."""
        return cls("POSIX", {"use_aio": "true"}, "FILE")

    @classmethod
    def gds_mt(cls) -> Agent:
        """Files through cuFile; AgentError without its libraries."""
        return cls("GDS_MT", {}, "FILE")

    @classmethod
    def obj(cls, parameters: Mapping[str, str]) -> Agent:
        """Objects of one bucket: endpoint_override, scheme, bucket, access_key, ...; every value a string."""
        return cls("OBJ", parameters, "OBJ")

    def register_dram(self, address: int, nbytes: int) -> Registration:
        return Registration(self._register([(address, nbytes, 0, "")], "DRAM"), (0,))

    def register_region(self, region: HostRegion) -> Registration:
        """Register every row of the host region. Raises AgentError."""
        return self.register_dram(region.address, region.nbytes)

    def register_file(self, path: str, nbytes: int, *, direct: bool) -> Registration:
        return self._register_remote([f"rw,direct:{path}" if direct else f"rw:{path}"], nbytes)

    def register_objects(self, names: Sequence[str], nbytes: int) -> Registration:
        """Register objects of up to `nbytes` by name, whether they exist or not. Raises AgentError."""
        return self._register_remote(names, nbytes)

    def deregister(self, registration: Registration) -> None:
        try:
            self._api.deregister_memory(registration.descriptors, backends=[self.backend])
        except Exception as error:  # noqa: BLE001 (harmless: the end of the process releases it too)
            logger.warning("deregistering from NIXL: %s", error)

    def write(self, spans: Sequence[Span]) -> Transfer:
        """Start moving memory to files or objects. Never raises: a transfer that cannot start is FAILED."""
        return self._start("WRITE", spans)

    def read(self, spans: Sequence[Span]) -> Transfer:
        """Start moving files or objects to memory. Never raises: a transfer that cannot start is FAILED."""
        return self._start("READ", spans)

    def _register_remote(self, names: Sequence[str], nbytes: int) -> Registration:
        devices = tuple(itertools.islice(self._devices, len(names)))
        rows = [(0, nbytes, device, name) for device, name in zip(devices, names, strict=True)]
        return Registration(self._register(rows, self._remote), devices)

    def _register(self, rows: Iterable[tuple[int, int, int, str]], kind: str) -> Any:
        try:
            return self._api.register_memory(list(rows), kind, backends=[self.backend])
        except Exception as error:
            raise AgentError(f"NIXL backend {self.backend} cannot register {kind} ({error})") from error

    def _start(self, operation: str, spans: Sequence[Span]) -> Transfer:
        # Tuples: for one span they take a third of what an array does, for 256 as much. Prepared lists save nothing
        # noticeable beside the I/O.
        local = [(address, nbytes, 0) for address, nbytes, _, _ in spans]
        remote = [(offset, nbytes, device) for _, nbytes, offset, device in spans]
        try:
            handle = self._api.initialize_xfer(
                operation,
                self._api.get_xfer_descs(local, "DRAM"),
                self._api.get_xfer_descs(remote, self._remote),
                _NAME,
                backends=[self.backend],
            )
        except Exception as error:  # noqa: BLE001
            self._log_once.report("start", f"a transfer could not start: {error}")
            return Transfer(self._api, None, TransferState.FAILED)
        return Transfer(self._api, handle, _state_after(self._api.transfer, handle))


def _state_after(call: Callable[[Any], str], handle: Any) -> TransferState:
    """The state that a call to NIXL reports."""
    try:
        word = call(handle)
    except Exception:  # noqa: BLE001 (NIXL raises for every failed transfer, once nothing of it is in flight)
        return TransferState.FAILED
    return _STATES.get(word, TransferState.FAILED)


def flavour(backend: str) -> str:
    """The package of NIXL to import: of one CUDA generation, or `nixl`, which chooses by torch.

    For that it imports torch if torch is a CPU build: a second and hundreds of megabytes in every mover. Where only one
    is installed there is nothing to choose. And a plugin that cannot be loaded is not chosen: for CUDA 13, OBJ links a
    library for S3 over RDMA that no wheel brings. Host memory is all that a mover has, so that for CUDA 12 will do.
    """
    found = [name for name in ("nixl_cu13", "nixl_cu12") if importlib.util.find_spec(name)]
    if len(found) == 1:
        return found[0]
    return "nixl_cu12" if found and backend == "OBJ" and not _can_load(RDMA_LIBRARY) else "nixl"


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- threads that only store ------------------------------------------------------------------------------------------

STORE_NICE: Final = 10  # a tenth of the weight of a thread with 0

T = TypeVar("T")


def at_low_priority(start: Callable[[], T]) -> T:
    """Call `start` on a thread that ends with it: native threads that it starts have low CPU priority for all their
    life, so that a busy machine serves first whom requests wait for. Returns or raises what it does.

    Linux has a nice value for each thread. A thread inherits that of the one that starts it, may raise it, and cannot
    lower it again without a right (CAP_SYS_NICE, RLIMIT_NICE). So a thread that also loads must never have it. Nor must
    one that runs Python code: while it holds the interpreter lock and is not scheduled, the mover's loop waits for the
    lock (priority inversion).
    """
    with ThreadPoolExecutor(1, initializer=lambda: os.nice(STORE_NICE)) as thread:
        return thread.submit(start).result()
