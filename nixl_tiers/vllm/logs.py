"""Under vLLM our log lines go where vLLM's go: same handlers, same format, same level."""

from __future__ import annotations

import logging


def log_as_vllm() -> None:
    """Make our loggers descend from vLLM's, which it configures by itself and keeps apart from the root logger.

    Otherwise our INFO lines would be dropped, and warnings come without time and level. A logger `nixl_tiers` that has
    handlers or a level of its own is left as it is.
    """
    ours = logging.getLogger("nixl_tiers")
    if not ours.handlers and ours.propagate:
        ours.parent = logging.getLogger("vllm")
        ours.setLevel(ours.level)  # loggers remember which levels are enabled; this has them look again
