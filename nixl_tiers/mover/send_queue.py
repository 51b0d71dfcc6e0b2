"""A mover's messages to the coordinator, kept until the socket takes them."""

from __future__ import annotations

import os
import socket
from collections import deque

from nixl_tiers.mover.protocol import ToCoordinator, encode


class SendQueue:
    """Packets to the coordinator, in order. What the socket does not take at once is queued; nothing blocks or is
    lost."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._packets: deque[tuple[bytes, int | None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._packets)

    def send(self, message: ToCoordinator, fd: int | None = None) -> None:
        """Queue a message, with a descriptor if there is one, and flush. The descriptor is closed once it is sent."""
        self._packets.append((encode(message), fd))
        if self._closed:
            self.close()
        else:
            self.flush()

    def close(self) -> None:
        """The coordinator is gone: discard all messages, also those to come."""
        self._closed = True
        for _, fd in self._packets:
            if fd is not None:
                os.close(fd)
        self._packets.clear()

    def flush(self) -> None:
        """Send as much as the socket takes. Raises OSError when the other end is closed."""
        while self._packets:
            packet, fd = self._packets[0]
            try:
                if fd is None:
                    self._socket.send(packet)
                else:
                    socket.send_fds(self._socket, [packet], [fd])
            except BlockingIOError:
                return
            self._packets.popleft()
            if fd is not None:
                os.close(fd)
