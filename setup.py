"""Declares what is compiled; everything else about the package stands in pyproject.toml.

Libraries, which ctypes loads, and a module: nothing does without them, so the build needs a C compiler. The
libraries contain nothing of Python, and the module keeps to its limited API, so one wheel, tagged with the stable ABI,
serves every version. The GPU kernels, as one file for all architectures, are optional: without nvcc they are compiled
at the first start on a GPU (swap.kernels), for which the sources go into the wheel.
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info
from setuptools.command.sdist import sdist
from setuptools.errors import CCompilerError

HERE = Path(__file__).parent
KERNELS = ("swap.cu", "swap.h")
ARCHITECTURES = (80, 90, 100, 120)


class Describe(egg_info):
    """The README as a package index shows it: links to files of the tree go to that version in the repository."""

    def run(self):
        described = self.distribution.metadata
        version = described.get_version()
        tag = f"v{version}" if re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version) else "main"
        tree = f"{described.project_urls['Repository']}/blob/{tag}/"
        described.long_description = re.sub(r"\]\((?![a-z]+:|#)", f"]({tree}", described.long_description)
        super().run()


class Archive(sdist):
    """Nothing of the machine is in the archive, nor the time if SOURCE_DATE_EPOCH is set, which setuptools ignores."""

    def make_archive(self, base_name, kind, base_dir, **rest):
        if kind != "gztar":
            return super().make_archive(base_name, kind, base_dir=base_dir, **rest)
        epoch = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def anonymous(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = Path(f"{base_name}.tar.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            path.open("wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            archive.add(base_dir, filter=anonymous)
        return str(path)


class Build(build_ext):
    """The extension, then the kernels."""

    def build_extensions(self):
        """Some Pythons link with their own place as a path to search, which is nothing for a wheel."""
        self.compiler.linker_so = [word for word in self.compiler.linker_so if not word.startswith("-Wl,-rpath")]
        try:
            super().build_extensions()
        except CCompilerError as error:
            sys.exit(f"nixl_tiers needs a C compiler (cc, or what CC names) and Python's headers to be built: {error}")

    def run(self):
        super().run()
        if self.inplace:
            for stale in (HERE / "nixl_tiers").glob("**/_*.cpython-*.so"):
                stale.unlink()  # of before the stable ABI's name, and found before it
        source = HERE / "csrc"
        folder = (HERE if self.inplace else Path(self.build_lib)) / "nixl_tiers" / "swap"
        if not self.inplace:
            for name in KERNELS:
                (folder / "csrc").mkdir(parents=True, exist_ok=True)
                shutil.copy(source / name, folder / "csrc")
        digest = hashlib.sha256("\0".join((source / name).read_text() for name in sorted(KERNELS)).encode())
        fatbin = folder / f"_swap-{digest.hexdigest()[:16]}.fatbin"
        nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
        if nvcc and not fatbin.exists():
            for stale in folder.glob("_swap-*.fatbin"):
                stale.unlink()
            targets = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in ARCHITECTURES]
            targets.append("-gencode=arch=compute_80,code=compute_80")  # for GPUs to come
            command = [nvcc, "--fatbin", "-std=c++17", "-Xfatbin=-compress-all", *targets]
            try:
                subprocess.run([*command, "-o", str(fatbin), str(source / "swap.cu")], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"the GPU kernels are left out, to be compiled where they are used: {error}")


def native(name, *sources, optimize="-O3"):
    """A library or module of csrc/, without a path of the machine that compiles it."""
    flags = [optimize, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", f"-ffile-prefix-map={HERE}=."]
    return Extension(
        f"nixl_tiers.{name}",
        sources=[f"csrc/{source}" for source in sources],
        depends=sorted(str(path.relative_to(HERE)) for path in HERE.glob("csrc/*.h")),
        include_dirs=["csrc"],
        libraries=["pthread"],
        extra_compile_args=flags,
        py_limited_api=True,
    )


if "SOURCE_DATE_EPOCH" in os.environ:
    os.umask(0o022)  # modes of files are in a wheel

setup(
    cmdclass={"build_ext": Build, "egg_info": Describe, "sdist": Archive},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    ext_modules=[
        native("swap._swap_cpu", "swap_cpu.c", "swap_step.c"),
        native("swap._swap_submit", "swap_submit.c", optimize="-O2"),
        native("memory._hash_copy", "hash_copy.c"),
        native("tiers.slab._row_worker", "row_worker.c"),
        native("tiers.rowfile._row_files", "row_files.c"),
        native("core._tier_rows", "tier_rows.c", optimize="-O2"),
    ],
)
