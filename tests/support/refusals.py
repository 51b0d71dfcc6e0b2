"""The error message of an invalid configuration."""

from __future__ import annotations

from typing import Any

import pytest

from nixl_tiers.config import schema
from nixl_tiers.config.schema import ConfigError


def refusal(source: Any) -> str:
    """Load `source`, which must fail with ConfigError; return its message."""
    with pytest.raises(ConfigError) as caught:
        schema.load(source)
    text = str(caught.value)
    assert "\n" not in text, "one sentence"
    assert caught.value.__context__ is None or caught.value.__suppress_context__, "the cause may repeat the input"
    return text
