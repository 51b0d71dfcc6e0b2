"""A mount that never answers: an engine starts without its tier, and a command says so. What waits in the kernel is a
child or a mover."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.disks import hung_mount

OPEN = """
import json, logging, sys, nixl_tiers
logging.basicConfig()
with nixl_tiers.open(json.loads(sys.argv[1]), chunk_bytes=4096, namespace="n") as store:
    assert store.put([b"k"], [bytes(4096)]) == 1
    print(store.stats()["file"]["problem"])
"""
PLENTY_S = 60.0  # the product's own limit is 3 s


@pytest.fixture
def config(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "mnt").mkdir()
    with hung_mount(tmp_path / "mnt") as place:
        disk = {"type": "file", "path": str(place / "kv"), "capacity": "64MiB", "min_free": 0, "max_age": "7d"}
        yield json.dumps({"tiers": [{"type": "cpu", "capacity": "1MiB"}, disk]})


def run(*arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=PLENTY_S, env=os.environ
    )
    return done.stdout, done.stderr


def test_store_opens_without_the_tier_and_says_so(config: str) -> None:
    shown, logged = run("-c", OPEN, config)
    assert shown == "it has not answered within 3 s, and was not checked\n"
    assert "is down: it has not answered within 3 s, and was not checked" in logged


def test_config_answers_and_says_what_it_did_not_look_at(config: str) -> None:
    shown, _ = run("-m", "nixl_tiers.cli", "config", config)
    assert "warning: file tier: it has not answered within 3 s, and was not checked\n" in shown
    assert shown.startswith("the configuration is valid, 1 warning\n")
