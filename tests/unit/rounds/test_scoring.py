"""The scorer's constants for servers that count positions from another number than 0."""

import dataclasses

import torch

from sample_stats import KV_HEADS, LAYERS, stats
from sglang_triattn.kernels.score.reference import phase_vectors
from sglang_triattn.rounds.scoring import counted_from, score_tables


def test_positions_that_count_from_one():
    """Prevents scores for another distance than the one to the next token, where SGLang adds 1 to all positions; and
    turning the mean queries of layers without RoPE."""
    saved = dataclasses.replace(stats(), rotates=(True,) * (LAYERS - 1) + (False,))
    next_positions = torch.tensor([7, 4000])
    expected = phase_vectors(score_tables(saved, KV_HEADS, "cpu"), next_positions + 1)
    found = phase_vectors(score_tables(counted_from(saved, 1), KV_HEADS, "cpu"), next_positions)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    before = phase_vectors(score_tables(counted_from(saved, 0), KV_HEADS, "cpu"), next_positions)
    assert torch.equal(before[:, -1], expected[:, -1])
    assert (before[:, 0] - expected[:, 0]).abs().max() > 0.1
