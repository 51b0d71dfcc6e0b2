"""What must be let go whatever happens to its owner: collected, forgotten at the interpreter's exit, or forked."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize_once(owner: object, close: Callable[[], object]) -> weakref.finalize[[], Any]:
    """Have `close` called once: when the result is called, when `owner` is collected, or when the interpreter exits.

    Never in a forked child: what it would close is its parent's. `close` must not hold on to `owner`.
    """
    pid = os.getpid()

    def end() -> None:
        if os.getpid() == pid:
            close()

    return weakref.finalize(owner, end)


class ForkedLock:
    """Stands in a forked child where a lock stood: what the lock guarded is still the parent's.

    Another thread of the parent may have held the lock when it forked, so waiting for it could be for ever.
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
