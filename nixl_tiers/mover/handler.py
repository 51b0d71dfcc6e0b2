"""What the supervisor of the movers tells its owner, and what it is told to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from nixl_tiers.memory.columns import ListedColumns
from nixl_tiers.mover.protocol import ToCoordinator, ToMover


class Turn(NamedTuple):
    """What the handler has planned at a turn.

    `messages`: to send now, in order, each with its tier, encoded or not; `overdue`: tiers whose movers must be killed,
    and why; `wait_s`: how long the next turn may wait if nothing happens, in seconds: 0 if work is left that was put
    off to keep this one short; `pause_s`: for so long the next turn may wait whatever movers report meanwhile.
    """

    messages: Sequence[tuple[int, ToMover | bytes]]
    overdue: Mapping[int, str]
    wait_s: float
    pause_s: float = 0.0


class Handler(Protocol):
    """Callbacks of the supervisor, on its own thread. They must not block."""

    def on_message(self, tier: int, message: ToCoordinator) -> None: ...

    def on_columns(self, tier: int, epoch: int, columns: ListedColumns) -> None:
        """Many rows are listed. The handler owns `columns`, and closes them."""

    def on_problem(self, tier: int, reason: str) -> None:
        """The tier has no mover that can serve, for this reason. Called repeatedly while that lasts."""

    def on_log_line(self, tier: int, level: int, text: str) -> None:
        """The tier's mover has logged a line."""

    def on_killed(self, tier: int) -> None:
        """The tier's mover is being killed. No message of it follows; transfers may still write to its rows. Called
        again if it raises."""

    def on_reaped(self, tier: int) -> None:
        """The tier's mover is dead and reaped. Called again if it raises."""

    def on_tick(self, received_s: float, send_credits: Sequence[int]) -> Turn:
        """All messages that movers had sent by `received_s` have been handled: later deadlines must not be judged yet.
        `send_credits`: how many messages each mover takes now; one that is sent many more is killed."""
