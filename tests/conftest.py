"""What the whole session shares: S3 servers and the fake CUDA driver, each made when the first test asks for it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    # At run time only where a server is wanted: a machine with a GPU may have nothing but torch, and runs `-m gpu`.
    from nixl_tiers.testing.servers import MotoServer, S3Server, SeaweedServer

# The conformance suite's assertions are shown in full, as those of tests are.
pytest.register_assert_rewrite("nixl_tiers.testing.conformance", "nixl_tiers.testing.medium")

# As in a mover, where the AWS library inside NIXL reads them: a dead server is an error soon, not after half a minute.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("AWS_RETRY_MODE", "standard")
os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")

# Movers import the tiers of these tests by name, and look for nothing in the working directory.
_paths = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_paths))

_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    from nixl_tiers.testing.servers import moto_server

    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs() -> Iterator[SeaweedServer]:
    from nixl_tiers.testing.servers import seaweedfs_server

    with seaweedfs_server() as server:
        yield server


@pytest.fixture(params=["moto", "seaweedfs"])
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each server in turn."""
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], None]:
    """Puts a server's credentials into this process's environment, where the AWS chain finds them."""

    def use(server: S3Server) -> None:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.fixture(scope="session")
def s3_bucket() -> Callable[[S3Server], str]:
    """The bucket of a server that the tests share: SeaweedFS takes a second for the first write to a new one."""
    return cache(lambda server: server.make_bucket("tiers-shared"))


@pytest.fixture
def s3_prefix() -> str:
    """A prefix that no other test of this session uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA driver, or the reason for skipping."""
    from tests.swap.fake_gpu import build

    library = build(tmp_path_factory.mktemp("fake"))
    if library is None:
        pytest.skip("no C++ compiler here")
    return library
