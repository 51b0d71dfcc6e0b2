from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm.copy_jobs import RowsSpec


def test_a_spec_survives_pickling_and_is_small() -> None:
    spec = RowsSpec(np.arange(1000), (600, 400), (1 << 40) - 1, {7: 3})
    raw = pickle.dumps(spec)
    again = pickle.loads(raw)
    assert again.rows.tolist() == list(range(1000))
    assert again.rows.dtype == np.int64
    assert (again.counts, again.store_seq, again.missing) == ((600, 400), (1 << 40) - 1, {7: 3})
    assert len(raw) < 4 * 1000 + 300
