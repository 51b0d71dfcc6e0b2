"""Which chunks may be stored and found after vLLM's connector was reset, or the engine's weights were changed.

`StoreGate`. `reset_prefix_cache(reset_connector=True)` goes wrong in two ways in vLLM 0.32 and 0.33
(docs/internals/vllm.md):

- Live requests offer all their chunks again, from the first on. Their lists still contain blocks that a sliding window
  has freed and that other requests own by now, whose KV would be stored under valid keys; and all of it was computed
  before the reset, while the new namespace stands for the weights after it.
- The connector is reset even if vLLM's own prefix cache could not be reset because requests held blocks. New requests
  then hit KV from before the reset, offer it too, and compute the rest on top of it.

`WeightsGate`. vLLM does not report that the weights of a running engine were changed in place, so the ranks do, in the
host region (weight_changes.py). Of before it there may be left:

- chunks in the tiers: a new epoch hides them;
- copies on their way into the tiers: their rows are dropped, and the new epoch begins when they have ended;
- KV in vLLM's own prefix cache, which requests hit, compute upon and offer: the cache is in doubt until vLLM resets its
  connector, after its cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Final

from nixl_tiers.vllm.compat import OffloadKey, ReqContext, ScheduleEndContext, position_of, positions_of
from nixl_tiers.vllm.own_hits import OwnHits

log = logging.getLogger(__name__)

NOTHING: Final = -1  # in place of a position: no chunk of this request may be stored


class StoreGate:
    """Decides which of the chunks that vLLM offers are stored. One for a manager, which reports all requests to it.

    `kept`: the weights never change in place (`on_reset: keep`), so what is computed from KV of before a reset is
    valid. `own`: what requests began with. Where that is not known, `one_block` says that a chunk is one block, so that
    a request whose look-up begins at its first chunk had no block in vLLM's own cache. `holding`: requests that may
    hold blocks: looked up or scheduled, and not ended.
    """

    def __init__(self, own: OwnHits, *, kept: bool, one_block: bool) -> None:
        self._own = own
        self._kept = kept
        self._one_block = one_block
        self.holding: set[str] = set()
        self._blocked: set[str] = set()  # alive at a reset and not looked up since: they store nothing
        self._allocated: set[str] = set()  # of these, those that certainly do: loaded or scheduled, not preempted since
        self._stale_cache = False
        # After a reset, until it is known whether vLLM's cache was empty: requests that may have held blocks then,
        # those that certainly did unless the reset preempted them, and whether the step that reports preemptions is to
        # come.
        self._unsettled: set[str] | None = None
        self._certain: set[str] = set()
        self._first_step = False
        # Only while the cache may be stale: the position from which on a request's chunks may be stored. A look-up
        # counts if the request is scheduled in the same step; if not, vLLM looks up its blocks again and may not call
        # us.
        self._from: dict[str, int] = {}
        self._looked_up: dict[str, int] = {}
        self._first_end: dict[str, int] = {}  # end token of a request's shortest first chunk

    @property
    def in_doubt(self) -> bool:
        """Whether vLLM's own prefix cache may hold KV of before a reset."""
        return self._stale_cache

    @property
    def shut(self) -> bool:
        """Whether some chunks must not be stored now."""
        return self._stale_cache or bool(self._blocked)

    @property
    def watches(self) -> bool:
        """Whether each look-up of a request tells something new, and not only its first one."""
        return self._stale_cache or self._unsettled is not None

    def looked_up(self, context: ReqContext, position: int) -> None:
        """The first look-up of a request in a step, of the chunk that ends at `position`: its block lists are new."""
        self.holding.add(context.req_id)
        self._blocked.discard(context.req_id)
        if self._unsettled is not None and context.req_id not in self._certain:
            self._unsettled.discard(context.req_id)  # it waits, and was not preempted since: it held nothing
        if self._stale_cache:
            self._looked_up[context.req_id] = self._storable_from(context, position)

    def load_began(self, request: str) -> None:
        """Blocks were allocated to a request, to load into."""
        self.holding.add(request)
        self._allocated.add(request)

    def allowed(self, keys: Iterable[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Those of the offered `keys` that may be stored."""
        if context.req_id in self._blocked:
            return []
        if not self._stale_cache:
            return list(keys)
        if self._own.known and not self._kept:
            return list(keys) if self._own.has_none(context.req_id) else []
        # vLLM 0.33 offers chunks before it ends the step, 0.32 after that.
        begin = self._from.get(context.req_id, self._looked_up.get(context.req_id, NOTHING))
        return [] if begin == NOTHING else [key for key in keys if position_of(key, context) >= begin]

    def end_step(self, context: ScheduleEndContext) -> None:
        preempted = set(context.preempted_req_ids)
        self.holding.update(context.new_req_ids)
        self._allocated -= preempted
        self._allocated.update(context.new_req_ids)
        if self._unsettled is not None:
            self._judge(self._unsettled, preempted, begun=bool(self._looked_up or context.new_req_ids))
        if self._stale_cache:
            for request in preempted:
                self._from.pop(request, None)
            for request in context.new_req_ids:
                self._from[request] = self._looked_up.get(request, NOTHING)
        self._looked_up.clear()

    def ended(self, request: str) -> None:
        self.holding.discard(request)
        self._allocated.discard(request)
        self._blocked.discard(request)
        self._from.pop(request, None)
        self._looked_up.pop(request, None)
        self._first_end.pop(request, None)

    def reset(self, alive: Collection[str], loading: Collection[str]) -> None:
        """`alive`: all requests; `loading`: those with an open load, which hold blocks even if they have ended."""
        self._blocked.update(alive)
        self._own.clear()
        self._from.clear()
        self._looked_up.clear()
        holding = self.holding.union(loading)
        if holding:
            self._unsettled, self._stale_cache = holding, True
            self._certain, self._first_step = self._allocated.union(loading), True
        else:
            self._settle(True)

    def weights_changed(self) -> None:
        """They did change in place: what is computed from KV of before a reset may not be valid, whatever `kept`."""
        self._kept = False

    def _judge(self, unsettled: set[str], preempted: set[str], *, begun: bool) -> None:
        """After a step that preempted these requests, and has `begun` to look up or run others or not."""
        left = unsettled - preempted if self._first_step else unsettled
        # vLLM starts no request in a step in which it preempts for lack of blocks. So in a step that does both, it was
        # the reset that preempted all running requests.
        by_reset = self._first_step and begun and bool(preempted) and left.isdisjoint(self._certain)
        if not left or by_reset:
            self._settle(True)
        elif left & (self._certain | preempted) or left - self.holding:
            self._settle(False)  # a request held blocks, or has ended without showing whether it did
        else:  # requests that waited for storage or for room, as far as is known: their next look-ups show
            self._unsettled, self._first_step = left, False

    def _settle(self, emptied: bool) -> None:
        """vLLM's own cache was empty when the connector was reset, or was not.

        It preempts all requests first if asked to, as for sleep and pause, and then no request holds a block.
        """
        self._unsettled = None
        if not emptied:
            log.warning(
                "nixl_tiers: vLLM reset the connector while requests held blocks, so its own prefix cache still has KV "
                "from before it; until a reset finds no blocks held (or preempts: reset_running_requests), %s",
                "only what is beyond a hit in that cache is stored"
                if self._kept
                else "only requests without a hit in that cache are stored"
                if self._own.known or self._one_block
                else "nothing is stored, as OffloadingConnector does not show a hit in that cache that ends inside a "
                "chunk; NixlTiersConnector does",
            )
        self._stale_cache = not emptied
        if emptied:
            self._from.clear()

    def _storable_from(self, context: ReqContext, position: int) -> int:
        if self._kept:
            return position
        if context.req_id not in self._first_end:
            self._first_end[context.req_id] = min(positions_of(context).values())
        return 0 if self._one_block and position <= self._first_end[context.req_id] else NOTHING


_DOUBT: Final = (
    "nixl_tiers: the model's weights were changed in place, and vLLM's own prefix cache may have KV of before: %s; "
    "call reset_prefix_cache(reset_connector=True) after such a change (POST /reset_prefix_cache?reset_external=true)"
)


class WeightsGate:
    """`closed`: nothing is found or stored, as the weights are being changed, or the epoch of the new ones has not
    begun. `in_doubt`: vLLM's own cache may have KV of other weights than the present ones."""

    def __init__(self, weights: Callable[[], tuple[int, ...]], own: OwnHits, *, kept: bool) -> None:
        """`weights`: of each rank a number that changes with its weights, and is odd while they do. `own`: what
        requests began with. `kept`: the configuration says that weights never change (`on_reset: keep`)."""
        self._weights = weights
        self._own = own
        self._kept = kept
        self._seen = weights()
        self.closed = False
        self.in_doubt = False
        self.computed = False
        """Whether something was, since the last reset, or loaded by another connector: vLLM's own cache keeps it."""

    def look(self) -> bool:
        """Whether the weights are being changed, or have been since the last call."""
        weights = self._weights()
        if weights == self._seen:
            return False
        self._seen = weights
        self._own.clear()
        if not self.closed:
            log.log(
                logging.WARNING if self._kept else logging.INFO,
                "nixl_tiers: the model's weights are changed in place: what was stored before is not found again%s",
                ", although on_reset is keep" if self._kept else "",
            )
        self.closed = True
        if self.computed and not self.in_doubt:
            self.in_doubt = True
            log.warning(
                _DOUBT,
                "until it is reset, only requests without a hit in it are stored"
                if self._own.known
                else "until the connector is reset, nothing is stored",
            )
        return True

    @property
    def quiet(self) -> bool:
        """Whether no change was running at the last `look`."""
        return not any(number % 2 for number in self._seen)

    def may_store(self, request: str) -> bool:
        return not self.closed and (not self.in_doubt or self._own.has_none(request))

    def opened(self) -> None:
        """A new epoch has begun since the last change, without anything of before."""
        self.closed = False

    def reset(self) -> None:
        """vLLM has reset its own cache, as far as StoreGate finds, and the connector."""
        self.in_doubt = self.computed = False
