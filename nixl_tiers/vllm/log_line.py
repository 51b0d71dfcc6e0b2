"""What vLLM logs of a connector every ten seconds: what happened in them, in one sentence. /metrics has all numbers."""

from __future__ import annotations

from typing import Any

from nixl_tiers.base.metrics import PREFIX
from nixl_tiers.vllm.compat import OffloadingConnectorStats


class LoggedStats(OffloadingConnectorStats):
    """The statistics of some seconds, which are logged as `KV Transfer metrics: loaded=1,664 tokens from file, ...`.

    vLLM's own class logs every counter of every tier: some 7,000 characters.
    """

    def reduce(self) -> dict[str, Any]:
        """What is logged, by what happened; what did not happen is left out."""
        values = self._of("hit_tokens")
        said = {
            "loaded": ", ".join(f"{tokens:,.0f} tokens from {tier}" for (tier,), tokens in values.items() if tokens),
            "stored": _chunks(sum(n for (tier, why), n in self._of("added_chunks").items() if why == "stored")),
            "missed": _chunks(sum(self._of("misses").values())),
            "not written": _chunks(sum(self._of("drops").values())),
            "failed": _chunks(sum(self._of("failures").values())),
            "corrupt": _chunks(sum(n for (_, why), n in self._of("removed_chunks").items() if why == "corrupt")),
        }
        waited = sum(sum(samples) for samples in self._of("wait_seconds").values())
        if waited >= 0.05:
            said["waited"] = f"{waited:.1f} s"
        return {what: text for what, text in said.items() if text}

    def is_empty(self) -> bool:
        """Then vLLM logs nothing."""
        return not self.reduce()

    def _of(self, name: str) -> dict[tuple[str, ...], Any]:
        found: dict[tuple[str, ...], Any] = self.data.get("data", {}).get(PREFIX + name, {})
        return found


def _chunks(count: float) -> str:
    return f"{count:,.0f} chunk{'s' * (count != 1)}" if count else ""
