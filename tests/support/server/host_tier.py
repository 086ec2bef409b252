"""A KV tier in host memory, and prompts that go there."""

from __future__ import annotations

from harness import Client, prompt

HOST_TIER = ("--enable-hierarchical-cache", "--enable-cache-report", "--max-total-tokens", "1024")
# SGLang reserves memory for everything that a request may still generate; here several must share a small pool.
RESERVE = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "32"}
# A pool of states that five prompts outgrow.
FEW_STATES = ("--max-mamba-cache-size", "16")


def hits(response: dict) -> dict[str, int]:
    """Cached tokens of a prompt by tier."""
    found = response["meta_info"]["cached_tokens_details"] or {}
    tiers = {tier: found.get(tier, 0) for tier in ("device", "host", "storage")}
    assert sum(tiers.values()) == response["meta_info"]["cached_tokens"]
    return tiers


def fill_the_pool(client: Client, seed: int) -> None:
    """Pushes everything else out of the KV pool."""
    for index in range(4):
        client.generate(prompt(seed + index, 400), 1)
