"""What loads brought: seconds until first tokens and seconds of prefill saved, by tier, and seconds lost.

Prefill not spent is what computing the loaded tokens would have taken, by the prefill estimate. Of that, a first token
comes earlier by what loading them did not take: the wait for their promotion and the copy to the engine. A load that
took longer than computing would have counts as lost, as does a wait that ends without a load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nixl_tiers.core.counters import Counters
from nixl_tiers.core.prefill import PrefillEstimate


@dataclass
class Load:
    """Of one request: from token `start` to `end`, copied to the engine since `began_s`. `tokens`: by the tier that
    they came from. `waited`: for which tier, and how long."""

    start: int
    end: int
    began_s: float
    waited: tuple[str, float] | None = None
    tokens: dict[str, int] = field(default_factory=dict)


class Savings:
    """Adds what each load brought to the counters of its tiers. `counters`: of a tier, by its name."""

    def __init__(self, prefill: PrefillEstimate, counters: Callable[[str], Counters]) -> None:
        self._prefill = prefill
        self._counters = counters
        self._loads: dict[str, Load] = {}  # by request, which has one load at a time

    def load_began(self, request: str, load: Load) -> None:
        self._loads[request] = load

    def load_ended(self, request: str, now: float) -> None:
        """The engine has what it loaded. Nothing is counted while the speed of prefill is unknown."""
        load = self._loads.pop(request, None)
        # A step is needed in either case, for the token behind the load at least.
        with_load = None if load is None else self._prefill.seconds(load.end, load.end + 1)
        without = None if load is None else self._prefill.seconds(load.start, load.end + 1)
        if load is None or with_load is None or without is None or not load.tokens:
            return
        total = sum(load.tokens.values()) or 1
        took = dict.fromkeys(load.tokens, 0.0)
        if load.waited is not None:
            took[load.waited[0]] = load.waited[1]
        for name, took_s in took.items():
            share = load.tokens.get(name, 0) / total
            saved_s = (without - with_load) * share
            earlier_s = saved_s - took_s - (now - load.began_s) * share
            counters = self._counters(name)
            counters.saved_prefill_s += saved_s
            counters.saved_first_token_s += max(0.0, earlier_s)
            counters.lost_slower_s += max(0.0, -earlier_s)

    def load_failed(self, request: str, now: float) -> None:
        """It computes what it loaded."""
        load = self._loads.pop(request, None)
        if load is not None:
            if load.waited is not None:
                self._counters(load.waited[0]).lost_vain_s += load.waited[1]
            for name, tokens in load.tokens.items():
                share = tokens / (sum(load.tokens.values()) or 1)
                self._counters(name).lost_vain_s += (now - load.began_s) * share

    def forget(self, request: str) -> None:
        """It has ended."""
        self._loads.pop(request, None)

    def reset(self) -> None:
        """No load of before a reset is reported as ended."""
        self._loads = {}
