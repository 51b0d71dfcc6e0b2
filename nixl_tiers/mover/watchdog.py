"""The mover's watchdog: the kernel ends a mover whose main loop is stuck.

When a call into NIXL does not return, and keeps the interpreter's lock, no thread of the mover can end it; and the
coordinator that would kill it may be dead.
"""

from __future__ import annotations

import ctypes
import signal
from typing import Final

TIMEOUT_S: Final = 120.0  # longer than a living coordinator waits for a heartbeat

_libc = ctypes.CDLL(None)


def rearm() -> None:
    """Have SIGALRM end this process after TIMEOUT_S, unless this is called again.

    The timer also runs while the process is stopped (SIGSTOP, a frozen cgroup, a suspended machine), and would end it
    as soon as it is continued. So the first alarm only sets another one: its handler is alarm(2) itself, called with
    the signal's number, 14, and thus good for 14 s. It is called once, then SIGALRM is deadly again.
    """
    _libc.sysv_signal(signal.SIGALRM, ctypes.cast(_libc.alarm, ctypes.c_void_p))
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)


def limit_exit(timeout_s: float) -> None:
    """Have SIGALRM end this process after `timeout_s`, at the latest."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
