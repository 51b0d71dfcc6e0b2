"""The troubleshooting page quotes what the code says: whoever rewords a line changes both."""

from __future__ import annotations

import ast
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from nixl_tiers.config import CpuTier, FileTier, S3Tier, TiersConfig

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs/guide/troubleshooting.md"
FIELDS: Final = {field for model in (CpuTier, FileTier, S3Tier, TiersConfig) for field in model.model_fields}


def quotes() -> Iterator[str]:
    """The pieces between the `...` of everything that stands as code in the first column of the page's tables."""
    for cell in re.findall(r"^\| (.*?) \|", PAGE.read_text(), re.MULTILINE):
        for quote in re.findall(r"`([^`]+)`", cell):
            yield from filter(None, (piece.strip() for piece in quote.split("...")))


def test_every_line_that_troubleshooting_quotes_stands_in_the_code() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "nixl_tiers").rglob("*.py")]
    texts = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    said = "\n".join([*texts, *map(os.strerror, errno.errorcode), *FIELDS])
    found = list(quotes())
    assert len(found) > 80
    # A metric is declared without what Prometheus adds to it.
    assert [quote for quote in found if re.sub(r"_total(\{.*\})?$", "", quote) not in said] == []
