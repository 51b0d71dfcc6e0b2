"""Declares what is compiled; everything else about the package stands in pyproject.toml.

Six things, all optional. Four libraries, which ctypes loads, and a module: without a C compiler the wheel is built
nevertheless, swap.host and memory.hash_copy use numpy, core.tier_rows holds fewer rows, NIXL moves the rows of slabs,
and GPUs are refused.
The libraries contain nothing of Python, and the module keeps to its limited API, so one wheel, tagged with the stable
ABI, serves every version. The GPU kernels, as one
file for all architectures: without nvcc they are compiled at the first start on a GPU (swap.kernels), for which the
sources go into the wheel.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
KERNELS = ("swap.cu", "swap.h")
ARCHITECTURES = (80, 90, 100, 120)


class Build(build_ext):
    """The extension, then the kernels."""

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


setup(
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    ext_modules=[
        Extension(
            "nixl_tiers.swap._swap_cpu",
            sources=["csrc/swap_cpu.c", "csrc/swap_step.c", "csrc/streams.c"],
            depends=["csrc/swap.h", "csrc/row_words.h"],
            include_dirs=["csrc"],
            libraries=["pthread"],
            extra_compile_args=["-O3", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        ),
        Extension(
            "nixl_tiers.swap._swap_submit",
            sources=["csrc/swap_submit.c"],
            depends=["csrc/swap.h", "csrc/swap_copies.h", "csrc/swap_submit.h"],
            include_dirs=["csrc"],
            libraries=["pthread"],
            extra_compile_args=["-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        ),
        Extension(
            "nixl_tiers.memory._hash_copy",
            sources=["csrc/hash_copy.c", "csrc/arrive.c"],
            depends=["csrc/pieces.h", "csrc/xxh3.h", "csrc/row_words.h"],
            include_dirs=["csrc"],
            extra_compile_args=["-O3", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        ),
        Extension(
            "nixl_tiers.tiers.slab._row_worker",
            sources=["csrc/row_worker.c"],
            depends=["csrc/row_worker.h", "csrc/seal.h", "csrc/pieces.h", "csrc/xxh3.h"],
            include_dirs=["csrc"],
            libraries=["pthread"],
            extra_compile_args=["-O3", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        ),
        Extension(
            "nixl_tiers.core._tier_rows",
            sources=["csrc/tier_rows.c"],
            depends=["csrc/tier_rows.h"],
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wextra"],
            optional=True,
            py_limited_api=True,
        ),
    ],
)
