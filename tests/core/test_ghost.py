"""What is worth storing: the ghost against a plain model, and the rule that goes by it."""

from __future__ import annotations

from hashlib import sha256
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.ghost import DECLINED, DRAWN, SAMPLE, UNKNOWN, WINDOW, Admission, Ghost, marks_of

FLOOR = WINDOW // 4


def chain(name: str, chunks: int, after: str = "") -> list[Key]:
    """A prompt's keys, as vLLM's are: each of all that is before it, and its KV group."""
    return [sha256(f"{after}/{name}/{place}".encode()).digest() + bytes(4) for place in range(chunks)]


def selective(rows: int = 1 << 14) -> Admission:
    """One that has seen enough, of which nothing came back."""
    admission = Admission(rows)
    admission.pays = 0.02
    admission._seen = admission._window / 2
    assert admission.selective
    return admission


def beginning(*, drawn: bool, chunks: int = 8, after: str = "") -> list[Key]:
    """Of a prompt that is drawn for the sample, or is not."""
    chains = (chain(str(number), chunks, after) for number in range(1000))
    return next(keys for keys in chains if (marks_of(keys)[0] >> 28 & 0xF == 0) is drawn)


# --- the ghost -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 40),
    prompts=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 6), st.sampled_from([0, DRAWN, DECLINED])), max_size=60
    ),
)
def test_ghost_knows_what_a_plain_model_knows(rows: int, prompts: list[tuple[int, int, int]]) -> None:
    """A place for each key of a table, and how many new keys came since."""
    ghost = Ghost(rows)
    places = len(ghost._cells)
    model: dict[int, tuple[Key, int, int]] = {}  # place -> key, when, flags
    now = 0
    for number, chunks, flags in prompts:
        keys = chain(str(number), chunks)
        marks = marks_of(keys)
        expected = []
        for key, mark in zip(keys, marks, strict=True):
            held, since, its = model.get(mark % places, (b"", 0, 0))
            expected.append(its if held == key and now - since < rows else UNKNOWN)
        assert ghost.find(marks) == expected
        now += expected.count(UNKNOWN)
        model |= {mark % places: (key, now, flags) for key, mark in zip(keys, marks, strict=True)}
        ghost.note(marks, [flags] * chunks, expected.count(UNKNOWN))


def test_ghost_remembers_as_many_keys_as_it_has_rows() -> None:
    """But for those whose place others took, a fifth."""
    ghost, rows = Ghost(4096), 4096
    keys = chain("a", 2 * rows)
    marks = marks_of(keys)
    for mark in marks:
        ghost.note([mark], [0], 1)
    found = ghost.find(marks)
    assert found[:rows].count(UNKNOWN) == rows
    assert 0.18 * rows < found[rows:].count(UNKNOWN) < 0.24 * rows


def test_ghost_takes_bytes_by_its_rows_and_has_a_bound() -> None:
    assert len(Ghost(1 << 20)._cells) * 8 <= 32 << 20
    assert len(Ghost(1 << 40)._cells) * 8 <= 64 << 20


def test_cleared_ghost_knows_nothing() -> None:
    ghost, marks = Ghost(64), marks_of(chain("a", 8))
    assert ghost.find(marks) == [UNKNOWN] * 8, "nor does a new one"
    ghost.note(marks, [0] * 8, 8)
    ghost.clear()
    assert ghost.find(marks) == [UNKNOWN] * 8


def test_keys_of_groups_are_told_apart() -> None:
    """Those of one position differ in their last bytes only."""
    ghost, keys = Ghost(64), chain("a", 8)
    ghost.note(marks_of(keys), [0] * 8, 8)
    assert ghost.find(marks_of([key[:-1] + b"\1" for key in keys])) == [UNKNOWN] * 8


# --- the rule --------------------------------------------------------------------------------------------------


