"""Plants each bug of `tests/promises.toml` in a copy of the tree, and fails if the test that is named beside it does
not fail by an assertion: `make planted`. `--check`, in `make lint`: all that the file names exists, and the pages name
the same promises.

    python tools/plant.py [--check | PROMISE...]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PROMISES: Final = ROOT / "tests/promises.toml"
PAGES: Final = [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
NAMED: Final = re.compile(r"<!-- promises?: ([^>]+?) -->")
BY_ASSERTION: Final = re.compile(r"^FAILED \S+.* - (AssertionError|assert |Failed: )", re.MULTILINE)
AT_ONCE: Final = 2


def main(arguments: Sequence[str]) -> int:
    """0 if all is well."""
    promises = tomllib.loads(PROMISES.read_text())["promise"]
    wrong = list(check(promises))
    if "--check" not in arguments and not wrong:
        chosen = [each for each in promises if not arguments or each["id"] in arguments]
        wrong = plant_all([(promise, bug) for promise in chosen for bug in promise.get("bugs", ())])
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


def check(promises: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the file says and the tree does not have."""
    ids = [promise["id"] for promise in promises]
    named = {name for page in PAGES for names in NAMED.findall(page.read_text()) for name in names.split()}
    yield from (f"{name}: two promises have this id" for name in {name for name in ids if ids.count(name) > 1})
    yield from (f"{name}: no page names it (<!-- promise: {name} -->)" for name in ids if name not in named)
    yield from (f"{name}: a page names it, {PROMISES.name} does not" for name in sorted(named - set(ids)))
    tests = {path: path.read_text() for path in ROOT.glob("tests/**/*.py")}
    for promise in promises:
        bugs, mutants = promise.get("bugs", ()), promise.get("mutants", ())
        if not bugs and not mutants:
            yield f"{promise['id']}: no planted bug breaks it"
        for mutant in mutants:
            if not any(f"class {mutant}(" in text for text in tests.values()):
                yield f"{promise['id']}: there is no mutant {mutant}"
        for bug in bugs:
            if (ROOT / bug["file"]).read_text().count(bug["old"]) != 1:
                yield f"{promise['id']}: {bug['file']} does not have this once: {bug['old']!r}"
            file, *names = test_of(promise, bug).partition("[")[0].split("::")
            text = tests.get(ROOT / file, "")
            if not all(re.search(rf"\b(?:def|class) {name}\b|^{name} =", text, re.MULTILINE) for name in names):
                yield f"{promise['id']}: there is no test {test_of(promise, bug)}"


def test_of(promise: dict[str, Any], bug: dict[str, str]) -> str:
    return str(bug.get("test") or promise["test"])


def plant_all(bugs: Sequence[tuple[dict[str, Any], dict[str, str]]]) -> list[str]:
    """Those that were not caught, with what pytest said."""
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        for number in range(AT_ONCE):
            copies.put(copy(Path(folder) / str(number)))

        def one(planted: tuple[dict[str, Any], dict[str, str]]) -> str | None:
            where = copies.get()
            try:
                return plant(where, test_of(*planted), planted[1])
            finally:
                copies.put(where)

        found = list(pool.map(one, bugs))
    print(f"{len(bugs) - sum(map(bool, found))} of {len(bugs)} planted bugs are caught")
    return [f"{promise['id']}: {said}" for (promise, _), said in zip(bugs, found, strict=True) if said]


def copy(to: Path) -> Path:
    """The tree's files and what was compiled of it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    compiled = (str(path.relative_to(ROOT)) for path in ROOT.glob("nixl_tiers/**/*.so"))
    for name in (*listed.stdout.decode().split("\n"), *compiled):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def plant(tree: Path, test: str, bug: dict[str, str]) -> str | None:
    """What is wrong with the test, if the bug does not make it fail by an assertion."""
    file, build = tree / bug["file"], [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
    honest = file.read_text()
    native = file.suffix in {".c", ".h"}
    file.write_text(honest.replace(bug["old"], bug["new"]))
    try:
        if native:
            subprocess.run(build, cwd=tree, check=True, capture_output=True)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", test]
        wide = os.environ | {"COLUMNS": "1000"}  # else pytest leaves out how a test with a long name has failed
        ran = subprocess.run(command, cwd=tree, env=wide, capture_output=True, text=True, timeout=900, check=False)
    finally:
        file.write_text(honest)
        if native:
            subprocess.run(build, cwd=tree, check=True, capture_output=True)
    if BY_ASSERTION.search(ran.stdout):
        return None
    said = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))][-3:]
    return f"{test} does not catch {bug['old']!r} -> {bug['new']!r} in {bug['file']}: {' '.join(said) or 'it passes'}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
