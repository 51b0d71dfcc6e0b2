"""Session fixtures: S3 servers, the fake CUDA driver and cuFile, each started by the first test that uses it."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.no_gpu import NoCuFileError, NoGpu, build, libraries

if TYPE_CHECKING:
    # Imported at run time only if a server is used: a GPU machine that runs `-m gpu` may have only torch.
    from tests.support.servers import MotoServer, RunningServer, S3Server, SeaweedServer

pytest_plugins = ["tests.support.pure", "tests.support.order", "tests.support.retries"]
if importlib.util.find_spec("hypothesis"):  # not installed where only `-m gpu` runs
    pytest_plugins += ["tests.support.replay"]

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


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "an S3 server for the tests with the marker s3, instead of those that they start: see CONTRIBUTING.md"
    parser.addoption("--endpoint", metavar="URL", help=text)
    text = "with -n: the engines of each worker compute on a core of its own, where other engines' threads do not spin"
    parser.addoption("--own-core", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    worker: str | None = getattr(config, "workerinput", {}).get("workerid")
    if worker is not None and config.getoption("--own-core"):
        from demo.vllm_cpu import all_cores

        cores = all_cores()
        os.environ["NIXL_TIERS_ENGINE_CORES"] = str(cores[int(worker.removeprefix("gw")) % len(cores)])
        os.environ["OMP_NUM_THREADS"] = "1"  # of engines that are bound to no core


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    chosen = any("s3_server" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "s3_server" in metafunc.fixturenames and not chosen:
        # moto takes four times as long for a request as SeaweedFS does.
        seldom = () if metafunc.definition.get_closest_marker("moto") else pytest.mark.slow
        servers = [pytest.param("moto", marks=seldom), "seaweedfs"]
        metafunc.parametrize(
            "s3_server", ["endpoint"] if metafunc.config.getoption("--endpoint") else servers, indirect=True
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"s3_server", "any_s3", "fast_s3"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.s3)
    engines = Path(__file__).parent / "system"
    for item in items:
        if item.get_closest_marker("vllm") and engines not in item.path.parents:
            raise pytest.UsageError(f"{item.nodeid} is marked `vllm`: such tests stand in tests/system")


def pytest_collection_finish() -> None:
    """What the imports of all tests have made is a million objects that stay: no garbage collection walks over them,
    and the others come seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """pytest collects garbage five times over in the end: once is enough."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What earlier runs on this machine have measured and compiled is not read, and nothing is left for later ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shared_aws_models() -> Iterator[None]:
    """Each boto3 session reads and parses the description of S3 for itself, and makes a class of each client: most of
    what opening a tier costs. Here they share what was read and made."""
    from botocore import client, endpoint_provider, session

    create, read = session.create_loader, dict[tuple[Any, ...], Any]()
    make_class, classes = client.ClientCreator._create_client_class, dict[str, type]()
    rule_set, rules = endpoint_provider.RuleSet, dict[int, Any]()

    def create_sharing(*args: Any, **fields: Any) -> Any:
        loader = create(*args, **fields)
        loader._cache = read
        return loader

    def class_of(self: Any, service: str, model: Any) -> type:
        if service not in classes:
            classes[service] = make_class(self, service, model)
        return classes[service]

    def rules_of(**fields: Any) -> Any:
        if id(fields["rules"]) not in rules:  # what was read stays
            rules[id(fields["rules"])] = rule_set(**fields)
        return rules[id(fields["rules"])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "create_loader", create_sharing)
        patch.setattr(client.ClientCreator, "_create_client_class", class_of)
        patch.setattr(endpoint_provider, "RuleSet", rules_of)
        yield


@pytest.fixture(scope="session")
def moto(shared_aws_models: None) -> Iterator[MotoServer]:
    from tests.support.servers import moto_server

    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(shared_aws_models: None) -> Iterator[SeaweedServer]:
    from tests.support.servers import seaweedfs_server

    with seaweedfs_server() as server:
        yield server


@pytest.fixture(scope="session")
def endpoint(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """The server of the option --endpoint. NIXL_TIERS_S3_BUCKET names a bucket there; else one is made."""
    from tests.support.servers import running_server

    with running_server(request.config.getoption("--endpoint"), os.environ.get("NIXL_TIERS_S3_BUCKET")) as server:
        yield server


def server_of(request: pytest.FixtureRequest, name: str) -> S3Server:
    """Of the fixture with this name, or that of the option --endpoint."""
    server: S3Server = request.getfixturevalue("endpoint" if request.config.getoption("--endpoint") else name)
    return server


@pytest.fixture
def s3_server(request: pytest.FixtureRequest) -> S3Server:
    """Each test runs once per server, or once on that of the option --endpoint."""
    return server_of(request, request.param)


@pytest.fixture
def any_s3(request: pytest.FixtureRequest) -> S3Server:
    """One server: moto, or that of the option --endpoint."""
    return server_of(request, "moto")


@pytest.fixture
def fast_s3(request: pytest.FixtureRequest) -> S3Server:
    """One server: SeaweedFS, which answers small requests sooner than moto, or that of the option --endpoint."""
    return server_of(request, "seaweedfs")


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
def s3_prefix(request: pytest.FixtureRequest) -> str:
    """A prefix of this test's own."""
    given: RunningServer | None = None
    if request.config.getoption("--endpoint"):
        given = request.getfixturevalue("endpoint")
    return f"{given.prefix if given else 'test'}-{next(_numbers)}"


@pytest.fixture(scope="session")
def fake_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The fake CUDA driver, and csrc/swap_submit.c as it is now; skips the test if there is no C++ compiler."""
    from nixl_tiers.base import native
    from nixl_tiers.swap import submit
    from tests.swap.fake_gpu import build, build_submit

    folder = tmp_path_factory.mktemp("fake")
    library = build(folder)
    if library is None:
        pytest.skip("no C++ compiler")
    submitting = submit._open(native.SWAP_SUBMIT._replace(path=str(build_submit(folder))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "_library", lambda: submitting)
        yield library


@pytest.fixture(scope="session")
def no_gpu_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """no_gpu.c; skips the test where cuFile's wheel or a C compiler is missing."""
    try:
        libraries()
        return build(tmp_path_factory.mktemp("no_gpu"))
    except NoCuFileError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_gpu(no_gpu_library: Path, tmp_path: Path) -> NoGpu:
    """cuFile in child processes of this test, without a GPU."""
    folder = tmp_path / "cufile"
    folder.mkdir()
    return NoGpu(no_gpu_library, libraries(), folder)


@pytest.fixture
def cufile_place(tmp_path: Path) -> Iterator[Path]:
    """An empty directory on a file system that cuFile takes: one on a block device, else a tmpfs. Its name is not like
    ours: tests beside this one look whether anything of ours is left in /dev/shm."""
    if os.major(tmp_path.stat().st_dev):
        path = tmp_path / "kv"
        path.mkdir()
        yield path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="cufile-") as folder:
        yield Path(folder)
