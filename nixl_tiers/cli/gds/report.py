"""`nixl-tiers doctor --gds DIR`: runs all steps, and prints what they found with a verdict.

Needs nothing but the standard library, so that it also works where this package's dependencies are missing.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from nixl_tiers.base.gpus import only_gpu
from nixl_tiers.cli.children import Children, Step
from nixl_tiers.cli.gds.probe import FILE_BYTES
from nixl_tiers.cli.gds.verdict import EXIT_CODES, INSTALL, Probes, Verdict, claimed_way, decide, not_direct

_LOADER_NAME: Final = "libcufile.so.0"
_PROBE: Final = "nixl_tiers.cli.gds.probe"
DEADLINE_S: Final = 10.0  # of a step
_IO_DEADLINE_S: Final = 60.0  # for 64 MiB on a slow disk; what is known to hang has been tried by then
_MACHINE: Final = "the drivers and file systems: run `gdscheck -p`; what is between GPU and drive: `nvidia-smi topo -m`"


class NotUsable(ValueError):
    """A directory or GPU that cannot be examined. One sentence."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Literal["ok", "warning", "unavailable", "not tried"]
    text: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    directory: Path
    verdict: Verdict
    checks: tuple[Check, ...]
    probes: Probes

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": str(self.verdict.kind),
            "reason": self.verdict.reason,
            "directory": str(self.directory),
            "date": time.strftime("%Y-%m-%d"),
            "nixl_tiers": _version(),
            "kernel": platform.release(),
            "checks": [asdict(check) for check in self.checks],
            "steps": {name: _raw(step) for name, step in _steps(self.probes)},
        }

    def lines(self) -> Iterator[str]:
        yield f"GPUDirect Storage in {self.directory}, kernel {platform.release()}"
        yield ""
        widest = max(len(check.name) for check in self.checks)
        for check in self.checks:
            status = "" if check.status == "ok" else f"{check.status}: "
            yield f"{check.name:<{widest}}  {status}{check.text}"
        for name, step in _steps(self.probes):
            if step.log:
                yield from ("", f"logged in the step {name}:", *(f"  {line}" for line in step.log))
        yield ""
        yield _MACHINE
        yield f"verdict: {self.verdict}"


def examine(directory: Path, gpu: int = 0, *, as_json: bool = False, deadline_s: float = DEADLINE_S) -> int:
    """Print the report for a directory, and return the verdict's exit code. Raises NotUsable."""
    report = inspect(directory, gpu, deadline_s)
    print(json.dumps(report.as_dict(), indent=2, default=str) if as_json else "\n".join(report.lines()))
    return EXIT_CODES[report.verdict.kind]


def inspect(directory: Path, gpu: int = 0, deadline_s: float = DEADLINE_S) -> Report:
    """Run every step. Writes 32 MiB below `directory`, and deletes them."""
    directory = directory.resolve()
    try:
        room = Path(tempfile.mkdtemp(prefix=".nixl-tiers-gds-", dir=directory))
    except OSError as error:
        raise NotUsable(f"--gds {directory}: {error.strerror}") from error
    try:
        with tempfile.TemporaryDirectory(prefix="nixl-tiers-gds-") as scratch:
            file = room / "probe"
            try:
                file.write_bytes(bytes(FILE_BYTES))
            except OSError as error:
                raise NotUsable(f"--gds {directory}: {error.strerror}") from error
            probes = _probe(Children(Path(scratch), _PROBE, deadline_s), file, gpu)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    chosen = next((found for found in probes.gpus.findings if found.get("gpu") == gpu), None)
    if chosen is None and gpu:
        raise NotUsable(f"--gpu {gpu}: this machine has no such GPU")
    return Report(directory, decide(probes), tuple(_findings(probes, chosen)), probes)


def _probe(children: Children, file: Path, gpu: int) -> Probes:
    """Each step only if what it needs has worked: one open that hangs is enough. cuFile sees this GPU alone, as a mover
    does."""
    gpus = children.run("gpus")
    found = gpu in gpus.all("gpu")
    at = "0" if found else "-1"
    children.environment |= only_gpu(gpu if found else None)
    library = children.run("library", _LOADER_NAME, *map(str, libraries(_LOADER_NAME)))
    path = library.get("library")
    if path is None:
        return Probes(gpus, library, plugin=children.run("plugin"))
    driver = children.run("driver", path, at)
    if driver.error:
        return Probes(gpus, library, driver)
    host = children.run("io", path, "-1", "host", str(file), deadline_s=_IO_DEADLINE_S)
    allocated = mapped = None
    if at != "-1":
        allocated = children.run("io", path, at, "cuMemAlloc", str(file), deadline_s=_IO_DEADLINE_S)
        mapped = children.run("io", path, at, "cuMemCreate", str(file), deadline_s=_IO_DEADLINE_S)
    plugin, plugin_path = children.run("plugin"), ""
    if plugin.error:
        runtimes = (next(iter(libraries(f"libcudart.so.{major}")), None) for major in (12, 13))
        folders = [Path(path).parent, *(found.parent for found in runtimes if found)]
        wanted = os.pathsep.join(dict.fromkeys(map(str, folders)))
        both = os.pathsep.join(filter(None, (wanted, os.environ.get("LD_LIBRARY_PATH"))))
        if not children.run("plugin", environment={"LD_LIBRARY_PATH": both}).error:
            plugin_path = wanted
    return Probes(gpus, library, driver, host, allocated, mapped, plugin, plugin_path)


