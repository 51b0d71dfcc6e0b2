"""What the suite needs beside the checkout's environment, below .cache/torture: `python -m tools.torture.environments`.

LMCache in an environment of its own, over the checkout's, whose vLLM and torch it uses: of what it needs, only what
the checkout does not have, without what is for GPUs or clouds alone. mfusepy for the pass-through.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from typing import Final

from tools.torture.disks import MODULES
from tools.torture.sides import LMCACHE, LMCACHE_VERSION

PACKAGES: Final = [
    f"lmcache=={LMCACHE_VERSION}", "aiofile", "aiofiles", "caio", "awscrt", "nvtx", "redis",
    "opentelemetry-exporter-prometheus<=0.61b0", "grpcio-observability==1.78.0",
]  # fmt: skip
PIP: Final = ["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]


def main() -> None:
    if not (MODULES / "mfusepy.py").exists():
        subprocess.run([sys.executable, *PIP, "--target", str(MODULES), "mfusepy==3.1.1"], check=True)
    if not LMCACHE.exists():
        folder = LMCACHE.parents[1]
        venv.create(folder, with_pip=False)
        below = sysconfig.get_path("purelib", vars={"base": str(folder)})
        with open(f"{below}/checkout.pth", "w") as paths:
            print(sysconfig.get_path("purelib"), file=paths)
        try:
            subprocess.run([str(LMCACHE), *PIP, *PACKAGES], check=True)
        except subprocess.CalledProcessError:
            LMCACHE.unlink()  # so that its cells say that it is missing
            print("LMCache could not be installed: its cells are not run", file=sys.stderr)


if __name__ == "__main__":
    main()
