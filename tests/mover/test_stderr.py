"""A mover's standard error, as the supervisor reads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from nixl_tiers.mover.stderr import FORMAT, LAST_LINES, LINE_BYTES, Stderr, secrets_of

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def pipe() -> Iterator[tuple[Stderr, int]]:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    yield Stderr(read_fd, [SECRET]), write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_log_lines_have_their_level_and_others_are_kept(pipe: tuple[Stderr, int]) -> None:
    stderr, write_fd = pipe
    assert stderr.read() == []
    line = FORMAT % "file" % {"levelname": "WARNING", "message": "no room"}
    os.write(write_fd, f"{line}\nTraceback\n\nhalf".encode())
    assert stderr.read() == [(logging.WARNING, "no room"), (logging.DEBUG, "Traceback")]
    os.write(write_fd, b" a line\n" * 3)
    assert stderr.read() == [(logging.DEBUG, "half a line"), *[(logging.DEBUG, " a line")] * 2]
    os.write(write_fd, b"".join(b"%d\n" % number for number in range(100)))
    stderr.read()
    assert list(stderr.last) == [str(number) for number in range(100 - LAST_LINES, 100)]
    assert not stderr.eof


def test_a_long_line_is_cut_and_never_shows_part_of_a_secret(pipe: tuple[Stderr, int]) -> None:
    stderr, write_fd = pipe
    for have in range(1, len(SECRET)):
        os.write(write_fd, b"x" * (LINE_BYTES + 1 - have // 2) + SECRET[:have].encode())
        shown = [text for _, text in stderr.read()]
        os.write(write_fd, SECRET[have:].encode() + b"\nnext\n")
        shown += [text for _, text in stderr.read()]
        assert shown[1:] == ["next"]
        assert set(shown[0]) == {"x"}


def test_secrets_are_redacted(pipe: tuple[Stderr, int]) -> None:
    stderr, write_fd = pipe
    os.write(write_fd, f"key {SECRET} in url?X-Amz-Signature=0123abcd and\naws_session_token = 'abc def'\n".encode())
    assert [text for _, text in stderr.read()] == ["key *** in url?X-Amz-Signature=***", "aws_session_token = ***"]


def test_secret_variables_are_found_by_name() -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": "token-token",
        "AWS_SHARED_CREDENTIALS_FILE": "/etc/credentials",
        "TOKENIZERS_PARALLELISM": "false",
        "MINE": "mine-mine",
        "OTHER": "other-other",
    }
    assert set(secrets_of(environment, ["MINE"])) == {SECRET, "token-token", "mine-mine"}


def test_eof_ends_the_last_line() -> None:
    read_fd, write_fd = os.pipe()
    stderr = Stderr(read_fd, [])
    os.write(write_fd, b"last word")
    os.close(write_fd)
    assert [stderr.read(), stderr.read()] == [[], [(logging.DEBUG, "last word")]]
    assert stderr.eof
    os.close(read_fd)
