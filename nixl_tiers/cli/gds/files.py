"""Text files of /proc, /sys and udev, which may be missing or unreadable."""

from __future__ import annotations

from pathlib import Path


def text_of(path: Path) -> str | None:
    """None where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def line_of(path: Path) -> str:
    """Without spaces around it; "" where it cannot be read."""
    return (text_of(path) or "").strip()
