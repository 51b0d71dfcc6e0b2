"""`python -m nixl_tiers.cli` is `nixl-tiers`."""

import sys

from nixl_tiers.cli import main

sys.exit(main())
