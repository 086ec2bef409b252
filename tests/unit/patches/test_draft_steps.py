"""Positions that a draft model's attention plans with."""

from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.patches.request.draft_steps import _plan_by_rows


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_physical_while_it_plans(dtype):
    """Prevents lengths that count evicted tokens, another dtype than SGLang's kernel was compiled for, and padded rows
    that read slots."""
    logical = torch.tensor([90, 12, 40, 0], dtype=dtype)
    forward = SimpleNamespace(positions=logical, seq_lens=torch.tensor([30, 12, 31, 1]))
    seen = []
    _plan_by_rows(lambda _, batch, *rest: seen.append((batch.positions, rest)), None, forward, "buffer", "call")
    ((positions, rest),) = seen
    assert positions.tolist() == [30, 12, 31, 0]
    assert positions.dtype == dtype
    assert rest == ("buffer", "call")
    assert forward.positions is logical


def test_each_branch_of_a_draft():
    """Prevents lengths of one row for the branches of another."""
    forward = SimpleNamespace(positions=torch.tensor([90, 90, 12, 12, 0, 0]), seq_lens=torch.tensor([30, 12, 1]))
    seen = []
    _plan_by_rows(lambda _, batch: seen.append(batch.positions.tolist()), None, forward)
    assert seen == [[30, 30, 12, 12, 0, 0]]


def test_logical_after_a_plan_that_fails():
    """Prevents a batch that keeps physical positions, by which its model would rotate."""

    def fail(*_):
        raise RuntimeError

    forward = SimpleNamespace(positions=torch.tensor([9]), seq_lens=torch.tensor([5]))
    with pytest.raises(RuntimeError):
        _plan_by_rows(fail, None, forward)
    assert forward.positions.tolist() == [9]
