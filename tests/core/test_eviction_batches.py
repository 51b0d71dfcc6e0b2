"""UpwardBatches against a plain list of lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.core.eviction.batches import UpwardBatches

STEPS = st.lists(
    st.tuples(st.sampled_from(["leaf", "root", "move", "remove", "pop"]), st.integers(0, 2), st.integers(0, 30))
)


@given(steps=STEPS)
def test_keys_are_popped_by_batch_and_leaf_first(steps: list[tuple[str, int, int]]) -> None:
    batches = UpwardBatches()
    model: dict[int, list[bytes]] = {}
    for count, (step, number, pick) in enumerate(steps):
        key = b"%d" % count
        here = [(key, number) for number, keys in model.items() for key in keys]
        if step == "leaf":
            batches.add(key, number)
            model.setdefault(number, []).append(key)
        elif step == "root":
            batches.add_root(key, number)
            model.setdefault(number, []).insert(0, key)
        elif here and step == "remove":
            key, place = here[pick % len(here)]
            batches.remove(key)
            model[place].remove(key)
        elif here and step == "move":
            key, place = here[pick % len(here)]
            assert batches.move(key, number)
            if place < number:
                model[place].remove(key)
                model.setdefault(number, []).append(key)
            assert not batches.move(b"unknown", number)
        elif here:
            first = min(number for number, keys in model.items() if keys)
            assert batches.pop() == (model[first].pop(), first)
        assert len(batches) == sum(map(len, model.values()))
    while len(batches):
        number = min(number for number, keys in model.items() if keys)
        assert batches.pop() == (model[number].pop(), number)
