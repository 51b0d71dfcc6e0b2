"""What a byte of KV takes in tiers, where KV groups differ in size."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1 import kv_cache_interface as interface

from nixl_tiers.vllm import spec as spec_module
from nixl_tiers.vllm.amplification import amplification
from nixl_tiers.vllm.spec import NixlTiersSpec

BLOCK = 32
HEAD = 64
PAGE = 2 * BLOCK * HEAD * 2  # one head's keys and values in 16 bits
Build = Callable[..., Any]


def attention(heads: int = 1, padded: int | None = None) -> Any:
    return interface.FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=HEAD, dtype=torch.bfloat16, page_size_padded=padded
    )


def state(floats: int, padded: int | None = None) -> Any:
    return interface.MambaSpec(block_size=BLOCK, shapes=((floats,),), dtypes=(torch.float32,), page_size_padded=padded)


def groups(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=each) for each in specs])


@pytest.mark.parametrize(
    ("specs", "block_bytes", "expected"),
    [
        ((attention(),), PAGE, 1.0),
        ((attention(), attention()), PAGE, 1.0),
        ((attention(4), attention(1)), 5 * PAGE, 2.0),  # packed: both groups' pages in each block
        ((attention(1, padded=3 * PAGE),), 3 * PAGE, 3.0),
        ((attention(), state(PAGE // 8, padded=PAGE)), PAGE, 4 / 3),
    ],
    ids=["one", "equal", "packed", "padded", "recurrent"],
)
def test_what_a_byte_of_kv_takes(
    offloading_config: Build, specs: tuple[Any, ...], block_bytes: int, expected: float
) -> None:
    config = offloading_config(groups=len(specs), block_bytes=block_bytes)
    assert amplification(config, groups(*specs)) == pytest.approx(expected)


@pytest.mark.parametrize("heads", [1, 2])
def test_an_engine_that_would_waste_more_does_not_start(
    offloading_config: Build, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra: dict[str, Any] = {"tiers": [{"type": "cpu", "capacity": "8MiB"}]}
    made = NixlTiersSpec(offloading_config(extra, groups=2, block_bytes=8 * PAGE))
    runner = SimpleNamespace(kv_cache_config=groups(attention(heads), attention(heads)))
    monkeypatch.setattr(spec_module.compat, "calling_worker", lambda: SimpleNamespace(model_runner=runner))
    monkeypatch.setattr(spec_module, "rendezvous", lambda *_, **__: pytest.fail("let pass"))
    with (
        pytest.raises(ValueError, match="more than 4 are refused")
        if heads == 1
        else pytest.raises(BaseException, match="let pass")
    ):
        made.get_worker(SimpleNamespace())
