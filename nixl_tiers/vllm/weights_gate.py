"""What may be found and stored after the weights of a running engine have been changed in place.

vLLM reports no such change, so the ranks do, in the host region (weight_changes.py). Of before it there may be left:

- chunks in the tiers: a new epoch hides them;
- copies on their way into the tiers: their rows are dropped, and the new epoch begins when they have ended;
- KV in vLLM's own prefix cache, which requests hit, compute upon and offer: the cache is in doubt until vLLM resets its
  connector, after its cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

_DOUBT: Final = (
    "nixl_tiers: the model's weights were changed in place, and vLLM's own prefix cache may have KV of before: %s; "
    "call reset_prefix_cache(reset_connector=True) after such a change (POST /reset_prefix_cache?reset_external=true)"
)


class WeightsGate:
    """`closed`: nothing is found or stored, as the weights are being changed, or the epoch of the new ones has not
    begun. `in_doubt`: vLLM's own cache may have KV of other weights than the present ones."""

    def __init__(self, weights: Callable[[], tuple[int, ...]], *, kept: bool) -> None:
        """`weights`: of each rank a number that changes with its weights, and is odd while they do.
        `kept`: the configuration says that they never change (`on_reset: keep`)."""
        self._weights = weights
        self._kept = kept
        self._seen = weights()
        self.closed = False
        self.in_doubt = False
        self.knows_own_hits = False  # whether `began_at` is called for every request
        self._computed = False  # since the last reset: so there may be something in vLLM's own cache
        # In doubt: requests that began, since the last change, with nothing of vLLM's own cache; whether they load.
        self._fresh: dict[str, bool] = {}

    def look(self) -> bool:
        """Whether the weights are being changed, or have been since the last call."""
        weights = self._weights()
        if weights == self._seen:
            return False
        self._seen = weights
        self._fresh.clear()
        if not self.closed:
            log.log(
                logging.WARNING if self._kept else logging.INFO,
                "nixl_tiers: the model's weights are changed in place: what was stored before is not found again%s",
                ", although on_reset is keep" if self._kept else "",
            )
        self.closed = True
        if self._computed and not self.in_doubt:
            self.in_doubt = True
            log.warning(
                _DOUBT,
                "until it is reset, only requests without a hit in it are stored"
                if self.knows_own_hits
                else "until the connector is reset, nothing is stored",
            )
        return True

    @property
    def quiet(self) -> bool:
        """Whether no change was running at the last `look`."""
        return not any(number % 2 for number in self._seen)

    def began_at(self, request: str, tokens: int) -> None:
        """vLLM has found so many tokens, of whole blocks, in its own cache for a request; it looks at each new
        beginning, and last in the step in which the request is scheduled, or its load begins."""
        if self.in_doubt and tokens == 0:
            self._fresh[request] = False
        else:
            self._fresh.pop(request, None)

    def load_began(self, request: str) -> None:
        if request in self._fresh:
            self._fresh[request] = True

    def scheduled_at(self, request: str, tokens: int) -> None:
        """The first step of a request goes on from so many tokens: without a load, those of a part of a block that vLLM
        found, or another connector's."""
        if tokens and not self._fresh.get(request, True):
            del self._fresh[request]

    def may_store(self, request: str) -> bool:
        return not self.closed and (not self.in_doubt or request in self._fresh)

    def computed(self) -> None:
        """Something may be computed, or loaded by another connector, which vLLM's own cache keeps."""
        self._computed = True

    def ended(self, request: str) -> None:
        self._fresh.pop(request, None)

    def opened(self) -> None:
        """A new epoch has begun since the last change, without anything of before."""
        self.closed = False

    def reset(self) -> None:
        """vLLM has reset its own cache, as far as StoreGate finds, and the connector."""
        self.in_doubt = self._computed = False
        self._fresh.clear()
