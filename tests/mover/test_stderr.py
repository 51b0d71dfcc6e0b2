"""A mover's standard error, as the engine reads it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from nixl_tiers.mover.stderr import FORMAT, LAST_LINES, LINE_BYTES, Stderr, secrets_of

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def pipe() -> Iterator[tuple[Stderr, int]]:
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    yield Stderr(told, [SECRET]), tells
    os.close(told)
    os.close(tells)


def test_lines_of_ours_have_their_level_and_others_are_kept(pipe: tuple[Stderr, int]) -> None:
    stderr, tells = pipe
    assert stderr.read() == []
    line = FORMAT % "file" % {"levelname": "WARNING", "message": "no room"}
    os.write(tells, f"{line}\nTraceback\n\nhalf".encode())
    assert stderr.read() == [(logging.WARNING, "no room"), (logging.DEBUG, "Traceback")]
    os.write(tells, b" a line\n" * 3)
    assert stderr.read() == [(logging.DEBUG, "half a line"), *[(logging.DEBUG, " a line")] * 2]
    os.write(tells, b"".join(b"%d\n" % number for number in range(100)))
    stderr.read()
    assert list(stderr.last) == [str(number) for number in range(100 - LAST_LINES, 100)]
    assert not stderr.ended


def test_a_line_without_an_end_is_cut_and_never_shows_half_a_secret(pipe: tuple[Stderr, int]) -> None:
    stderr, tells = pipe
    for have in range(1, len(SECRET)):
        os.write(tells, b"x" * (LINE_BYTES + 1 - have // 2) + SECRET[:have].encode())
        shown = [text for _, text in stderr.read()]
        os.write(tells, SECRET[have:].encode() + b"\nnext\n")
        shown += [text for _, text in stderr.read()]
        assert shown[1:] == ["next"]
        assert set(shown[0]) == {"x"}


def test_no_secret_is_shown(pipe: tuple[Stderr, int]) -> None:
    stderr, tells = pipe
    os.write(tells, f"key {SECRET} in url?X-Amz-Signature=0123abcd and\naws_session_token = 'abc def'\n".encode())
    assert [text for _, text in stderr.read()] == ["key *** in url?X-Amz-Signature=***", "aws_session_token = ***"]


def test_which_variables_are_secret() -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": "token-token",
        "AWS_SHARED_CREDENTIALS_FILE": "/etc/credentials",
        "TOKENIZERS_PARALLELISM": "false",
        "MINE": "mine-mine",
        "OTHER": "other-other",
    }
    assert set(secrets_of(environment, ["MINE"])) == {SECRET, "token-token", "mine-mine"}


def test_the_end() -> None:
    told, tells = os.pipe()
    stderr = Stderr(told, [])
    os.write(tells, b"last word")
    os.close(tells)
    assert [stderr.read(), stderr.read()] == [[], [(logging.DEBUG, "last word")]]
    assert stderr.ended
    os.close(told)
