"""Where the tokens of a prompt came from, by the counters of the server that answered it."""

from __future__ import annotations

from time import perf_counter, sleep
from typing import Final

from nixl_tiers.base.metrics import PREFIX
from nixl_tiers.cli.completions import Answer
from nixl_tiers.cli.scrape import Sample, scrape
from nixl_tiers.cli.tally import OWN_HITS, PROMPT_TOKENS

COMPUTED: Final = "computed"
CACHED: Final = "cached"
"""From a cache, of which it is not known which."""
SETTLE_S: Final = 2.0  # until an answer is in the server's counters
POLL_S: Final = 0.02
_CACHED_TOKENS: Final = "vllm:prompt_tokens_cached_total"
_BY_SOURCE: Final = "vllm:prompt_tokens_cached_by_source_total"  # of vLLM's own tiers
_NAMES: Final = {"device": "", "host": "cpu", "disk": "file", "external_unspecified": "external"}


class Counters:
    """The server's counters of prompt tokens, and what one request has added to them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._last = self._now()

    def added_by(self, answer: Answer) -> dict[str, float]:
        """Tokens by source since the last call; nothing if that cannot be told: others are asking too, or the counters
        do not come to agree with the answer."""
        end = perf_counter() + SETTLE_S
        while True:
            now = self._now()
            gained = {name: count - self._last.get(name, 0.0) for name, count in now.items()}
            asked, cached = gained.pop(PROMPT_TOKENS, 0.0), gained.pop(_CACHED_TOKENS, 0.0)
            told = answer.cached_tokens if answer.cached_tokens is not None else cached
            settled = asked >= answer.prompt_tokens and sum(gained.values()) >= told
            if settled or perf_counter() > end:
                self._last = now
                alone = settled and asked == answer.prompt_tokens
                return {**gained, COMPUTED: answer.prompt_tokens - told} if alone else {}
            sleep(POLL_S)

    def _now(self) -> dict[str, float]:
        found: dict[str, float] = {}
        page = scrape(self._url)
        ours = any(sample.name.startswith(PREFIX) for sample in page)
        for sample in page:
            if name := _source(sample, ours):
                found[name] = found.get(name, 0.0) + sample.value
        return found


def _source(sample: Sample, ours: bool) -> str:
    """What a counter counts; "" for what is not asked for."""
    if sample.name in (PROMPT_TOKENS, _CACHED_TOKENS):
        return sample.name
    if sample.name == OWN_HITS:
        return "gpu"
    if sample.name == f"{PREFIX}hit_tokens_total":
        return sample.labels["tier"]
    source = sample.labels.get("source", "")
    return _NAMES.get(source, source) if sample.name == _BY_SOURCE and not ours else ""
