"""What a mover tells its engine, kept until the socket takes it."""

from __future__ import annotations

import os
import socket
from collections import deque

from nixl_tiers.mover.protocol import ToCoordinator, encode


class SendQueue:
    """Packets to the engine, in order. What the socket does not take at once waits here; nothing blocks, or is lost."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._packets: deque[tuple[bytes, int | None]] = deque()
        self._deaf = False

    def __len__(self) -> int:
        return len(self._packets)

    def send(self, message: ToCoordinator, fd: int | None = None) -> None:
        """Send, with a descriptor if there is one, which is closed when it has gone."""
        self._packets.append((encode(message), fd))
        if self._deaf:
            self.hang_up()
        else:
            self.flush()

    def hang_up(self) -> None:
        """Nobody listens any more: drop everything, from now on too."""
        self._deaf = True
        for _, fd in self._packets:
            if fd is not None:
                os.close(fd)
        self._packets.clear()

    def flush(self) -> None:
        """Send as much as the socket takes. Raises OSError when nobody holds the other end any more."""
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
