"""What the doctor makes in a directory or below a prefix, to try it, has a name of its own, and is removed again."""

from __future__ import annotations

import re
from typing import Final

SCRATCH_PREFIX: Final = ".nixl-tiers-doctor-"
SCRATCH: Final = re.compile(rf"{re.escape(SCRATCH_PREFIX)}[0-9a-f]{{16}}")
STALE_S: Final = 3600.0  # left by a doctor that was killed
