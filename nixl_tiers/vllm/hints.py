"""Hints: what a request asks for the time after its end, and how soon what it stores may go.

They come as actions of vLLM's `kv_hints`, for which vLLM defines neither names nor payloads, or as fields of ours in
`kv_transfer_params`, which is the only way over HTTP where vLLM's server does not pass `kv_hints` on. A client wrote
them, so whatever they hold is an answer and never an exception. Each one ends in exactly one `Outcome`, and one that
cannot be understood is ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from nixl_tiers.core.retention import LONGEST_S

MAX_ACTIONS: Final = 16  # of one request


class Verb(StrEnum):
    RETAIN = "retain"
    PREFETCH = "prefetch"
    PRIORITY = "priority"


class Outcome(StrEnum):
    ACCEPTED = "accepted"
    CLIPPED = "clipped"  # for a shorter time, or fewer chunks, than was asked for
    REJECTED = "rejected"  # not understood, or no room
    UNKNOWN = "unknown"  # an action that we do not have


@dataclass(frozen=True)
class AtEnd:
    """To be done when the request ends. `clipped`: it asked for a longer time."""

    verb: Verb
    seconds: float
    clipped: bool


@dataclass(frozen=True)
class Hints:
    """`evict_first`: what the request stores is evicted before everything else."""

    evict_first: bool = False
    at_end: tuple[AtEnd, ...] = ()


NO_HINTS: Final = Hints()
FIELDS: Final = {"retain_s": Verb.RETAIN, "prefetch_s": Verb.PREFETCH, "priority": Verb.PRIORITY}
# Types as other orchestrators write theirs (Dynamo's kv.fetch); the actions are those of vLLM's RFC 51428.
_ACTIONS: Final = {
    "kv.retain": (Verb.RETAIN, "ttl_s"),
    "kv.pin": (Verb.RETAIN, "ttl_s"),
    "kv.prefetch": (Verb.PREFETCH, "after_s"),
    "kv.priority": (Verb.PRIORITY, "priority"),
}
VERSION: Final = "1"


class HintsReader:
    """`report`: logs a mistake, by its kind. `requests`: how many have carried `kv_hints`; `outcomes`: of all hints."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self.requests = 0
        self.outcomes: Counter[Outcome] = Counter()

    def read(self, own: Mapping[object, object], envelope: Any) -> Hints:
        """`own`: the fields of ours; `envelope`: vLLM's KvHintsEnvelope, or None. Never raises."""
        wishes = [(verb, own[name], name) for name, verb in FIELDS.items() if name in own]
        if envelope is not None:
            self.requests += 1
            actions = getattr(envelope, "actions", ())
            actions = actions if isinstance(actions, (list, tuple)) else ()
            if (others := len(actions) - MAX_ACTIONS) > 0:
                self._reject("many", f"has more than {MAX_ACTIONS} actions in kv_hints: the others are ignored", others)
            wishes += [wish for action in actions[:MAX_ACTIONS] if (wish := self._wish(action)) is not None]
        evict_first, at_end = False, []
        for verb, value, name in wishes:
            seconds = _seconds(value)
            if verb is Verb.PRIORITY and isinstance(value, str) and value in ("low", "normal"):
                self.outcomes[Outcome.ACCEPTED] += 1
                evict_first = value == "low"
            elif verb is Verb.PRIORITY:
                self._reject(name, f'has a {name} that is not "low" or "normal": it is ignored')
            elif seconds is None:
                self._reject(name, f"has a {name} that is not a number of seconds: it is ignored")
            else:
                at_end.append(AtEnd(verb, min(seconds, LONGEST_S), seconds > LONGEST_S))
        return Hints(evict_first, tuple(at_end))

    def ended(self, hint: AtEnd, *, done: bool) -> None:
        """A request has ended and this was `done`: all of it for a retention, else it was clipped."""
        if not done:
            self.outcomes[Outcome.CLIPPED if hint.verb is Verb.RETAIN else Outcome.REJECTED] += 1
        else:
            self.outcomes[Outcome.CLIPPED if hint.clipped else Outcome.ACCEPTED] += 1

    def _wish(self, action: Any) -> tuple[Verb, object, str] | None:
        kind, version, payload = (getattr(action, name, None) for name in ("action_type", "action_version", "payload"))
        ours = isinstance(version, str) and version.partition(".")[0] == VERSION
        if not (ours and isinstance(kind, str) and kind in _ACTIONS):
            self.outcomes[Outcome.UNKNOWN] += 1
            self._report("action", f"has an action in kv_hints that is none of {', '.join(_ACTIONS)}: it is ignored")
            return None
        verb, field = _ACTIONS[kind]
        # With a target besides (a session, a range of tokens) it would be wrong to take all of the request.
        if not isinstance(payload, Mapping) or list(payload) != [field]:
            self._reject(kind, f'has a {kind} whose payload is not {{"{field}": ...}} alone: it is ignored')
            return None
        return verb, payload[field], f"{field} of {kind}"

    def _reject(self, kind: str, text: str, count: int = 1) -> None:
        self.outcomes[Outcome.REJECTED] += count
        self._report(kind, text)


def _seconds(value: object) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and value >= 0 else None  # type: ignore[operator,return-value]
