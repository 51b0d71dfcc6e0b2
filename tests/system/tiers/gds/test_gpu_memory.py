"""GPU memory <-> files through the real GDS_MT plugin, on the fake CUDA driver.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.swap.fake_gpu import as_cuda


@pytest.fixture
def fake_cuda(fake_library: Path, tmp_path: Path) -> Path:
    """A folder with libcuda.so.1 and libcudart.so.12."""
    return as_cuda(fake_library, tmp_path)


def test_gpu_memory_is_byte_exact_through_cufile(run: Callable[..., Any], fake_cuda: Path) -> None:
    cases = run("gpu_cases.py", cuda=fake_cuda)
    assert (cases.total, cases.failed, cases.skipped) == (4, 0, 0), cases.output
