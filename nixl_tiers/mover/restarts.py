"""When a mover that has died is started again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from nixl_tiers.base.times import PRODUCTION

RECENT_S: Final = 600.0
KILLS_AN_HOUR: Final = 10
HOUR_S: Final = 3600.0


class RestartBackoff:
    """The restarts of one tier's mover. Kills are bounded, because each one has cost a request its deadline: after
    KILLS_AN_HOUR of them, the tier stays without a mover until an hour after the first."""

    def __init__(self, backoff_s: Sequence[float] = PRODUCTION.restart_backoff_s) -> None:
        """`backoff_s`: by the number of deaths within RECENT_S."""
        self._backoff_s = backoff_s
        self._deaths: deque[float] = deque(maxlen=len(backoff_s))
        self._kills: deque[float] = deque(maxlen=KILLS_AN_HOUR)

    def killed(self, now: float) -> None:
        self._kills.append(now)

    def died(self, now: float) -> float:
        """When the next mover may be started. Call it for every death, killed or not, after `killed`."""
        while self._deaths and now - self._deaths[0] > RECENT_S:
            self._deaths.popleft()
        at = now + self._backoff_s[min(len(self._deaths), len(self._backoff_s) - 1)]
        self._deaths.append(now)
        if len(self._kills) == KILLS_AN_HOUR:
            at = max(at, self._kills[0] + HOUR_S)
        return at
