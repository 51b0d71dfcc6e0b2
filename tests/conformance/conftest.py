"""The suite's assertions are shown in full, as those of tests are."""

import pytest

pytest.register_assert_rewrite("nixl_tiers.testing.conformance", "nixl_tiers.testing.medium")
