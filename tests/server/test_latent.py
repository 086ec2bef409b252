"""Models with latent KV (MLA), against an account that masks evicted latents of each layer on its own."""

from __future__ import annotations

import pytest

from family_servers import compare_with_account

CASES = [
    ("deepseek-v3", 1, "per-layer-head"),
    ("kimi-k2", 32, "per-layer-head"),
    ("glm-4.7-flash", 64, "per-layer-head"),
    ("deepseek-v3", 1, "shared-mean"),
]


@pytest.mark.parametrize(("family", "page_size", "selection"), CASES)
def test_logits_equal_a_forward_pass_masked_by_layer(serve, tmp_path, family, page_size, selection):
    """Prevents scores of the wrong dims of a row, without YaRN's scaling or by expanded queries; rows that are moved in
    part; and tokens that are chosen by values."""
    compare_with_account(serve, tmp_path, family, page_size, selection)
