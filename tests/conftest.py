"""Session fixtures: S3 servers and the fake CUDA driver, each started by the first test that uses it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    # Imported at run time only if a server is used: a GPU machine that runs `-m gpu` may have only torch.
    from nixl_tiers.testing.servers import MotoServer, S3Server, SeaweedServer

with contextlib.suppress(ImportError):  # not installed where only `-m gpu` runs
    from hypothesis import settings

    # A machine may be many times slower than expected: no example has a wall-clock limit.
    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")

# pytest explains failed assertions of the conformance suite, as it does those of tests.
pytest.register_assert_rewrite("nixl_tiers.testing.conformance", "nixl_tiers.testing.medium")

# As in a mover, where the AWS SDK inside NIXL reads them: a dead server fails within seconds, not half a minute.
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
os.environ.setdefault("AWS_RETRY_MODE", "standard")
os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")

# Movers import the tiers of these tests by name, and do not search the working directory.
_paths = [str(Path(__file__).parents[1]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_paths))

_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    engines = Path(__file__).parent / "vllm"
    for item in items:
        chosen = not any(map(item.get_closest_marker, ("slow", "faults", "stress")))
        if chosen and item.get_closest_marker("vllm") and engines not in item.path.parents:
            raise pytest.UsageError(f"{item.nodeid} is marked `vllm`: `make test` runs such tests in tests/vllm only")


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
    """Each test runs once per server."""
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def s3_credentials(monkeypatch: pytest.MonkeyPatch) -> Callable[[S3Server], None]:
    """Puts a server's credentials into the environment, where the AWS credential chain finds them."""

    def use(server: S3Server) -> None:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.fixture(scope="session")
def s3_bucket() -> Callable[[S3Server], str]:
    """The bucket shared by all tests of a server: SeaweedFS takes a second for the first write to a new one."""
    return cache(lambda server: server.make_bucket("tiers-shared"))


@pytest.fixture
def s3_prefix() -> str:
    """A prefix of this test's own."""
    return f"test-{next(_numbers)}"


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA driver; skips the test if there is no C++ compiler."""
    from tests.swap.fake_gpu import build

    library = build(tmp_path_factory.mktemp("fake"))
    if library is None:
        pytest.skip("no C++ compiler")
    return library
