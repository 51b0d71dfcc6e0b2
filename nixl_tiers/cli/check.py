"""`nixl-tiers config FILE`: is this configuration sound, and what does it mean?"""

from __future__ import annotations

from typing import Final

from nixl_tiers import config
from nixl_tiers.config import FileTier, S3Tier, TiersConfig

_WRITES: Final = {"through": "every chunk is written", "on_evict": "evicted chunks are written", "off": "read only"}


def check(source: str) -> int:
    """Print a summary. `source`: a file, or JSON text. Raises ConfigError. Changes nothing and asks nobody."""
    read = config.load(source)
    config.check_paths(read, create=False)
    print("\n".join(_summary(read)))
    return 0


def _summary(read: TiersConfig) -> list[str]:
    rows = [("cpu", config.format_size(read.cpu.capacity), "host memory of this node")]
    for name, tier in zip(read.names, read.storage, strict=True):
        rows.append((name, config.format_size(tier.capacity), _storage(tier)))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    lines = [f"{name:<{widths[0]}}  {size:>{widths[1]}}  {what}" for name, size, what in rows]
    weights = f'named "{read.model_id}"' if read.model_id else "recognised by their files"
    reset = "stored chunks are no longer used" if read.on_reset == "new_epoch" else "stored chunks stay valid"
    lines += [
        f"weights: {weights}",
        f"after a reset: {reset}",
        f"a request waits at most {read.wait_s:g} s for chunks to come up",
    ]
    if read.flush_on_exit_s:
        lines.append(f"closing waits at most {read.flush_on_exit_s:g} s for chunks that no tier holds yet")
    if read.lora_storage:
        lines.append("chunks of LoRA adapters are stored too")
    return lines


def _storage(tier: FileTier | S3Tier) -> str:
    writes = _WRITES[tier.write]
    if isinstance(tier, FileTier):
        return f"{tier.path}, {writes}, backend {tier.backend}"
    if tier.profile:
        keys = f"profile {tier.profile}"
    elif tier.credentials_file:
        keys = f"credentials in {tier.credentials_file}"
    elif tier.access_key_env:
        keys = f"credentials in the environment variables {tier.access_key_env} and {tier.secret_key_env}"
    else:
        keys = "credentials of the AWS chain"
    place = f"{tier.bucket}/{tier.prefix} at {tier.endpoint or f'AWS {tier.region}'}"
    return f"{place}, {writes}, {keys}"
