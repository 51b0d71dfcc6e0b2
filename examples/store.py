"""The store without vLLM: chunks of bytes that outlive the process. Run it twice; the second run computes nothing.

python examples/store.py examples/configs/laptop.json
"""

from __future__ import annotations

import sys

import numpy as np

import nixl_tiers

CHUNK_BYTES = 1 << 20
KEYS = [f"report.pdf/page-{number}".encode() for number in range(16)]  # of 1 to 112 bytes


def compute(key: bytes) -> np.ndarray:
    """Whatever takes long."""
    return np.frombuffer((key * CHUNK_BYTES)[:CHUNK_BYTES], np.uint8)


def main(config: str) -> None:
    rows = np.empty((len(KEYS), CHUNK_BYTES), np.uint8)
    # What must not be mixed up (another model, another version of your format) has another namespace.
    with nixl_tiers.open(config, chunk_bytes=CHUNK_BYTES, namespace="pages, version 1") as store:
        store.wait_ready()  # until every tier has listed what earlier runs have left
        hits = store.get(KEYS, rows)  # where True, the row holds verified bytes; storage that fails is a miss
        missing = [number for number, hit in enumerate(hits) if not hit]
        for number in missing:
            rows[number] = compute(KEYS[number])
        store.put([KEYS[number] for number in missing], rows[missing])
        store.flush()  # else what is not written yet is lost when the store closes
    print(f"{len(KEYS) - len(missing)} found, {len(missing)} computed")


if __name__ == "__main__":
    main(*sys.argv[1:])
