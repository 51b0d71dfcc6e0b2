"""Plants each bug of `tests/promises.toml` in a copy of the tree, and fails if the test that is named beside it does
not fail by an assertion: `make planted`. `--check`, in `make lint`: all that the file names exists, and the pages name
the same promises.

    python tools/plant.py [--check | PROMISE...]
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PROMISES: Final = ROOT / "tests/promises.toml"
PAGES: Final = [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
NAMED: Final = re.compile(r"<!-- promises?: ([^>]+?) -->")
BY_ASSERTION: Final = re.compile(r"^FAILED .* - (AssertionError|assert |Failed: |\S+\.BrokenInvariant: )", re.MULTILINE)
AT_ONCE: Final = 2
PATIENCE_S: Final = 300


def main(arguments: Sequence[str]) -> int:
    """0 if all is well."""
    promises = tomllib.loads(PROMISES.read_text())["promise"]
    wrong = list(check(promises))
    if "--check" not in arguments and not wrong:
        chosen = [each for each in promises if not arguments or each["id"] in arguments]
        bugs = [(each["id"], bug | {"test": test_of(each, bug)}) for each in chosen for bug in each.get("bugs", ())]
        wrong = plant_all(bugs)
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


def plant_all(bugs: Sequence[tuple[str, dict[str, str]]]) -> list[str]:
    """Those that were not caught, with what pytest said. Says of each bug, by its promise, at once how it went."""
    left, wrong = iter(sorted(bugs, key=lambda each: needs_vllm(each[1]))), list[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:

        def some(number: int) -> None:
            tree = copy(Path(folder) / str(number))
            command = [sys.executable, "tools/plant.py", "--here"]
            with subprocess.Popen(command, cwd=tree, stdin=PIPE, stdout=PIPE, text=True) as planter:
                assert planter.stdin
                assert planter.stdout
                for promise, bug in left:
                    print(json.dumps(bug), file=planter.stdin, flush=True)
                    began = time.monotonic()
                    said = json.loads(planter.stdout.readline())
                    print(f"{promise}: {said or 'caught'} ({time.monotonic() - began:.1f} s)", flush=True)
                    if said:
                        wrong.append(f"{promise}: {said}")
                planter.stdin.close()

        list(pool.map(some, range(AT_ONCE)))
    print(f"{len(bugs) - len(wrong)} of {len(bugs)} planted bugs are caught")
    return wrong


def needs_vllm(bug: dict[str, str]) -> bool:
    return "vllm/" in bug["test"]


def copy(to: Path) -> Path:
    """The tree's files and what was compiled of it."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True)
    compiled = (str(path.relative_to(ROOT)) for path in ROOT.glob("nixl_tiers/**/*.so"))
    for name in (*listed.stdout.decode().split("\n"), *compiled):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def serve() -> int:
    """Plants in the tree of this file what stdin names, one a line. Each test runs in a fork of this process, which has
    imported what takes long, and nothing of ours."""
    sys.path[:0] = [str(ROOT)]
    os.environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "1000"}  # narrower, pytest leaves out how a test has failed
    engine: Any = importlib.import_module("hypothesis.internal.conjecture.engine")
    engine.MAX_SHRINKS = 0  # one failing example is enough
    for slow in ("pytest", "hypothesis.stateful", "numpy", "torch", "boto3", "nixl"):
        importlib.import_module(slow)
    for number, line in enumerate(sys.stdin):
        bug = json.loads(line)
        if needs_vllm(bug):
            importlib.import_module("vllm.v1.core.sched.scheduler")
        print(json.dumps(plant(bug, number)), flush=True)
    return 0


def plant(bug: dict[str, str], number: int) -> str | None:
    """What is wrong with the test, if the bug does not make it fail by an assertion."""
    file, native = ROOT / bug["file"], bug["file"].endswith((".c", ".h"))
    honest, at_ns = file.read_text(), file.stat().st_mtime_ns
    libraries = {path: path.read_bytes() for path in ROOT.glob("nixl_tiers/**/*.so")} if native else {}
    file.write_text(honest.replace(bug["old"], bug["new"]))
    os.utime(file, ns=(at_ns, at_ns + (number + 1) * 10**9))  # else another bug's bytecode may fit
    try:
        if native:
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
            subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        said = forked(bug["test"])
    finally:
        file.write_text(honest)
        os.utime(file, ns=(at_ns, at_ns))
        for path, content in libraries.items():
            path.unlink()
            path.write_bytes(content)
    if BY_ASSERTION.search(said):
        return None
    why = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "E  ", "it "))][-3:]
    where = f"{bug['old']!r} -> {bug['new']!r} in {bug['file']}"
    return f"{bug['test']} does not catch {where}: {' '.join(why) or 'it passes'}"


def forked(test: str) -> str:
    """What pytest says of it."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = os.fork()
        if not child:
            os.setsid()
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            command = ["-q", "-x", "-p", "no:cacheprovider", "-m", "", test]
            try:
                os._exit(importlib.import_module("pytest").main(command))
            finally:
                os._exit(1)
        alarm = threading.Timer(PATIENCE_S, os.killpg, (child, signal.SIGKILL))
        alarm.start()
        status = os.waitpid(child, 0)[1]
        alarm.cancel()
        said.seek(0)
        return said.read() + ("\nit hangs, or crashes" if os.WIFSIGNALED(status) else "")


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--here"] else main(sys.argv[1:]))
