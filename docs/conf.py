"""How Sphinx builds these pages: `make docs`. The pages are plain Markdown, so that they can be read on GitHub too."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx

project = "nixl_tiers"
release = version_of("nixl-tiers")
version = release.partition("+")[0]  # of a commit after the last tag, without its digest
extensions = ["myst_parser", "sphinx_copybutton"]
copybutton_exclude = ".linenos, .gp, .go"  # of a console session only what was typed
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # a heading's anchor is the same here and on GitHub
html_theme = "furo"
html_title = f"nixl_tiers {version}"
html_copy_source = False
html_show_copyright = False

PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")
README = Path(__file__).parents[1] / "README.md"
SHOWN = ("", "Use it")  # parts of the README that the first page begins with, by heading


def readme() -> str:
    """Its parts SHOWN, with links as from this directory."""
    parts = re.split(r"^## ", README.read_text().partition("\n")[2], flags=re.MULTILINE)
    headed = {"": parts[0], **{part.partition("\n")[0]: f"## {part}" for part in parts[1:]}}
    text = "\n".join(headed[heading] for heading in SHOWN)
    text = re.sub(r"\]\((?!https?:|docs/)", "](path:../", text)
    return text.replace("](docs/", "](")


def make_first_page(_app: Sphinx, page: str, source: list[str]) -> None:
    """The README's beginning, and navigation from the links: one table of contents a heading. A page without a link is
    an error.

    Directives in the page itself would be shown as code on GitHub.
    """
    if page == "index":
        links = source[0]
        source[0] = links.replace("[README](../README.md)\n", readme())
        for section in re.split(r"^## ", links, flags=re.MULTILINE)[1:]:
            caption, pages = section.splitlines()[0], PAGE.findall(section)
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", make_first_page)
