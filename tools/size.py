"""Fails if a room of the tree is larger than `pyproject.toml` allows, or a file belongs to no room, or to two.

`make lint` runs it. `--lower` writes today's figures where they are below a ceiling. Only a commit of its own, which
says what a user gets for the lines, raises one.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PROJECT: Final = ROOT / "pyproject.toml"
LAYOUT: Final = {
    *(tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def main(arguments: list[str]) -> int:
    """0 if every room is below its ceilings."""
    size = tomllib.loads(PROJECT.read_text())["tool"]["size"]
    rooms: dict[str, Any] = size["rooms"]
    found: dict[str, Counter[str]] = {room: Counter() for room in rooms}
    wrong, skips = [], 0
    for name in tracked():
        owners = [room for room, its in rooms.items() if any(belongs(name, pattern) for pattern in its["files"])]
        if len(owners) != 1:
            wrong.append(f"{name} belongs to {' and '.join(owners) or 'no room'}: see [tool.size.rooms]")
            continue
        text = (ROOT / name).read_text()
        skips += text.count("# fmt: skip\n") if name.endswith(".py") else 0
        found[owners[0]] += measured(name, text)
    if "--lower" in arguments:
        lower(rooms, found)
        return 0
    if skips > size["fmt_skips"]:
        wrong.append(f"{skips} lines are not formatted (fmt: skip), {size['fmt_skips']} are allowed")
    for room, counts in found.items():
        wrong += [
            f"{room}: {counts[what]:,} {what}, {rooms[room][what]:,} are allowed"
            for what in ("lines", "tokens", "words")
            if what in rooms[room] and counts[what] > rooms[room][what]
        ]
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


def tracked() -> list[str]:
    """The text files that git knows and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z", "--eol"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [line.split("\t", 1) for line in listed.stdout.split("\0") if line]
    return [name for kind, name in names if "-text" not in kind and (ROOT / name).is_file()]


def belongs(name: str, pattern: str) -> bool:
    """`pattern`: a folder, with a slash at its end, or a file, whose parts may have stars."""
    if pattern.endswith("/"):
        return name.startswith(pattern)
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def measured(name: str, text: str) -> Counter[str]:
    """Lines, words that a reader of a page sees, and of Python the tokens, without comments, strings and layout."""
    words = len(re.sub(r"<!--.*?-->", "", text).split())
    return Counter(lines=text.count("\n"), words=words, tokens=tokens(text) if name.endswith(".py") else 0)


def tokens(text: str) -> int:
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        depth += kind == "FSTRING_START"  # from Python 3.12 on; before, all of it is one STRING
        count += not depth and kind != "STRING" and token.type not in LAYOUT
        depth -= kind == "FSTRING_END"
    return count


def lower(rooms: Mapping[str, Any], found: Mapping[str, Counter[str]]) -> None:
    text = PROJECT.read_text()
    for room, counts in found.items():
        line = next(each for each in text.splitlines() if re.match(rf'"?{re.escape(room)}"? = \{{ files', each))
        lowered = line
        for what in ("lines", "tokens", "words"):
            if what in rooms[room]:
                least = min(rooms[room][what], counts[what])
                lowered = re.sub(rf"\b{what} = \d+", f"{what} = {least}", lowered)
        text = text.replace(line, lowered)
    PROJECT.write_text(text)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
