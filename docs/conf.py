"""How Sphinx builds these pages: `make docs`. The pages are plain Markdown, so that they can be read on GitHub too."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of

from sphinx.application import Sphinx

project = "nixl_tiers"
version = release = version_of("nixl-tiers")
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # a heading's anchor is the same here and on GitHub
html_theme = "furo"
html_title = "nixl_tiers"
html_copy_source = False
html_show_copyright = False

PAGE = re.compile(r"\]\(([\w/-]+)\.md\)")


def add_navigation(_app: Sphinx, page: str, source: list[str]) -> None:
    """Navigation from the links on the first page: one table of contents a heading. A page without a link is an error.

    A `toctree` in the page itself would be shown as code on GitHub.
    """
    if page == "index":
        for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
            caption, pages = section.splitlines()[0], PAGE.findall(section)
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
