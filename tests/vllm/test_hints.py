"""What a request may ask for the time after it, in vLLM's kv_hints or in its kv_transfer_params."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

from nixl_tiers.core.retention import LONGEST_S
from nixl_tiers.vllm.hints import MAX_ACTIONS, AtEnd, Hints, Outcome, Verb
from nixl_tiers.vllm.request_options import RequestOptionsReader, Scope
from tests.support.vllm_scheduler import BLOCK
from tests.vllm.test_request_options import Rig, hashes_of

RETAIN = AtEnd(Verb.RETAIN, 60, False)


def action(kind: Any = "kv.retain", payload: Any = None, version: Any = "1.0") -> KvHintAction:
    return KvHintAction("id", kind, version, {"ttl_s": 60} if payload is None else payload)


def envelope(*actions: Any) -> KvHintsEnvelope:
    return KvHintsEnvelope("1.0", "message", list(actions))


def read(hints: Any = None, **own: Any) -> tuple[Hints, dict[Outcome, int]]:
    """What is understood, and the outcomes that are known before the request ends."""
    reader = RequestOptionsReader([], [])
    options = reader.read(ReqContext("r", kv_transfer_params={"nixl_tiers": own}, kv_hints=hints))
    assert options.store is Scope.ALL
    return options.hints, dict(reader.hints.outcomes)


@pytest.mark.parametrize(
    ("hints", "own"),
    [
        (envelope(action()), {}),
        (envelope(action("kv.pin", version="1")), {}),
        (envelope(action(version="1.7")), {}),
        (None, {"retain_s": 60}),
    ],
)
def test_retention_is_asked_for_in_either_way(hints: Any, own: dict[str, Any]) -> None:
    assert read(hints, **own) == (Hints(at_end=(RETAIN,)), {})


def test_other_hints_are_understood() -> None:
    asked = envelope(action("kv.prefetch", {"after_s": 0.5}), action("kv.priority", {"priority": "low"}))
    expected = Hints(True, (AtEnd(Verb.PREFETCH, 0.5, False),)), {Outcome.ACCEPTED: 1}
    assert read(asked) == expected
    assert read(None, prefetch_s=0.5, priority="low") == expected
    assert read(None, priority="normal") == (Hints(), {Outcome.ACCEPTED: 1})


@pytest.mark.parametrize(
    ("hints", "outcome", "sentence"),
    [
        (action("kv.demote"), Outcome.UNKNOWN, "has an action in kv_hints that is none of kv.retain, kv.pin, kv.pref"),
        (action(version="2.0"), Outcome.UNKNOWN, "has an action in kv_hints that is none of"),
        (action(version=None), Outcome.UNKNOWN, "has an action in kv_hints that is none of"),
        (action(["kv.retain"]), Outcome.UNKNOWN, "has an action in kv_hints that is none of"),
        ("kv.retain", Outcome.UNKNOWN, "has an action in kv_hints that is none of"),
        (action(payload={}), Outcome.REJECTED, 'has a kv.retain whose payload is not {"ttl_s": ...} alone'),
        (action(payload=60), Outcome.REJECTED, "has a kv.retain whose payload is not"),
        (action(payload={"ttl_s": 60, "session": "s"}), Outcome.REJECTED, "has a kv.retain whose payload is not"),
        (action(payload={"ttl_s": "60"}), Outcome.REJECTED, "has a ttl_s of kv.retain that is not a number of seconds"),
        (action(payload={"ttl_s": -1}), Outcome.REJECTED, "has a ttl_s of kv.retain that is not a number of seconds"),
        (action(payload={"ttl_s": float("nan")}), Outcome.REJECTED, "has a ttl_s of kv.retain that is not a number"),
        (action(payload={"ttl_s": True}), Outcome.REJECTED, "has a ttl_s of kv.retain that is not a number"),
        (
            action("kv.priority", {"priority": "high"}),
            Outcome.REJECTED,
            'has a priority of kv.priority that is not "low" or "normal"',
        ),
    ],
)
def test_a_hint_that_cannot_be_followed_is_counted_and_logged_once(
    hints: Any, outcome: Outcome, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(envelope(hints, hints, action())) == (Hints(at_end=(RETAIN,)), {outcome: 2})
    (message,) = caplog.messages
    assert message.startswith(f"nixl_tiers: a request {sentence}")
    assert message.endswith(": it is ignored")


def test_a_field_with_a_wrong_value_forbids_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert read(None, retain_s="long", prefetch_s=None, priority=1) == (Hints(), {Outcome.REJECTED: 3})
    assert len(caplog.messages) == 3


def test_of_a_request_only_so_many_actions_are_looked_at() -> None:
    hints, outcomes = read(envelope(*[action()] * 1000))
    assert hints.at_end == (RETAIN,) * MAX_ACTIONS
    assert outcomes == {Outcome.REJECTED: 1000 - MAX_ACTIONS}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["low", "normal"]) | st.text(max_size=3),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each, max_size=3),
    max_leaves=5,
)
FIELD = st.sampled_from(["ttl_s", "after_s", "priority"])
ACTION = st.builds(
    KvHintAction,
    action_id=JSON,
    action_type=st.sampled_from(["kv.retain", "kv.pin", "kv.prefetch", "kv.priority", "kv.share"]) | JSON,
    action_version=st.sampled_from(["1", "1.0", "2"]) | JSON,
    payload=JSON | st.dictionaries(FIELD, JSON, max_size=2),
)
OWN = st.dictionaries(st.sampled_from(["retain_s", "prefetch_s", "priority", "load"]), JSON) | JSON


@given(actions=st.lists(ACTION, max_size=MAX_ACTIONS + 4) | JSON, own=OWN, is_envelope=st.booleans())
def test_whatever_a_client_writes_is_an_answer(actions: Any, own: Any, is_envelope: bool) -> None:
    """And each action has exactly one outcome."""
    hints = KvHintsEnvelope("1.0", "m", actions) if is_envelope else actions
    reader = RequestOptionsReader([], [])
    options = reader.read(ReqContext("r", kv_transfer_params={"nixl_tiers": own}, kv_hints=hints))
    for each in options.hints.at_end:
        assert 0 <= each.seconds <= LONGEST_S
        reader.hints.ended(each, done=True)
    fields = [name for name in ("retain_s", "prefetch_s", "priority") if isinstance(own, dict) and name in own]
    count = len(actions) if is_envelope and isinstance(actions, list) else 0
    assert reader.hints.outcomes.total() == len(fields) + count


# --- in the engine's scheduler ---------------------------------------------------------------------------------


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(rows=16)
    yield rig
    rig.manager.shutdown()


def outcomes(stats: Any) -> dict[str, float]:
    """As metrics."""
    counts = stats.data["data"]["nixl_tiers:hint_actions"]
    return {outcome: count for (outcome,), count in counts.items() if count}


def fill(rig: Rig) -> None:
    for prompt in range(100, 108):
        rig.run(f"fill {prompt}", hashes_of(4, prompt))


def test_chunks_of_a_request_that_has_ended_are_retained_within_a_share(rig: Rig) -> None:
    kept, late = hashes_of(4, 1), hashes_of(4, 2)
    rig.run("kept", kept, {"nixl_tiers": {"retain_s": 600}})
    rig.run("late", late, {"nixl_tiers": {"retain_s": 600}})
    assert rig.coordinator.counters()["cpu"]["retained_rows"] == 4, "a quarter of the host's rows"
    fill(rig)
    assert rig.run("next turn", kept, {"nixl_tiers": {"store": "none"}}) == 4 * BLOCK
    assert rig.run("another", late, {"nixl_tiers": {"store": "none"}}) == 0
    assert outcomes(rig.manager.get_stats()) == {"accepted": 1, "clipped": 1}
    rig.manager.reset_cache()
    assert rig.coordinator.counters()["cpu"]["retained_rows"] == 0


def test_hints_of_vllm_are_acted_on_and_counted(rig: Rig) -> None:
    kept = hashes_of(3, 1)
    rig.run("first", kept)
    hints = envelope(action(), action("kv.share"), action("kv.prefetch", {"after_s": 1}), action(payload={}))
    context = ReqContext("hinted", kv_hints=hints)
    rig.manager.on_new_request(context)
    for number, key in enumerate(rig.keys("first")):
        context._offload_key_positions[key] = (number + 1) * BLOCK
    rig.manager.on_request_finished(context)
    fill(rig)
    assert rig.run("next turn", kept) == 3 * BLOCK
    stats = rig.manager.get_stats()
    assert stats is not None
    assert stats.data["data"]["nixl_tiers:kv_hint_requests"] == {(): 1.0}
    assert outcomes(stats) == {"accepted": 1, "unknown": 1, "rejected": 2}, "there is no tier to promote from"
    assert not rig.manager._wishes.at_end


def test_what_a_request_of_low_priority_stores_is_evicted_first(rig: Rig) -> None:
    usual, low = hashes_of(8, 1), hashes_of(8, 2)
    rig.run("usual", usual)
    rig.run("low", low, {"nixl_tiers": {"priority": "low"}})
    rig.run("other", hashes_of(8, 3))
    assert rig.run("usual again", usual, {"nixl_tiers": {"store": "none"}}) == 8 * BLOCK
    assert rig.run("low again", low, {"nixl_tiers": {"store": "none"}}) == 0
