"""What may be stored after a reset: tables of steps; the stress test shows the same on real engines."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key

from nixl_tiers.vllm.own_hits import OwnHits
from nixl_tiers.vllm.store_gate import StoreGate

TOKENS = 32
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]


class Play:
    """vLLM's part, by lines: the order in which it calls. `newer`: stores are offered before a step ends, as from 0.33
    on. A line is `verb:request,request ... = stored`; `@` are chunks of a look-up, tokens of an own hit. `begin`: a
    request is looked up, scheduled for the first time, and offers its chunks, 0 to 3; `alive`, `loads`, `own`, `part`,
    `reset` (with those that load) and `end` are outside of steps."""

    def __init__(self, *, kept: bool = False, one_block: bool = True, known: bool = False, newer: bool = False) -> None:
        self.own = OwnHits()
        self.own.known = known
        self.gate = StoreGate(self.own, kept=kept, one_block=one_block)
        self.alive: set[str] = set()
        self._newer = newer

    def lines(self, text: str) -> None:
        for line in filter(None, map(str.strip, text.splitlines())):
            asked, _, stored = line.partition(" = ")
            names: dict[str, list[str]] = {}
            for word in asked.split():
                verb, _, of = word.partition(":")
                names[verb] = of.split(",") if of else []
            assert self._line(names) == stored, line

    def _line(self, names: dict[str, list[str]]) -> str:
        (verb, of), *_ = names.items()
        name, _, number = "".join(of[:1]).partition("@")
        match verb:
            case "alive":
                self.alive.add(name)
            case "loads":
                self.gate.load_began(name)
            case "own":
                self.own.began_at(name, int(number))
            case "part":
                self.own.scheduled_at(name, int(number))
            case "reset":
                self.gate.reset(self.alive, of)
            case "end":
                self.alive.discard(name)
                self.gate.ended(name)
            case "clean":
                return str(not self.gate.in_doubt)
            case "settled":
                return str(self.gate._unsettled is None)
            case "begin":
                return self._step(look=of, new=[name], offer=[name], preempted=names.get("preempted", []))
            case _:
                return self._step(**names)
        return ""

    def _step(self, **names: list[str]) -> str:
        for name, _, chunk in (each.partition("@") for each in names.get("look", [])):
            self.alive.add(name)
            self.gate.looked_up(request(name), TOKENS * (int(chunk or 0) + 1))
        self.alive.update(names.get("new", []))
        end = ScheduleEndContext(names.get("new", []), set(names.get("preempted", [])))
        if not self._newer:
            self.gate.end_step(end)
        stored = [KEYS.index(key) for name in names.get("offer", []) for key in self.gate.allowed(KEYS, request(name))]
        if self._newer:
            self.gate.end_step(end)
        return "".join(map(str, stored)) or "-" * ("offer" in names)


def request(name: str) -> ReqContext:
    context = ReqContext(name)
    for index, key in enumerate(KEYS):
        context.set_offload_key_position(key, TOKENS * (index + 1))
    return context


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("without a reset", {}, "begin:a = 0123 | begin:b@2 = 0123 | clean = True"),
    (
        "alive at a reset, until they end",
        {},
        """begin:old = 0123 | reset | offer:old = - | begin:new = 0123 | offer:old = - | end:old | begin:old = 0123""",
    ),
    (
        "preempted by the reset: after a new look-up, as vLLM's own cache was empty",
        {},
        """begin:old = 0123 | begin:other = 0123 | reset | look:old preempted:old,other offer:old = 0123 |
        offer:other = - | look:other@2 offer:other = 0123 | clean = True""",
    ),
    ("waited without blocks", {}, "alive:waits | reset | begin:new@2 = 0123 | begin:waits@2 = 0123"),
    (
        "computed from stale blocks",
        {},
        "begin:old = 0123 | reset | begin:hit@1 = - | offer:hit = - | begin:new = 0123",
    ),
    ("constant weights", {"kept": True}, "begin:old = 0123 | reset | offer:old = - | begin:hit@2 = 23"),
    ("a hit of less than a chunk cannot be seen", {"one_block": False}, "begin:old = 0123 | reset | begin:new = -"),
    (
        "a reset without requests",
        {},
        "begin:old = 0123 | reset | begin:hit@2 = - | end:hit | end:old | reset | clean = True | begin:new@2 = 0123",
    ),
    ("ended while loading", {}, "begin:old = 0123 | end:old | reset:old | begin:new@2 = -"),
    (
        "a look-up counts only if the request is scheduled in its step",
        {},
        """begin:old = 0123 | reset | look:late | new:late offer:late = - | begin:again = 0123 | preempted:again |
        offer:again = -""",
    ),
    (
        "a preemption without a reset",
        {},
        """begin:one = 0123 | begin:two = 0123 | reset | preempted:two | preempted:one,two | begin:hit@1 = -""",
    ),
    *(
        (
            "a reset that preempts, with waiting requests",
            {"one_block": one_block},
            """begin:again = 0123 | begin:old = 0123 | preempted:again | look:waits | reset | look:old preempted:old |
            clean = True | begin:hit@2 = 0123 | look:waits new:waits offer:waits = 0123""",
        )
        for one_block in (True, False)
    ),
    (
        "only waited: cleared by the next look-up of each",
        {},
        "look:one,two | reset | look:one | begin:hit@2 = - | look:two | begin:late@2 = 0123",
    ),
    *(
        (
            "ran without a look-up: vLLM does not report resumed requests",
            {},
            f"""begin:again = 0123 | preempted:again | begin:old = 0123 | reset | preempted:old | begin:hit@2 = - |
            {end} | look:old | begin:late@2 = - | settled = True""",
        )
        for end in ("preempted:again | look:again", "end:again | preempted:")
    ),
    *(
        (
            "held blocks, and its load failed, so that a reset which should preempt all fails",
            {},
            f"""begin:old = 0123 | look:holder | {held} | look:old preempted:old | begin:hit@2 = - | look:holder |
            begin:late@2 = -""",
        )
        for held in ("loads:holder | reset:holder", "loads:holder | reset", "new:holder | reset")
    ),
]
# NixlTiersConnector reports what each request begins with: chunks of several blocks can be judged.
KNOWN = [
    ("no own hit", {}, "own:new@0 | begin:new = 0123 | offer:new = 0123"),
    ("half a chunk", {}, "own:new@16 | begin:new = - | offer:new = -"),
    ("a chunk", {}, "own:new@32 | begin:new@1 = -"),
    ("less than a chunk in all", {}, "own:new@0 | new:new offer:new = 0123"),
    ("the next attempt replaces what one has shown", {}, "own:late@0 | look:late | own:late@16 | begin:late = -"),
    ("a part of a block", {}, "own:new@0 | part:new@8 | begin:new = -"),
    (
        "alive at a reset, whatever it began with",
        {},
        "own:two@0 | begin:two = 0123 | reset | offer:two = - | own:two@32 | look:two@1 offer:two = -",
    ),
    ("constant weights", {"kept": True}, "own:hit@64 | begin:hit@2 = 23"),
]
CASES += [
    (f"known: {name}", {"one_block": False, "known": True, **how}, f"begin:old = 0123 | reset | {text}")
    for name, how, text in KNOWN
]


@pytest.mark.parametrize("newer", [False, True], ids=["before 0.33", "0.33"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_is_stored(case: tuple[str, dict[str, Any], str], newer: bool) -> None:
    play = Play(newer=newer, **case[1])
    play.lines(case[2].replace("|", "\n"))
    for name in (*play.alive, "again"):
        play.gate.ended(name)
    gate = play.gate
    kept = [gate.holding, gate._allocated, gate._blocked, gate._from, gate._looked_up, gate._first_end]
    assert [each for each in kept if each] == [], "ended requests are forgotten"


@pytest.mark.parametrize(("known", "what"), [(True, "only requests without a hit"), (False, "NixlTiersConnector")])
def test_the_warning_says_what_is_stored(caplog: pytest.LogCaptureFixture, known: bool, what: str) -> None:
    Play(one_block=False, known=known).lines("begin:old = 0123\nreset\nbegin:new = -")
    assert [what in record.message for record in caplog.records] == [True]
