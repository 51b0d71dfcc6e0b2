"""Steps of a state machine as text, one after the other: what a search has found, to be taken again without one.

A step is a rule's name and its arguments, in their order: `mover_works 1 FAILED 2`. Those that are left out are the
least.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import getitem
from typing import Any, Final

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from tests.support.simulation import Scan
from tests.support.stateful import CascadeStateMachine

Step = tuple[str, dict[str, Any]]


def _many(one: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: tuple(map(one, text.split("+"))) if text != "-" else ()


PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "str": str,
    "int": int,
    "int | None": lambda text: None if text == "-" else int(text),
    "float": float,
    "float | None": lambda text: None if text == "-" else float(text),
    "bool": "yes".__eq__,
    "Scan": partial(getitem, Scan),
    "Outcome": partial(getitem, Outcome),
    "list[str]": _many(str),
    "list[int]": _many(int),
    "tuple[Write, Write]": _many(partial(getitem, Write)),
    "tuple[int, int]": _many(int),
    "tuple[float, ...]": _many(float),
}
"""By annotations of rules."""
LEAST: Final = {
    "str": "a",
    "int": "0",
    "int | None": "-",
    "float": "0.1",
    "float | None": "-",
    "bool": "no",
    "Scan": "CHAIN",
    "Outcome": "OK",
    "list[str]": "a",
    "list[int]": "0+0+0",
    "tuple[Write, Write]": "THROUGH+THROUGH",
    "tuple[int, int]": "6+12",
    "tuple[float, ...]": "-",
    "steps": "1",
    "good": "yes",
    "victims": "1024",
    "rows": "6",
    "own": "1",
    "chunks": "5",
    "count": "1",
    "keys": "1",
    "members": "1",
    "really": "yes",
    "ends.str": "aborted",
}
"""Of an argument, by its name or else by its annotation."""


def parameters(rule: str) -> dict[str, str]:
    """The names of a rule's parameters, and their annotations."""
    given = inspect.signature(getattr(CascadeStateMachine, rule)).parameters
    return {name: str(each.annotation) for name, each in given.items() if name != "self"}


def least(name: str, annotation: str) -> str:
    return LEAST.get(f"{name}.{annotation}") or LEAST.get(name) or LEAST[annotation]


def steps_of(text: str) -> Iterator[Step]:
    for step in text.split(";"):
        rule, *given = step.split()
        wanted = parameters(rule)
        assert len(given) <= len(wanted), f"too many arguments: {step}"
        given += [least(*each) for each in list(wanted.items())[len(given) :]]
        yield rule, {name: PARSERS[kind](value) for (name, kind), value in zip(wanted.items(), given, strict=True)}


def take(machine: CascadeStateMachine, text: str) -> None:
    """Raises what the first step raises that violates an invariant, or the check at the end of all."""
    try:
        for rule, given in steps_of(text):
            getattr(machine, rule)(**given)
            machine.check_invariants()
    finally:
        machine.teardown()