def test_everything_is_stored_before_enough_was_seen() -> None:
    admission = Admission(1)
    admission.pays = 0.02
    for number in range(FLOOR // 8 - 1):
        assert admission.offered(chain(str(number), 8), str(number)) == 8
    assert admission.not_stored == 0
    assert admission.offered(beginning(drawn=False, after="new"), "r") == 0
    assert admission.not_stored == 8


def test_a_large_tier_has_to_see_more() -> None:
    admission = Admission(64 * WINDOW)
    admission.pays = 0.02
    for number in range(FLOOR):
        assert admission.offered(chain(str(number), 8), str(number)) == 8


def test_everything_is_stored_while_it_is_not_known_what_pays() -> None:
    admission = selective()
    admission.pays = None
    assert admission.offered(beginning(drawn=False), "r") == 8


def test_a_chunk_is_stored_when_it_is_computed_again() -> None:
    admission, keys = selective(), beginning(drawn=False)
    assert admission.offered(keys, "first") == 0
    assert admission.offered([*keys[:5], *chain("other", 3)], "second") == 5
    assert (admission.not_stored, admission.computed_again) == (8 + 3, 5)
    assert admission.offered(keys[:5], "third") == 5
    assert admission.computed_again == 5, "it was stored the second time"


def test_a_known_chunk_vouches_for_its_prefix() -> None:
    """Whatever of that the ghost has lost."""
    admission, keys = selective(), beginning(drawn=False)
    admission.offered(keys, "first")
    marks = marks_of(keys)
    for mark in marks[:5]:
        admission._ghost._cells[mark & admission._ghost._mask] = 0
    assert admission.offered(keys, "second") == 8


def test_nothing_is_stored_behind_a_gap() -> None:
    admission, keys = selective(), beginning(drawn=False)
    assert admission.offered(keys, "first") == 0
    assert admission.offered(chain("more", 4, "drawn or not"), "first") == 0
    admission.pays = 0.0
    assert not admission.selective
    assert admission.offered(chain("end", 4), "first") == 0, "though all is stored by now"
    admission.ended("first")
    assert admission.offered(chain("another", 4), "first") == 4


def test_one_beginning_in_sixteen_is_stored_wholly() -> None:
    admission = selective()
    count = 4000
    stored = [admission.offered(chain(str(number), 8), str(number)) for number in range(count)]
    assert set(stored) == {0, 8}
    assert 0.8 / SAMPLE < stored.count(8) / count < 1.2 / SAMPLE


def test_a_drawn_request_is_stored_to_its_end() -> None:
    admission, keys = selective(), beginning(drawn=True)
    assert admission.offered(keys, "r") == 8
    assert [admission.offered(chain(f"more{number}", 4), "r") for number in range(50)] == [4] * 50


def test_what_continues_the_sample_belongs_to_it() -> None:
    """Computed again, or loaded."""
    for is_loaded in (False, True):
        admission, keys = selective(), beginning(drawn=True)
        admission.offered(keys, "turn 1")
        for turn in range(2, 50):
            if is_loaded:
                admission.loaded(keys, f"turn {turn}")
            more = chain(f"turn {turn}", 4)
            assert admission.offered(more if is_loaded else [*keys, *more], f"turn {turn}") == (
                4 if is_loaded else len(keys) + 4
            )
            keys += more
        assert admission.not_stored == 0


def test_the_sample_is_drawn_by_the_first_unknown_chunk() -> None:
    """With a system prompt that all requests begin with, some of them are stored."""
    for drawn in (False, True):
        admission, system = selective(), beginning(drawn=drawn)
        admission.pays = 0.99
        admission.offered([*system, *chain("first", 4)], "first")
        stored = [admission.offered([*system, *chain(str(number), 4)], str(number)) for number in range(1000)]
        assert set(stored) == {8, 12}
        assert 0.5 / SAMPLE < stored.count(12) / 1000 < 1.5 / SAMPLE


def test_what_the_engine_has_itself_counts_neither_way() -> None:
    admission, keys = selective(), beginning(drawn=False)
    admission.offered(keys, "first")
    before = admission._seen, admission._known
    assert admission.offered([*keys, *chain("more", 2)], "second", own=8) == 8
    assert (admission._seen - before[0], admission._known - before[1]) == (2, 0)
    assert admission.computed_again == 0
    assert admission.not_stored == 8 + 2
    assert admission.offered(chain("unknown", 6), "third", own=6) == 6, "it was computed, whenever that was"
    assert admission.offered([*keys, *chain("rest", 3)], "second", own=8) == 0, "preempted, it began anew"
    assert admission.not_stored == 8 + 2 + 3


def test_everything_is_stored_again_once_more_comes_back() -> None:
    admission = selective()
    prompts = [chain(str(number), 8) for number in range(100)]
    for number, keys in enumerate(prompts):
        admission.offered(keys, f"{number}")
    assert admission.selective
    for number, keys in enumerate(prompts):
        admission.offered(keys, f"{number} again")
    assert not admission.selective
    assert admission.offered(beginning(drawn=False, after="new"), "r") == 8


def test_what_was_loaded_comes_back() -> None:
    admission = selective()
    admission.loaded(chain("a", 100), "a")
    assert not admission.selective


def test_what_came_back_long_ago_counts_less() -> None:
    admission = selective()
    admission.loaded(chain("a", 2000), "a")
    assert not admission.selective
    for number in range(8 * WINDOW // 8):
        admission.offered(chain(str(number), 8), str(number))
    assert admission.selective


def test_reset_forgets_what_was_seen() -> None:
    admission, keys = selective(), beginning(drawn=False)
    admission.offered(keys, "cut")
    admission.offered(beginning(drawn=True), "drawn")
    admission.reset()
    assert not admission.selective, "it begins anew"
    assert not admission._cut | admission._drawn
    admission._seen = admission._window / 2
    assert admission.offered(keys, "again") == 0


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    admission = selective()
    for number in range(200):
        admission.offered(chain(str(number), 4), str(number))
        admission.loaded(chain(str(number), 4), str(number))
    for number in range(200):
        admission.ended(str(number))
    assert not admission._cut | admission._drawn


@pytest.mark.parametrize("seed", range(4))
def test_a_chunk_is_stored_with_its_whole_prefix_and_what_is_known_always(seed: int) -> None:
    """Random conversations that grow and fork, in steps of some chunks; what is stored is evicted at random."""
    random = Random(seed)
    admission = Admission(1 << 12)
    admission.pays = 0.99
    admission._seen = admission._window / 2
    stored: set[Key] = set()
    conversations = [chain(str(number), random.randint(1, 6)) for number in range(30)]
    seen = {True: set[str](), False: set[str]()}  # by whether all is stored
    for number in range(1500):
        base = random.choice(conversations)
        keys = [*base[: random.randint(1, len(base))], *chain(f"turn {number}", random.randint(0, 6))]
        conversations[random.randrange(30)] = keys[:40]
        name, hits = str(number), next((at for at, key in enumerate(keys) if key not in stored), len(keys))
        if hits:
            admission.loaded(keys[:hits], name)
        at, cut = hits, False
        while at < len(keys):
            step = keys[at : at + random.randint(1, 5)]
            found = admission._ghost.find(marks_of(step))
            known = max((place for place, flags in enumerate(found, 1) if flags != UNKNOWN), default=0)
            kept = admission.offered(step, name)
            stored.update(step[:kept])
            assert not kept or stored.issuperset(keys[: at + kept]), "a prefix or nothing"
            everything = not admission.selective  # the request itself has counted
            assert kept == 0 if cut else known <= kept <= len(step)
            assert cut or kept == len(step) or not everything
            cut = cut or kept < len(step)
            seen[everything].add("all" if kept == len(step) else "nothing" if not kept else "known")
            at += len(step)
        admission.ended(name)
        admission.pays = random.choice([0.01, 0.99])
        if random.random() < 0.05:
            stored -= set(random.choice(conversations))
    assert seen[False] == {"all", "nothing", "known"}
    assert "all" in seen[True]
