"""Faults that are planted into streams of a real engine: in its scheduler, its worker and that one's thread, the mover.

Each makes some request of test_stream_engine.py end in another way than it should.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.jobs import RunningJobs
from tests.support.compiled import CSRC

# What streams.c says, and what it says instead.
IN_C: Final = {
    "no deadline": ("now_s() >= at->deadline_s", "0"),
    "limit not looked at behind a copy": ("limit = limit_of(self, at);\n    for", "limit = at->n_places;\n    for"),
}


def mutated_library(name: str, folder: Path) -> str:
    """The worker's library with this fault. Skips without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    source = (CSRC / "streams.c").read_text()
    assert source.count(IN_C[name][0]) == 1, f"streams.c does not say {IN_C[name][0]!r} once"
    file, library = folder / "streams.c", folder / f"{list(IN_C).index(name)}.so"
    file.write_text(source.replace(*IN_C[name]))
    sources = [file, CSRC / "swap_cpu.c", CSRC / "swap_step.c"]
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-pthread", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, "-o", str(library), *map(str, sources)], check=True)
    return str(library)


class CarelessConfig(FileConfig):
    """While a file `careless` is there, the mover says that rows have arrived whatever is in them."""

    type: str  # type: ignore[assignment]
    careless: str

    label: ClassVar[str] = "file"  # type: ignore[misc]

    @property
    def implementation(self) -> str:
        return f"{__name__}:careless_tier"


def careless_tier(config: CarelessConfig, geometry: Geometry, region: HostRegion) -> Any:
    from nixl_tiers.tiers.rowfile.tier import RowFileTier

    arrived = RunningJobs._arrived

    def careless(self: RunningJobs, job: Any, outcomes: Mapping[int, Outcome]) -> None:
        is_careless = Path(config.careless).exists()
        arrived(self, job, dict.fromkeys(outcomes, Outcome.OK) if is_careless else outcomes)
        if is_careless:
            time.sleep(0.2)  # as a rule the worker's thread is quicker than the report; now it is for certain

    RunningJobs._arrived = careless  # type: ignore[method-assign]
    return RowFileTier(config, geometry, region)


@contextmanager
def planted(name: str, argument: str, coordinator: Any, worker: Any) -> Iterator[None]:
    """`argument`: the mutated library, or the file `careless`."""
    if name in IN_C:
        with _other_library(worker._streamed, argument):
            yield
    elif name == "verdict not looked at":
        Path(argument).touch()
        yield
        Path(argument).unlink()
    else:
        holder, attribute, value = _patches(coordinator, worker)[name]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, attribute, value)
            yield


def _patches(coordinator: Any, worker: Any) -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    from nixl_tiers.vllm import compat

    streams = worker._streamed._streams
    ended = streams.ended

    def one_too_far(stream: Any) -> Any:
        end = ended(stream)
        return end and end._replace(gap=end.gap + 1)

    return {
        "gap one too far": (streams, "ended", one_too_far),
        "no invalid blocks": (worker, "take_invalid_blocks", set),
        "stores not set back": (compat, "offer_again", lambda *_: None),
        "words of before stay": (coordinator._core.host, "waits", None),
    }


@contextmanager
def _other_library(streamed: Any, path: str) -> Iterator[None]:
    from nixl_tiers.swap import streams as module

    good, library = streamed._streams, module._open(path)
    assert library is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_library", lambda: library)
        streamed._streams = module.Streams(good._plan, good._words, good._limits, good._bell)
        yield
        streamed._streams.close()
    streamed._streams = good
