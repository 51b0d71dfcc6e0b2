"""The documentation against the tree: paths and names that pages name exist, links and their anchors resolve, and
generated pages are up to date."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from nixl_tiers.cli.app import app

ROOT = Path(__file__).parents[1]
FIRST = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md"))
PAGES = [*FIRST, *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FOLDERS = ("nixl_tiers", "tests", "bench", "demo", "docs", "csrc", "docker", "examples", "tools")
FILE = re.compile(r"(?<![\w/.<>*-])((?:[\w.-]+/)*[\w.-]+\.(?:py|md|cu|c|h))(?![\w(/])")
FOLDER = re.compile(rf"(?<![\w/.<>*-])((?:{'|'.join(FOLDERS)})/(?:[\w-]+/)*)(?=[`\s),;:]|$)", re.MULTILINE)
EXAMPLE_FILE = re.compile(r"^```\w+\n# [\w/.]+\n.*?^```", re.MULTILINE | re.DOTALL)  # a block with its own name
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`([\w./]+\.py)`\s\(((?:`[\w.]+`(?:,\s)?)+)\)")  # `file.py` (`Class.method`, `function`)


@cache
def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub, and MyST like it, makes of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    return found


@cache
def files() -> tuple[str, ...]:
    """The tree's files, as paths below the root."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return tuple(f"/{path.relative_to(ROOT)}" for path in (*found, *ROOT.glob("*")))


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    assert list(dead_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_named_in_a_page_exist(page: Path) -> None:
    """A file is named by its path, or by the end of it."""
    text = LINK.sub("]", EXAMPLE_FILE.sub("", page.read_text()))
    missing = {name for name in FILE.findall(text) if not any(path.endswith(f"/{name}") for path in files())}
    missing |= {name for name in FOLDER.findall(text) if not (ROOT / name).is_dir()}
    assert missing == set()


def test_files_named_in_comments_exist() -> None:
    names = {path.rpartition("/")[2] for path in files()}
    missing = {
        (path, name)
        for path in files()
        if path.startswith("/nixl_tiers/") and path.endswith(".py")
        for name in re.findall(r"\b[a-z_0-9]+\.py\b", (ROOT / path[1:]).read_text())
        if name not in names
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_code_named_beside_a_file_is_defined_there(page: Path) -> None:
    missing = []
    for name, symbols in NAMED.findall(page.read_text()):
        source = (ROOT / next(path for path in files() if path.endswith(f"/{name}"))[1:]).read_text()
        defined = set(re.findall(r"\b(?:def|class) (\w+)|^ *(\w+)(?:: | = )", source, re.MULTILINE))
        known = {symbol for pair in defined for symbol in pair}
        missing += [f"{name}: {symbol}" for symbol in re.findall(r"\w+", symbols) if symbol not in known]
    assert missing == []


def shell_words(page: Path, program: str) -> Iterator[list[str]]:
    """The words after `program`, wherever a page has it as a command: in a block, after a prompt, or in a sentence."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^ *```(?:bash|console)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    sentences = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", sentences)]
    for line in lines:
        if line.startswith(f"{program} "):
            with suppress(ValueError):  # a quotation that goes on in the next line
                yield shlex.split(re.sub(r"<[^>]*>", "X", line.removeprefix(program)), comments=True)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_named_in_a_page_exist_with_their_options(page: Path) -> None:
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name, *words in shell_words(page, "nixl-tiers"):
        if name in {"COMMAND", "...", "--version", "--install-completion"}:
            continue
        known = {option for parameter in commands[name].params for option in parameter.opts}
        options = {word.partition("=")[0] for word in takewhile(lambda word: word != "--", words) if word[:2] == "--"}
        assert options <= known, (name, words)


def test_commands_are_found() -> None:
    found = {" ".join(words) for page in PAGES for words in shell_words(page, "nixl-tiers")}
    assert {"report http://localhost:8000", "doctor --gds /mnt/nvme"} <= found


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_targets_and_modules_named_in_a_page_exist(page: Path) -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in shell_words(page, "make"):
        assert {word for word in words if re.fullmatch(r"[a-z][\w-]*", word)} <= targets, words
    for python in ("python", "$PY", ".venv/bin/python"):
        for words in shell_words(page, python):
            if words[0] == "-m" and words[1].partition(".")[0] in FOLDERS:
                place = ROOT / words[1].replace(".", "/")
                assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), words


def test_generated_pages_are_up_to_date() -> None:
    """Else run `make format`."""
    pages = runpy.run_path(str(ROOT / "docs/generate.py"))["generate"]()
    generated = {"configuration.md", "command-line.md", "python-api.md", "metrics.md", "results.md", "faults.md"}
    assert {page.name for page in pages} >= generated | {"compatibility.md", "comparison.md", "torture.md"}
    for page, text in pages.items():
        assert page.read_text() == text, page.name


@pytest.mark.parametrize("file", sorted((ROOT / "bench/results").glob("*.json")), ids=lambda file: file.stem)
def test_every_result_says_where_and_when_and_its_rows_fit(file: Path) -> None:
    result = json.loads(file.read_text())
    assert {"title", "machine", "date", "tables"} <= result.keys()
    assert re.search(r"\b20\d\d\b", result["date"])
    for table in result["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    module = re.search(r"-m bench\.(\w+)|bench/(\w+)\.py", result.get("command", ""))
    assert module is None or (ROOT / f"bench/{module[1] or module[2]}.py").exists()
