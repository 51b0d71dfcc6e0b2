"""A plugin of pytest, with `--flaky-log FILE`: a failed system test is run twice more, and fails if two of three do.

A machine may be too busy for one run of a test with processes and servers. FILE says how often, and how busy it was.
A further run has its own time limit, and everything anew: fixtures of the session too, unless only its teardown failed.
A test that ends the process of its pytest is not run again, and a failed subtest stays a failure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

SYSTEM: Final = Path(__file__).parents[1] / "system"
RETRIES: Final = 2
FAILURES: Final = 2  # as many make a failure
LOG_CHARACTERS: Final = 200_000  # kept of one run, from the end
PROPERTY: Final = "retries"  # brings what happened from a worker of xdist to its controller


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run a failed test of tests/system twice more; add what happened to this file"
    parser.addoption("--flaky-log", metavar="FILE", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--flaky-log"):
        config.pluginmanager.register(Runs())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Log(file))


def outcome(reports: list[pytest.TestReport]) -> str:
    """Of one run: failed, skipped or passed."""
    outcomes = {report.outcome for report in reports}
    return next((each for each in ("failed", "skipped") if each in outcomes), "passed")


def described(reports: list[pytest.TestReport]) -> dict[str, Any]:
    """What is written about one run."""
    failed = [report for report in reports if report.failed]
    parts = [report.longreprtext for report in failed]
    parts += [f"--- {title} ---\n{text}" for title, text in reports[-1].sections]  # the last has those of all phases
    crash = getattr(failed[0].longrepr, "reprcrash", None) if failed else None
    return {
        "outcome": outcome(reports),
        "load_average": os.getloadavg(),
        "duration_s": round(sum(report.duration for report in reports), 3),
        "message": crash.message if crash else failed[0].longreprtext if failed else "",
        "log": "\n".join(parts)[-LOG_CHARACTERS:],
    }


class Runs:
    """Where tests are run: in workers, or in the only process."""

    _again: list[pytest.TestReport] | None = None  # of a retry that goes on
    _failed = False  # a phase of the run that goes on

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if SYSTEM not in item.path.parents:
            return None
        self._failed = False
        if self._again is not None:
            self._again += runtestprotocol(item, log=False, nextitem=nextitem)
            return True
        place = {"nodeid": item.nodeid, "location": item.location}
        item.ihook.pytest_runtest_logstart(**place)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if outcome(reports) == "failed":
            reports = self._retried(item, reports)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(**place)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._failed |= report.failed
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if self._failed and SYSTEM in item.path.parents:
            # What it shares with other tests may have failed it, and may fail the next run.
            item.session._setupstate.teardown_exact(None)

    def _retried(self, item: pytest.Item, first: list[pytest.TestReport]) -> list[pytest.TestReport]:
        """The reports that stand for all runs."""
        runs, told = [first], [described(first)]
        for _ in range(RETRIES):
            item._report_sections.clear()
            self._again = []
            try:
                # By the hook: other plugins set up their part anew, as the time limit.
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
                runs.append(self._again)
            finally:
                self._again = None
            told.append(described(runs[-1]))
        failed = [run for run in runs if outcome(run) == "failed"]
        fails = len(failed) >= FAILURES
        stands = failed[0] if fails else next(run for run in reversed(runs) if run not in failed)
        retries = {"test": item.nodeid, "outcome": "failed" if fails else outcome(stands), "runs": told}
        stands[-1].user_properties.append((PROPERTY, retries))
        return stands


class Log:
    """Where reports arrive: writes the file and prints what is new in it."""

    def __init__(self, file: Path) -> None:
        self._file, self._new = file, list[dict[str, Any]]()
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several runs of pytest may be one of `make test-all`.
        self._old = json.loads(file.read_text()) if file.exists() else []
        self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps([*self._old, *self._new], indent=1) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        retries = [value for name, value in report.user_properties if name == PROPERTY]
        if retries:
            self._new += retries  # type: ignore[arg-type]
            self._write()  # at once: of a run that is killed, too

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"system tests that were run again: {len(self._new)} (logs in {self._file})")
        for each in self._new:
            terminalreporter.write_line(f"{each['outcome'].upper()} {each['test']}")
            for run in each["runs"]:
                load = ", ".join(f"{value:.1f}" for value in run["load_average"])
                why = f": {run['message'].splitlines()[0][:200]}" if run["message"] else ""
                terminalreporter.write_line(
                    f"    {run['outcome']} in {run['duration_s']:.1f} s, load average {load}{why}"
                )
