"""In which order `make test` begins what takes long, with pytest-xdist's own scheduler."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.scheduler.worksteal import WorkStealingScheduling

from tests.support.order import LONG, dealt

SHORT = [f"tests/short_{number}.py" for number in range(40)]


class Worker:
    """Takes what the scheduler sends."""

    gateway = SimpleNamespace(id="worker")
    shutting_down = False

    def __init__(self) -> None:
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def send_steal(self, indices: list[int]) -> None:
        pass


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_each_worker_begins_with_long_files_and_each_of_them_stays_together(workers: int) -> None:
    files = [*SHORT, *(name for name in sorted(LONG) for _ in range(3))]
    order = dealt(files, workers)
    assert sorted(order) == list(range(len(files)))
    ordered = [files[place] for place in order]
    nodes: list[Any] = [Worker() for _ in range(workers)]
    config: Any = SimpleNamespace(getvalue=lambda name: [f"{workers}*popen"])
    scheduler = WorkStealingScheduling(config)
    for node in nodes:
        scheduler.add_node(node)
        scheduler.add_node_collection(node, [f"{name}::{number}" for number, name in enumerate(ordered)])
    scheduler.schedule()
    for number, node in enumerate(nodes):
        own = [ordered[index] for index in node.sent]
        long = [name for name in LONG[number::workers] for _ in range(3)]
        assert own[: len(long)] == long
        assert not {*own[len(long) :]} & {*LONG}


def test_a_choice_of_tests_is_dealt_whole() -> None:
    """Also one that is mostly of long files."""
    for files in ([], [LONG[0]] * 5, [*SHORT[:2], *[LONG[0]] * 9]):
        assert sorted(dealt(files, 4)) == list(range(len(files)))


def test_long_files_exist() -> None:
    assert [name for name in LONG if not Path(__file__).parents[2].joinpath(name).is_file()] == []
