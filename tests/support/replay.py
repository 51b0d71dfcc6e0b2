"""A plugin of pytest: property tests draw the same examples in each run, and by its seed others under `make fuzz`. What
one of them finds can be replayed."""

from __future__ import annotations

import os
import re
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

FUZZ: Final = "NIXL_TIERS_FUZZ" in os.environ

# A machine may be many times slower than expected: neither an example nor the drawing of them has a wall-clock limit.
# One failure is shrunk and printed, which is what is read. Hypothesis starts from another default where it sees a CI.
_BOTH: Final = settings(
    settings.get_profile("default"),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    report_multiple_bugs=False,
)
# Two, as hypothesis looks at no seed where `derandomize` is on.
settings.register_profile("fixed", _BOTH, derandomize=True, database=None)
settings.register_profile("fuzz", _BOTH, derandomize=False)
settings.load_profile("fuzz" if FUZZ else "fixed")

# Else it also draws constants of the project's modules that the process has imported by then: other examples beside
# other tests.
providers._get_local_constants = Constants

_BLOB: Final = re.compile(r"@reproduce_failure\('[\d.]+', b'[^']*'\)")


def examples(count: int) -> int:
    """Of the state machines that take longest: as many in `make fuzz`, and half in `make test`."""
    return count if FUZZ else count // 2


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeats in one line what replays a failure: of a long log only the end may be kept."""
    reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
    lines = [f"{report.nodeid}: {blob}" for report in reports for blob in _BLOB.findall(report.longreprtext)]
    if lines:
        terminalreporter.section("replay a failure: decorate the property test or state machine")
        for line in dict.fromkeys(lines):
            terminalreporter.write_line(line)
