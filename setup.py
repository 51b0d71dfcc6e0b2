"""Declares the CPU swap library; everything else about the package stands in pyproject.toml.

A plain shared library that ctypes loads, no Python extension module. Optional: without a C compiler
the wheel is built all the same, and swap.host copies with numpy.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "nixl_tiers.swap._swap_cpu",
            sources=["csrc/swap_cpu.c"],
            depends=["csrc/swap.h"],
            include_dirs=["csrc"],
            extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra"],
            optional=True,
        )
    ]
)
