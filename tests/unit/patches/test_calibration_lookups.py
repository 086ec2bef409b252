"""Look-up weights fitted inside SGLang, where ranks have copies of a KV head, which no CPU server has."""

import torch

from sglang_triattn.patches.calibration.lookups import most_of_copies


def test_copies_of_a_head_count_all_queries():
    """Prevents weights of a KV head by the query heads of one rank alone, or by those of another head."""
    parts = [torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(6)]
    found = most_of_copies(parts, 2)
    assert len(found) == 6
    for rank, most in enumerate(found):
        other = parts[rank ^ 1]
        assert torch.equal(most, torch.maximum(parts[rank], other))
