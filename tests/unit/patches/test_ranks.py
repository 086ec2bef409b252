"""Heads and importance of tensor-parallel ranks."""

from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.patches.ranks.tensor_parallel import merge_over_ranks, own_heads


def scheduler(rank: int, others: torch.Tensor | None = None, ranks: int = 2) -> SimpleNamespace:
    """The parts of a scheduler that are read; its group gathers what this rank gives, followed by `others`."""

    def all_gather(own: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([own, others], dim)

    return SimpleNamespace(dp_tp_group=SimpleNamespace(rank_in_group=rank, world_size=ranks, all_gather=all_gather))


def test_ranks_share_the_heads_out():
    """Prevents a rank from scoring its keys with another rank's queries."""
    heads = [list(range(6))[own_heads(scheduler(rank), 6)] for rank in range(2)]
    assert heads == [[0, 1, 2], [3, 4, 5]]
    assert list(range(6))[own_heads(scheduler(0, ranks=1), 6)] == list(range(6))


@pytest.mark.parametrize(("selection", "expected"), [("union", [4.0, 2.0]), ("shared-mean", [2.5, 1.5])])
def test_importance_of_all_heads(selection, expected):
    """Prevents a kept set that only one rank's heads chose."""
    own, others = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[[4.0, 1.0]]]])
    merged = merge_over_ranks(scheduler(0, others), selection)(own)
    assert merged.tolist() == [[expected]]


def test_one_rank_gathers_nothing():
    """Prevents a collective, or a copy, when there is no other rank."""
    assert merge_over_ranks(scheduler(0, ranks=1), "union") is None


def test_heads_with_their_own_sets_gather_nothing():
    """Prevents warming up a gather that no round makes."""
    assert merge_over_ranks(scheduler(0), "per-head") is None


def test_gathers_can_be_suspended():
    """Prevents ranks from waiting for one that failed."""
    merge = merge_over_ranks(scheduler(0, torch.tensor([[[[4.0]]]])), "union")
    own = torch.tensor([[[1.0]]])
    with merge.suspended():
        assert torch.equal(merge(own), own)
    assert merge(own).tolist() == [[[4.0]]]
