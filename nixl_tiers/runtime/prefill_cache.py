"""The prefill estimate between starts: samples in the user's cache directory, per namespace (the model with all that
shapes its bytes) and device. So the first request after a restart is priced too."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from pathlib import Path
from typing import Final

from nixl_tiers.base.cache import cache_folder, write_whole
from nixl_tiers.base.chunk import Namespace
from nixl_tiers.core.prefill import MIN_SAMPLES, PrefillEstimate, Sample
from nixl_tiers.runtime.hold import Hold

log = logging.getLogger(__name__)

_VERSION: Final = 1
REMEMBER_EVERY: Final = 1024  # steps that computed prompts; sooner while there were few


class PrefillCache:
    """One file. Without a cache directory nothing is kept, and the speed is learned again."""

    def __init__(self, namespace: Namespace, device: str) -> None:
        """`device`: the name of what computes, with whatever else its speed depends on."""
        folder = cache_folder()
        digest = hashlib.sha256(f"{_VERSION}:{namespace.digest.hex()}:{device}".encode()).hexdigest()[:16]
        self.device = device
        # Steps that computed prompts: as soon as a speed is known, since vLLM kills an engine that is to end at once.
        self._remember_at = MIN_SAMPLES
        self.path: Path | None = folder / f"prefill-{digest}.json" if folder else None

    def recall(self) -> list[Sample]:
        """What was kept; empty if nothing was, or it cannot be read. May wait for the medium."""
        try:
            found = json.loads(self.path.read_bytes()) if self.path else {"samples": []}
            return [(int(tokens), float(context), float(seconds)) for tokens, context, seconds in found["samples"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            log.info("nixl_tiers: the prefill speed is learned anew, because %s cannot be read: %s", self.path, error)
            return []

    def take_due(self, prefill: PrefillEstimate) -> list[Sample]:
        """The estimate has seen another step: its samples, if it is time to remember them, else none."""
        if prefill.seen < self._remember_at:
            return []
        self._remember_at = prefill.seen + min(prefill.seen, REMEMBER_EVERY)
        return prefill.samples()

    def remember_soon(self, samples: list[Sample]) -> None:
        """`remember` on a thread of its own: a medium may take its time, and this is the scheduler's."""
        threading.Thread(target=self.remember, args=(samples,), name="nixl_tiers prefill", daemon=True).start()

    def remember(self, samples: list[Sample]) -> None:
        """For `recall`. May wait for the medium."""
        with contextlib.suppress(OSError):
            if self.path:
                write_whole(self.path, json.dumps({"device": self.device, "samples": samples}).encode())


class PrefillSpeed:
    """The core's prefill estimate, as the engine observes it, and where it is kept, if it is."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self.cache: PrefillCache | None = None

    def keep(self, cache: PrefillCache) -> None:
        """Go on with the estimate of the last start, and keep it for the next."""
        samples = cache.recall()
        with self._hold as core:
            core.prefill.restore(samples)
            self.cache = cache
            speed = core.prefill.tokens_per_s
        if speed is not None:
            log.info("nixl_tiers: at the last start %s computed %.0f tokens of prompts a second", cache.device, speed)

    def observe(self, tokens: int, context: float, seconds: float) -> None:
        """A step has computed `tokens` tokens of prompts, with `context` tokens up to each on average, in `seconds`."""
        cache = self.cache
        with self._hold as core:
            core.prefill.observe(tokens, context, seconds)
            samples = cache.take_due(core.prefill) if cache is not None else []
        if cache is not None and samples:
            cache.remember_soon(samples)

    def close(self) -> None:
        with self._hold as core:
            samples = core.prefill.samples()
        if self.cache is not None and samples:
            self.cache.remember(samples)
