"""Which requests are answered while rows of their loads are still to come, and how these loads end: as a stream, which
is an ordinary load for vLLM, but may have a gap (docs/internals/streams.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from nixl_tiers.vllm.compat import OffloadKey

MOST_WAITING: Final = 64  # requests that have not begun: each answer looks at all of them
SHARE: Final = 4  # a quarter of the GPU's blocks belongs to streams, at most,
SPARE: Final = 10  # and a tenth stays free behind the last


class Pool(Protocol):
    """vLLM's BlockPool."""

    num_gpu_blocks: int

    def get_num_free_blocks(self) -> int: ...


class Unit(NamedTuple):
    """How many tokens are a chunk, a block on the GPU, and what vLLM takes a hash of."""

    chunk: int
    block: int
    hash: int


class Gap(NamedTuple):
    """The load of a request brought its chunks before `chunk` only, and vLLM believes those up to token `end` to be
    stored."""

    request: Any
    end: int
    chunk: int


@dataclass(slots=True)
class _Stream:
    """`end`: the token behind its last; None until vLLM has begun to load. `found`: keys that vLLM has looked up."""

    request: Any
    blocks: int
    first: int  # token
    end: int | None = None
    found: list[OffloadKey] = field(default_factory=list)


class Streams:
    """For one scheduler's thread. Requests are vLLM's.

    `recompute`: whether all workers have said that vLLM computes what a load could not bring. `seen`: tells routers
    that a key has been found, which of a row that is to come must not be said before it is there; None if nobody
    listens. `find_nothing`: has a request find nothing from then on.
    """

    def __init__(
        self,
        recompute: Callable[[], bool],
        seen: Callable[[OffloadKey], None] | None,
        find_nothing: Callable[[str], None],
    ) -> None:
        self._recompute = recompute
        self._seen = seen
        self._find_nothing = find_nothing
        self._all_recompute = False
        self._unit: Unit | None = None
        self.pool: Pool | None = None
        self._alive: dict[str, Any] = {}
        self._waiting: set[str] = set()  # of these, those that have not begun, or not again after a preemption
        self._told: set[str] = set()  # those that were answered early before
        self._open: dict[str, _Stream] = {}
        self._answered: list[str] = []  # in this step
        self.gaps: dict[str, Gap] = {}

    def possible(self, unit: Unit) -> None:
        """NixlTiersConnector calls it: vLLM can take a load with a gap."""
        self._unit = unit

    # --- requests ----------------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        if self._unit is not None:
            self._alive[request.request_id] = request
            self._waiting.add(request.request_id)

    def end_step(self, began: Collection[str], preempted: Collection[str]) -> None:
        self._waiting.difference_update(began)
        self._waiting.update(name for name in preempted if name in self._alive)
        if self._answered:
            for name in self._answered:
                if (stream := self._open.get(name)) is not None and stream.end is None:
                    self._close(name)  # no blocks, or a reason of vLLM's own: it looks the request up again
            self._answered.clear()

    def ended(self, name: str) -> None:
        """The request has; its load may not have."""
        self._alive.pop(name, None)
        self._waiting.discard(name)
        self._told.discard(name)
        self.gaps.pop(name, None)

    def reset(self) -> None:
        """vLLM reports no end of a load of before a reset, and offers all chunks again."""
        for name, stream in self._open.items():
            if stream.end is not None:
                self._find_nothing(name)  # or a gap at its first block would have it load again
        self._open.clear()
        self._answered.clear()
        self.gaps.clear()

    # --- an answer ---------------------------------------------------------------------------------------------

    def end_of(self, name: str, first: int) -> int:
        """Up to which token a load of this request from token `first` on, the end of a chunk, may go that it is told of
        while rows are still to come; 0: there may be none."""
        request, unit = self._alive.get(name), self._unit
        if request is None or unit is None or name in self._told or request.num_preemptions:
            return 0
        if not self._is_wanted() or (blocks := self._free_blocks()) <= 0:
            return 0
        return 0 if self._is_shared(request, first + unit.chunk, unit) else first + blocks * unit.block

    def answered(self, name: str, first: int, end: int) -> None:
        """It was: of the rows of these tokens some are to come."""
        assert self._unit is not None
        self._told.add(name)
        self._open[name] = _Stream(self._alive[name], -(-(end - first) // self._unit.block), first)
        self._answered.append(name)

    def found(self, name: str, key: OffloadKey) -> bool:
        """vLLM was told so of `key`; whether that is to be said to routers only when the load has ended."""
        stream = self._open.get(name)
        if stream is None:
            return False
        stream.found.append(key)
        return True

    # --- a load ------------------------------------------------------------------------------------------------

    def began(self, name: str, end: int | None) -> None:
        """vLLM loads up to token `end`."""
        if (stream := self._open.get(name)) is not None:
            stream.end = end

    def load_ended(self, name: str) -> int | None:
        """All workers have ended the load of this request. Returns how many of its chunks vLLM takes from it; None: all
        of them, it was no stream."""
        stream = self._close(name)
        if stream is None or stream.end is None or self._unit is None:
            return None
        request, chunk = stream.request, self._unit.chunk
        if request.is_finished():
            return 0
        has: int = request.num_computed_tokens  # vLLM has cut it to the first block that any worker reported as invalid
        if has < stream.end:
            self.gaps[name] = Gap(request, stream.end, has // chunk)
            if not has:
                self._find_nothing(name)
        return max(0, min(has, stream.end) // chunk - stream.first // chunk)

    def computed(self, scheduled: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """Of the step that computes so many tokens of each request: those that have then computed all that an earlier
        load did not bring, and from which chunk on they are to be offered for storing. Not before: of a request that
        ends with an error vLLM stores blocks that were allocated and never computed."""
        for name, gap in list(self.gaps.items()):
            if name in scheduled and gap.request.num_computed_tokens + scheduled[name] >= gap.end:
                del self.gaps[name]
                yield name, gap.chunk

    # --- inside ------------------------------------------------------------------------------------------------

    def _is_wanted(self) -> bool:
        self._all_recompute = self._all_recompute or self._recompute()
        return self._all_recompute and len(self._waiting) <= MOST_WAITING

    def _free_blocks(self) -> int:
        """How many another stream may have."""
        if self.pool is None:
            return 0
        most = self.pool.num_gpu_blocks
        held = sum([stream.blocks for stream in self._open.values()])
        return min(most // SHARE - held, self.pool.get_num_free_blocks() - -(-most // SPARE))

    def _is_shared(self, request: Any, first_end: int, unit: Unit) -> bool:
        """Whether another request that waits begins with the same tokens up to here: vLLM would keep it back until the
        load has ended. A hash stands for all tokens up to its own."""
        place = first_end // unit.hash - 1
        mine = request.block_hashes[place]
        for name in self._waiting:
            hashes = self._alive[name].block_hashes
            if place < len(hashes) and hashes[place] == mine and name != request.request_id:
                return True
        return False

    def _close(self, name: str) -> _Stream | None:
        stream = self._open.pop(name, None)
        if stream is not None and self._seen is not None:
            for key in stream.found:
                self._seen(key)
        return stream
