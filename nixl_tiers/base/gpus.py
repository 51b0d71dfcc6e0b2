"""Which GPUs a child process sees. A library that opens one takes its memory, and would hang with it."""

from __future__ import annotations

import os


def only_gpu(place: int | None = 0) -> dict[str, str]:
    """Variables of a child that is to see one GPU, by its place among those that this process sees, as number 0; or
    none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if place is None:
        device = ""
    elif visible is None:
        device = str(place)
    else:
        device = ",".join(visible.split(",")[place : place + 1])
    return {"CUDA_VISIBLE_DEVICES": device}


def gpu_for(backend: object) -> dict[str, str]:
    """Variables of a child that opens this backend of a storage tier: cuFile gets the first GPU, which is a worker's,
    and nothing else any."""
    return only_gpu(0 if backend == "gds_mt" else None)
