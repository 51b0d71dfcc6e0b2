"""Fails if a link in a page leads nowhere, if a file that a page names does not exist, or if something generated is not
what its generator makes of the tree: `make lint`."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "examples/README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
]
FOLDERS: Final = ("nixl_tiers", "tests", "bench", "demo", "docs", "csrc", "docker", "examples", "tools")
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
FILE: Final = re.compile(r"(?<![\w/.<>*-])((?:[\w.-]+/)*[\w.-]+\.(?:py|md|cu|c|h))(?![\w(/])")
FOLDER: Final = re.compile(rf"(?<![\w/.<>*-])((?:{'|'.join(FOLDERS)})/(?:[\w-]+/)*)(?=[`\s),;:]|$)", re.MULTILINE)
FENCED: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
OWN_FILE: Final = re.compile(r"^```\w+\n# [\w/.]+\n.*?^```", re.MULTILINE | re.DOTALL)  # a block with a name of its own


def main() -> int:
    """0 if all is well."""
    found = [f"{page.relative_to(ROOT)}: {what}" for page in PAGES for what in (*dead_links(page), *missing(page))]
    found += [
        f"{file.relative_to(ROOT)}: out of date, `make format` writes it"
        for file, text in generated()
        if file.read_text() != text
    ]
    for line in found:
        print(line, file=sys.stderr)
    return bool(found)


def dead_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if "://" not in target and (not file.exists() or (anchor and anchor not in anchors(file))):
            yield f"the link {target} leads nowhere"


@cache
def anchors(page: Path) -> set[str]:
    """What GitHub, and MyST like it, makes of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    return found


def missing(page: Path) -> Iterator[str]:
    """A file is named by its path, or by the end of it."""
    text = LINK.sub("]", OWN_FILE.sub("", page.read_text()))
    for name in sorted({*FILE.findall(text), *FOLDER.findall(text)}):
        if not (ROOT / name).is_dir() and not any(path.endswith(f"/{name}") for path in files()):
            yield f"{name} does not exist"


@cache
def files() -> tuple[str, ...]:
    """The tree's files, as paths below the root."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return tuple(f"/{path.relative_to(ROOT)}" for path in (*found, *ROOT.glob("*")))


def generated() -> Iterator[tuple[Path, str]]:
    """Each file that is generated or has generated parts, and what it should be."""
    yield from runpy.run_path(str(ROOT / "docs/generate.py"))["generate"]().items()
    for script in ("tools/dashboard.py", "tools/alert_rules.py"):
        made = runpy.run_path(str(ROOT / script))
        yield made["FILE"], made["text"]()


if __name__ == "__main__":
    sys.exit(main())
