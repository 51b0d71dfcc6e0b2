"""The KV groups of a model: which of them a key belongs to, and how many tokens its chunk has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from nixl_tiers.vllm.compat import OffloadKey, ReqContext, get_offload_group_idx, position_of


class KvGroups:
    """`groups`: vLLM's number of each offloaded group, in the order of OffloadingConfig.groups; `chunk_tokens`: of a
    chunk of each, or empty if they are not known."""

    def __init__(self, groups: Sequence[int], chunk_tokens: Sequence[int] = ()) -> None:
        self.place = {group: place for place, group in enumerate(groups)}
        self.chunk_tokens = chunk_tokens or [0] * len(groups)

    def __len__(self) -> int:
        return len(self.place)

    def known_tokens(self) -> dict[int, int]:
        """Tokens of a chunk by vLLM's number of its group, where they are known."""
        return {group: tokens for group, place in self.place.items() if (tokens := self.chunk_tokens[place])}

    def counts(self, keys: Sequence[OffloadKey]) -> list[int]:
        """How many of `keys` each group has; vLLM orders keys by group."""
        if len(self.place) == 1:
            return [len(keys)]
        counts = [0] * len(self.place)
        for key in keys:
            counts[self.place[get_offload_group_idx(key)]] += 1
        return counts

    def saved_tokens(self, keys: Sequence[OffloadKey], counts: Sequence[int]) -> list[int]:
        """How many tokens each of `keys` saves from being computed: those of the group that loads most tokens, as the
        chunks of all groups are of the same tokens. `counts`: of `keys`."""
        loaded = [count * tokens for count, tokens in zip(counts, self.chunk_tokens, strict=True)]
        longest = loaded.index(max(loaded))
        tokens = self.chunk_tokens[longest]
        if len(self.place) == 1:
            return [tokens] * len(keys)
        return [tokens if self.place[get_offload_group_idx(key)] == longest else 0 for key in keys]

    def end(self, keys: Sequence[OffloadKey], counts: Sequence[int], context: ReqContext) -> int:
        """The end token of the last of `keys`, which vLLM orders within a group as in the prompt. `counts`: of
        `keys`."""
        lasts = (keys[place - 1] for place, count in zip(accumulate(counts), counts, strict=True) if count)
        return max(position_of(key, context) for key in lasts)

    def in_prefix_order(self, keys: list[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """By end token, so that under pressure all groups keep the same prefix."""
        if len(self.place) == 1:
            return keys
        return sorted(keys, key=lambda key: position_of(key, context))
