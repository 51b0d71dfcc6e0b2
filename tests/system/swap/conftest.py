"""The compiled copies, as in the pure tree."""

from tests.swap.conftest import compiler, kernel, library, library_path

__all__ = ["compiler", "kernel", "library", "library_path"]
