"""`nixl-tiers demo`: starts the demo, which needs the extra `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("demo-out"),
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 6032,
    s3: Annotated[
        str,
        typer.Option(
            metavar="moto|seaweedfs|URL",
            help="S3 server: one that is started for the demo, or the URL of one that runs, with credentials from the "
            "AWS chain; a bucket is made there and removed, or NIXL_TIERS_S3_BUCKET names one.",
        ),
    ] = "seaweedfs",
) -> int:
    """Start a vLLM server on a small model and time one prompt: computed, then a hit from every tier.

    Exit code: 0 if every answer and every hit is as expected, else 1.
    """
    from nixl_tiers.demo.run import run

    return run(out, prompt_tokens, s3)
