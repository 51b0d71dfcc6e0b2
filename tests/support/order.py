"""A plugin of pytest: with `-n`, the files that take longest are begun first, so that none is left to one worker at the
end while the others have nothing to do. With `--order-seed N` all tests come in an order of chance instead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain, islice
from typing import Final

import pytest

LONG: Final = (
    "tests/system/vllm/test_engine.py",
    "tests/system/vllm/test_server.py",
    "tests/system/vllm/test_stress.py",
    "tests/system/vllm/test_torture.py",
    "tests/vllm/test_connector.py",
    "tests/system/vllm/test_compatibility.py",
    "tests/system/integration/test_kill_rounds.py",
    "tests/system/tiers/s3/test_conformance.py",
    "tests/core/test_mutants.py",
    "tests/system/integration/test_round_trips.py",
    "tests/core/test_stateful.py",
    "tests/system/integration/test_faults.py",
    "tests/system/vllm/test_kv_bytes.py",
    "tests/system/tiers/test_file_tiers.py",
    "tests/system/integration/test_exits.py",
    "tests/system/tiers/gds/test_conformance.py",
    "tests/system/core/test_order.py",
    "tests/vllm/test_contract.py",
    "tests/core/test_crossover.py",
    "tests/system/test_dist.py",
    "tests/system/tiers/s3/test_commands.py",
    "tests/vllm/test_worker.py",
    "tests/core/test_announced.py",
)
"""Those that take five seconds and more, the longest first: `pytest --durations=0` says it."""


def dealt(files: Sequence[str], workers: int) -> list[int]:
    """The places of tests, given by their files, in the order in which they are run. `--dist worksteal` gives the first
    of as many equal parts to the first worker, and so on; whoever is done takes from the ends of others' parts. A long
    file stays together: tests may share what it starts."""
    long = [[place for place, each in enumerate(files) if each == name] for name in LONG]
    others = (place for place, each in enumerate(files) if each not in LONG)
    order: list[int] = []
    for worker in range(workers):
        own = [*chain(*long[worker::workers])]
        room = (len(files) - len(order)) // (workers - worker)
        order += [*own, *islice(others, max(0, room - len(own)))]
    return [*order, *others]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", metavar="N", type=int, help="run the tests in the order of this seed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--order-seed")) is not None:
        random.Random(seed).shuffle(items)
        return
    workers: int = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        if config.getoption("dist") == "loadfile":  # whoever is done takes the next file
            workers = 1
        files = [item.nodeid.partition("::")[0] for item in items]
        items[:] = [items[place] for place in dealt(files, workers)]
