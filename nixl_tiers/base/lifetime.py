"""Resources that must be released whatever happens to their owner: collected, alive at interpreter exit, or forked."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize_once(owner: object, close: Callable[[], object]) -> weakref.finalize[[], Any]:
    """Have `close` called once: when the result is called, when `owner` is collected, or when the interpreter exits.

    Never in a forked child, where it would close its parent's resources. `close` must not refer to `owner`.
    """
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            close()

    return weakref.finalize(owner, end)


class ForkedLock:
    """Replaces a lock in a forked child, because what it guards belongs to the parent.

    Another thread of the parent may have held the lock at the fork, so that waiting for it could deadlock.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __enter__(self) -> None:
        raise RuntimeError(
            f"this store belongs to process {self._pid}, which forked this process ({os.getpid()}): "
            "open another one here"
        )

    def __exit__(self, *_: object) -> None:
        """Never reached."""