def libraries(name: str) -> list[Path]:
    """Where a library may be besides where the loader looks: in Python packages, and below CUDA's folders."""
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    found = [path for folder in folders for path in sorted(folder.glob(f"*/lib/{name}"))]
    for cuda in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        found += [path for place in ("lib64", "targets/*/lib") for path in sorted(cuda.glob(f"{place}/{name}"))]
    return found


def _version() -> str:
    try:
        return version("nixl-tiers")
    except PackageNotFoundError:  # a checkout that is not installed
        return ""


# --- what the steps found, as lines ---------------------------------------------------------------------------------


def _findings(probes: Probes, gpu: Mapping[str, Any] | None) -> Iterator[Check]:
    """`gpu`: a finding of the step `gpus`, or None without one."""
    if gpu is None:
        yield Check("GPU", "unavailable", probes.gpus.error or "the CUDA driver knows none")
    else:
        yield Check(f"GPU {gpu['gpu']}", "ok", f"{gpu['name']} at {gpu['address']}", dict(gpu))
    yield _library(probes.library)
    yield _driver(probes)
    yield _memory("host memory", probes.host, "")
    if gpu is not None:
        way = claimed_way(probes.driver) if probes.driver else ""
        yield _memory("GPU, cuMemAlloc", probes.allocated, way)
        yield _memory("GPU, cuMemCreate", probes.mapped, way)
    yield _plugin(probes)


def _library(step: Step) -> Check:
    if step.error:
        return Check("libcufile", "unavailable", f"{step.error}; {INSTALL}")
    text = f"{step.get('version') or 'of an unknown version'}, {step.get('library')}"
    if step.get("by_loader"):
        return Check("libcufile", "ok", text)
    folder = Path(step.get("library")).parent
    return Check("libcufile", "warning", f"{text}; the loader does not find it: add {folder} to LD_LIBRARY_PATH")


def _driver(probes: Probes) -> Check:
    step = probes.driver
    if step is None:
        return Check("cuFile driver", "not tried", "there is no libcufile")
    if step.error:
        return Check("cuFile driver", "unavailable", step.error)
    said = step.get("driver")
    way = claimed_way(step) or "no direct way"
    allowed = {True: "allowed", False: "not allowed", None: "unknown"}[said["allow_compat_mode"]]
    if said["force_compat_mode"]:
        allowed = "forced"
    text = f"opens in {step.seconds:.1f} s; {way}; compatibility mode {allowed}"
    return Check("cuFile driver", "ok", text, {**said, "bar1_bytes": step.get("bar1_bytes")})


def _memory(name: str, step: Step | None, way: str) -> Check:
    if step is None:
        return Check(name, "not tried", "cuFile's driver does not open")
    sizes = step.all("size")
    registered = step.get("registered")
    kept = {True: "registered", False: f"not registered ({step.get('why')})", None: "not registered"}[registered]
    if step.error:
        done = f"{kept}; {len(sizes)} of the sizes verified; " if sizes or registered is not None else ""
        return Check(name, "unavailable", f"{done}{step.error}", {"sizes": sizes, "registered": registered})
    direct = "" if step.get("direct") else ", without O_DIRECT"
    text = f"{kept}; 4 KiB to 16 MiB written, read and verified{direct}"
    if way:
        missing = not_direct(step, way)
        text += f"; {missing}" if missing else f"; all of it by {way}, as counters show"
    details = {"sizes": sizes, "registered": registered, "before": step.get("before"), "after": step.get("after")}
    return Check(name, "ok" if registered else "warning", text, details)


def _plugin(probes: Probes) -> Check:
    step, name = probes.plugin, "NIXL GDS_MT"
    if step is None:
        return Check(name, "not tried", "cuFile's driver does not open")
    number = step.get("nixl")
    if not step.error:
        return Check(name, "ok", f"the plugin opens, NIXL {number}")
    if number is None:
        return Check(name, "unavailable", f"{step.error}; install nixl with nixl-cu12 or nixl-cu13")
    if probes.plugin_path:
        wanted = f"it opens with LD_LIBRARY_PATH={probes.plugin_path}: set it for the engine"
        return Check(name, "unavailable", f"{step.error}, NIXL {number}; {wanted}")
    cuda = "libcudart.so.12 (nixl-cu12) or .13 (nixl-cu13)"
    return Check(
        name,
        "unavailable",
        f"{step.error}, NIXL {number}; it needs {_LOADER_NAME} and {cuda} where the loader finds them: {INSTALL}, "
        "and set LD_LIBRARY_PATH",
    )


def _steps(probes: Probes) -> Iterator[tuple[str, Step]]:
    for name in Probes.__dataclass_fields__:
        step = getattr(probes, name)
        if isinstance(step, Step):
            yield name, step


def _raw(step: Step) -> dict[str, Any]:
    findings = [finding for finding in step.findings if "at" not in finding]
    return {"error": step.error, "seconds": round(step.seconds, 2), "findings": findings, "log": step.log}
