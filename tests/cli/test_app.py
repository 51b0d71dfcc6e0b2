"""The command line as a whole: help and errors."""

from __future__ import annotations

import pytest

import nixl_tiers
from nixl_tiers.cli import BAD_INPUT, OK, main
from nixl_tiers.cli.app import COMMANDS
from nixl_tiers.cli.output import print_table


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == OK
    assert capsys.readouterr().out == f"nixl-tiers {nixl_tiers.__version__}\n"


def test_no_arguments_list_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == OK
    shown = capsys.readouterr().out
    assert [command.__name__ for command in COMMANDS if f" {command.__name__} " not in shown] == []


@pytest.mark.parametrize("given", [["nonsense"], ["config"], ["doctor", "--nonsense"]])
def test_wrong_arguments_are_one_sentence(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(given) == BAD_INPUT
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("nixl-tiers: ")
    assert output.err.count("\n") == 1


def test_table_in_a_pipe_has_whole_lines_and_literal_text(capsys: pytest.CaptureFixture[str]) -> None:
    long = "/mnt/" + "x" * 300
    print_table(["path", "bytes"], [(long, 1), ("[bold]odd[/bold]:smile:", 22)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["path", "bytes"], [long, "1"], ["[bold]odd[/bold]:smile:", "22"]]
