from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")


def test_importing_the_spec_starts_nothing() -> None:
    """Besides vLLM's own base it brings no mover, no NIXL, no S3 client, and no thread or process."""
    code = (
        "import sys, threading, os\n"
        "import nixl_tiers.vllm.compat\n"
        "before, known = threading.active_count(), set(sys.modules)\n"
        "import nixl_tiers.vllm.spec\n"
        "assert threading.active_count() == before\n"
        "assert not os.path.exists('/proc/self/task/%d/children' % os.getpid()) or "
        "not open('/proc/self/task/%d/children' % os.getpid()).read()\n"
        "new = set(sys.modules) - known\n"
        "heavy = {name for name in new if name.split('.')[0] in ('nixl', 'boto3', 'transformers')}\n"
        "assert not heavy | (new & {'nixl_tiers.store', 'nixl_tiers.swap.host'}), new\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
