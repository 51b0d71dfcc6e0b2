"""The command line as a whole: help, errors, and what happens without the extra `cli`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nixl_tiers
from nixl_tiers.cli import BAD_INPUT, OK, main
from nixl_tiers.cli.app import COMMANDS
from nixl_tiers.cli.output import print_table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_one_sentence(missing: str) -> None:
    hide = f"import sys; sys.modules[{missing!r}] = None; "
    code = hide + "from nixl_tiers.cli import main; sys.exit(main(['config', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == BAD_INPUT
    assert (
        done.stderr
        == f"nixl-tiers: the command line needs {missing}: pip install '.[cli]' in the checkout of nixl_tiers\n"
    )


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


def test_shells_complete_commands() -> None:
    """What the script of `--install-completion` runs."""
    words = {"_NIXL_TIERS_COMPLETE": "complete_bash", "COMP_WORDS": "nixl-tiers re", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "nixl_tiers.cli"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | words, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["report"], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed(shell: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nixl_tiers.cli", "--install-completion", shell]
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (OK, "")
    assert any("_NIXL_TIERS_COMPLETE" in file.read_text() for file in tmp_path.rglob("*") if file.is_file())


def test_generated_reference_is_alike_on_every_terminal() -> None:
    code = "import runpy; print(runpy.run_path('docs/generate.py')['command_line'](), end='')"
    terminals = [{"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "xterm-256color"}, {"NO_COLOR": "1", "TERM": "dumb"}]
    command = [sys.executable, "-c", code]
    texts = [
        subprocess.run(
            command, cwd=ROOT, env=os.environ | terminal, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for terminal in terminals
    ]
    assert texts[0] == texts[1]
    assert "\x1b" not in texts[0]
    assert texts[0] in (ROOT / "docs/reference/command-line.md").read_text()


def test_table_in_a_pipe_has_whole_lines_and_literal_text(capsys: pytest.CaptureFixture[str]) -> None:
    long = "/mnt/" + "x" * 300
    print_table(["path", "bytes"], [(long, 1), ("[bold]odd[/bold]:smile:", 22)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["path", "bytes"], [long, "1"], ["[bold]odd[/bold]:smile:", "22"]]
