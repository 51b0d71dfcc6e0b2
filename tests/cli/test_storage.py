"""What `inspect` and `purge` choose, say and return, of a medium that is a list (real ones: tests/system/cli)."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from nixl_tiers.base.manifest import Description, Manifest
from nixl_tiers.cli import BAD_INPUT, FAILED, INCOMPLETE, OK, main
from nixl_tiers.cli import inspect as inspect_module
from nixl_tiers.cli.inspect import Pace
from nixl_tiers.testing.config import MemoryConfig
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.stored import CheckedRow, Step, StoredNamespace

TIER = {"type": "nixl_tiers.testing.config:MemoryConfig", "capacity": "1MiB"}
CONFIG = json.dumps({"tiers": [{"type": "cpu", "capacity": "1MiB"}, TIER]})
BLUE, RED, UNKNOWN = (digit * 32 for digit in "abc")


@dataclass
class Shelf(StoredNamespace):
    """A namespace whose rows have these verdicts."""

    layout: ClassVar[str] = "shelf"
    verdicts: list[str] = field(default_factory=lambda: ["ok"] * 3)
    stays: int = 0  # rows that a delete leaves
    fails: bool = False  # that raises
    deleted: ClassVar[dict[str, int]] = {}  # by name: how many rows are left

    def check(self, before_read: Step) -> Iterator[CheckedRow]:
        for number, verdict in enumerate(self.verdicts):
            before_read(10)
            if verdict == "down":
                raise TierDown("the shelf fell")
            yield CheckedRow(f"book {number}", 10, verdict, "torn")  # type: ignore[arg-type]

    def delete(self, step: Step) -> None:
        step(self.rows)
        self.deleted[self.name] = self.rows if self.fails else self.stays
        if self.fails:
            raise TierDown("the shelf fell")


class Shelves:
    """All of them, and the times before which a purge has looked for rows."""

    def __init__(self) -> None:
        self.all = [self.shelf(BLUE, "blue"), self.shelf(RED, "red"), Shelf("a shelf", UNKNOWN, rows=3)]
        self.asked: list[float | None] = []

    @staticmethod
    def shelf(name: str, salt: str, **fields: Any) -> Shelf:
        about = Description(model="org/model", note="test rows").of(salt)
        return Shelf("a shelf", name, rows=3, manifest=Manifest(name, about, 4096), **fields)

    def find(self, config: MemoryConfig, before_s: float | None) -> list[StoredNamespace]:
        self.asked.append(before_s)
        now = [replace(each, rows=Shelf.deleted.get(each.name, each.rows)) for each in self.all]
        return [each for each in now if each.rows or not each.name]


def find_shelves(config: MemoryConfig, before_s: float | None) -> list[StoredNamespace]:
    """As a third-party tier exports it."""
    raise NotImplementedError


@pytest.fixture
def shelves(monkeypatch: pytest.MonkeyPatch) -> Shelves:
    shelves = Shelves()
    monkeypatch.setattr(MemoryConfig, "stored_rows", f"{__name__}:find_shelves")
    monkeypatch.setattr(f"{__name__}.find_shelves", shelves.find)
    monkeypatch.setattr(Shelf, "deleted", {})
    return shelves


def run(capsys: pytest.CaptureFixture[str], command: str, *options: str) -> tuple[int, Any]:
    """The exit code, and what was printed as JSON, else the error."""
    code = main([command, "--config", CONFIG, *options, "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out)["namespaces"] if output.out else output.err


# --- purge ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--all"], [BLUE, RED, UNKNOWN]),
        (["--salt", "blue"], [BLUE]),
        (["--salt", "-"], [RED]),  # from standard input
        (["--salt", "green"], []),
        (["--namespace", BLUE[:8]], [BLUE]),
        (["--namespace", BLUE, "--namespace", UNKNOWN], [BLUE, UNKNOWN]),
        (["--namespace", BLUE[:8], "--salt", "red"], []),
        (["--older-than", "1h", "--salt", "red"], [RED]),
    ],
)
def test_purge_deletes_what_agrees_with_all_options_and_only_with_yes(
    shelves: Shelves,
    options: list[str],
    chosen: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for yes in ([], ["--yes"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("red\n"))
        code, found = run(capsys, "purge", *options, *yes)
        assert (code, [each["namespace"] for each in found]) == (OK, chosen)
        assert [*Shelf.deleted] == (chosen if yes else [])
        assert [(each["rows"], each["left"]) for each in found] == [(3, 0 if yes else None)] * len(chosen)
    before_s = shelves.asked[0]
    assert before_s is not None
    assert math.isinf(before_s) if "--older-than" not in options else 3500 < time.time() - before_s < 3700


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "say what, by --namespace"),
        (["--salt", ""], "say what, by --namespace"),
        (["--salt", "", "--all"], "--salt is empty"),  # as of a variable that is not set
        (["--salt", "-"], "--salt is empty"),
        (["--namespace", "aaaaaaa"], "at least 8 hexadecimal digits"),
        (["--namespace", "aaaaaaag"], "at least 8 hexadecimal digits"),
        (["--older-than", "soon"], "--older-than: "),
    ],
)
@pytest.mark.usefixtures("shelves")
def test_purge_refuses_what_would_choose_too_much(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, error = run(capsys, "purge", *options, "--yes")
    assert (code, sentence in error, error.count("\n"), Shelf.deleted) == (BAD_INPUT, True, 1, {})


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({}, OK, "deleted, and listed again: nothing is left"),
        ({"refused": "it is held by process 7"}, FAILED, "it is held by process 7; 3 rows are still there"),
        ({"stays": 1}, FAILED, "1 rows are still there"),
        ({"fails": True}, INCOMPLETE, "the shelf fell; 3 rows are still there"),
        ({"problem": "part-0 cannot be read"}, INCOMPLETE, "part-0 cannot be read"),
    ],
)
def test_purge_proves_what_it_has_deleted(
    shelves: Shelves, fields: dict[str, Any], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shelves.all = [shelves.shelf(BLUE, "blue", **fields)]
    known = code if {"refused", "problem"} & fields.keys() else OK
    assert main(["purge", "--config", CONFIG, "--all"]) == known, "what is known before is told without --yes, too"
    assert main(["purge", "--config", CONFIG, "--all", "--yes"]) == code
    assert said in capsys.readouterr().out
    assert [*Shelf.deleted] == ([] if "refused" in fields else [BLUE])


def test_purge_tells_what_it_cannot_read_or_list_again(
    shelves: Shelves, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read may be what was meant, and is not deleted; what was, before the server went away, is told."""
    unread = Shelf("a shelf", "d" * 32, rows=3, problem="about.json cannot be read")
    shelves.all += [Shelf("a shelf", "", problem="part-1 cannot be read"), unread]
    code, found = run(capsys, "purge", "--salt", "green", "--yes")
    assert (code, [each["problem"] for each in found]) == (INCOMPLETE, ["part-1 cannot be read", unread.problem])
    assert Shelf.deleted == {}
    find = iter([shelves.find])

    def go_away(*given: Any) -> list[StoredNamespace]:
        for once in find:
            return once(*given)
        raise TierDown("it does not answer")

    monkeypatch.setattr(f"{__name__}.find_shelves", go_away)
    code, (report, *_) = run(capsys, "purge", "--salt", "blue", "--yes")
    assert (code, report["left"], [*Shelf.deleted]) == (INCOMPLETE, None, [BLUE])
    assert "cannot be listed again" in str(report["problem"])


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_names_whose_rows_they_are_and_no_salt(shelves: Shelves, capsys: pytest.CaptureFixture[str]) -> None:
    shelves.all[1].unknown_slots, shelves.all[1].holder = 7, "process 8"
    assert main(["inspect", "--config", CONFIG]) == OK
    text = capsys.readouterr().out
    for part in (
        "org/model",
        "test rows",
        "unknown (no manifest)",
        "7 slots unknown after a crash",
        "held by process 8",
    ):
        assert part in text
    assert text.count("\n") == 7, "two lines a namespace, and the sum"
    assert "blue" not in text
    code, found = run(capsys, "inspect", "--namespace", "bb")
    assert (code, [each["namespace"] for each in found]) == (OK, [RED])
    assert "blue" not in str(run(capsys, "inspect"))
    assert run(capsys, "inspect", "--namespace", "bc")[0] == BAD_INPUT
    shelves.all[0].problem = "it cannot be read"
    assert run(capsys, "inspect")[0] == INCOMPLETE


