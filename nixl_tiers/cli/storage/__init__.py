"""What is stored below a path or a prefix, seen from outside: for `inspect`, `verify` and `purge`.

Engines may be using it meanwhile. Nothing is written but by `Storage.delete`, and no lock is held but for a moment.
"""
