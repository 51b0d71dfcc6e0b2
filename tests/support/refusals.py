"""What is said of a configuration that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from nixl_tiers.config import schema
from nixl_tiers.config.schema import ConfigError


def refusal(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        schema.load(source)
    text = str(caught.value)
    assert "\n" not in text, "one sentence"
    assert caught.value.__context__ is None or caught.value.__suppress_context__, "the cause may repeat the input"
    return text