def test_tier_whose_rows_cannot_be_found_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["inspect"], ["inspect", "--verify"], ["purge", "--all"]):
        code, error = run(capsys, *command)
        assert (code, 'tier "memory" cannot be looked at: its type' in error, error.count("\n")) == (BAD_INPUT, True, 1)
    monkeypatch.setattr(MemoryConfig, "stored_rows", "no_such_package:find")
    code, error = run(capsys, "inspect")
    assert (code, 'its stored_rows "no_such_package:find" cannot be imported' in error) == (BAD_INPUT, True)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["ok", "ok"], OK),
        (["ok", "changed"], OK),
        (["corrupt", "ok"], FAILED),
        (["ok", "missing"], FAILED),
        (["corrupt", "unreadable"], INCOMPLETE),
        (["corrupt", "down"], INCOMPLETE),
    ],
)
def test_verify_reads_every_row_and_its_exit_code_is_that_of_the_worst(
    shelves: Shelves, verdicts: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shelves.all = [shelves.shelf(BLUE, "blue", verdicts=verdicts), shelves.shelf(RED, "red")]
    found_code, (found, other) = run(capsys, "inspect", "--verify")
    assert (found_code, other["ok"], Shelf.deleted) == (code, 3, {})
    bad = [verdict for verdict in verdicts if verdict not in ("ok", "changed", "down")]
    assert [each["verdict"] for each in found["damaged"]] == bad
    assert [found[verdict] for verdict in ("ok", "changed")] == [verdicts.count("ok"), verdicts.count("changed")]
    assert found["problem"] == ("the shelf fell" if "down" in verdicts else None)
    assert main(["inspect", "--verify", "--config", CONFIG]) == code
    text = capsys.readouterr().out
    assert all(f"1 {verdict}" in text for verdict in bad)


@pytest.mark.parametrize(
    ("options", "rate"), [((), 200e6), (("--max-mb-per-s", "5"), 5e6), (("--max-mb-per-s", "0"), 0)]
)
@pytest.mark.usefixtures("shelves")
def test_verify_reads_no_faster_than_it_is_told(
    options: tuple[str, ...], rate: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, taken = [0.0], list[int]()

    class Counted(Pace):
        def __init__(self, bytes_per_s: float | None) -> None:
            super().__init__(bytes_per_s, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))

        def take(self, nbytes: int) -> None:
            taken.append(nbytes)
            super().take(10**6 * nbytes)

    monkeypatch.setattr(inspect_module, "Pace", Counted)
    assert run(capsys, "inspect", "--verify", *options)[0] == OK
    assert taken == [10] * 9
    assert now[0] == pytest.approx(80e6 / rate if rate else 0.0)
