"""Memory that processes share by descriptor, and that has no name in any file system."""

from __future__ import annotations

import errno
import os
from typing import Final

_MFD_NOEXEC_SEAL: Final = 8  # Linux 6.3; where sysctl vm.memfd_noexec is 2, nothing else is allowed


def memfd(name: str) -> int:
    """A descriptor of an empty memfd that can be sealed; `name` is only seen in /proc. Raises OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)
