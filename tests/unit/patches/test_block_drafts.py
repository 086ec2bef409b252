"""Positions of blocks that a model drafts at once."""

from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.patches.request import block_drafts


@pytest.fixture
def worker():
    return SimpleNamespace(_block_pos_offsets=torch.arange(4), _use_triton_prepare_block=True)


def laid_out(worker: SimpleNamespace, evicted: torch.Tensor | None, monkeypatch) -> tuple[object, list[list[int]]]:
    """Whether SGLang's kernel would lay blocks out in a step, and by which offsets its torch code would."""
    monkeypatch.setattr(block_drafts, "evicted_in", lambda batch: evicted)
    found = []

    def step(worker, batch, *, on_publish):
        assert (batch, on_publish) == ("batch", "publish")
        offsets = worker._block_pos_offsets.expand(2, -1)
        found.append((worker._use_triton_prepare_block, offsets.tolist()))
        return "result"

    assert block_drafts._draft(step, worker, "batch", on_publish="publish") == "result"
    assert worker._use_triton_prepare_block
    assert worker._block_pos_offsets.tolist() == [0, 1, 2, 3]
    return found[0]


def test_blocks_of_shortened_rows(worker, monkeypatch):
    """Prevents SGLang's kernel, which knows the rows' lengths alone, from placing blocks on a GPU, and offsets that
    stay after the step."""
    assert laid_out(worker, torch.tensor([7, 0]), monkeypatch) == (False, [[7, 8, 9, 10], [0, 1, 2, 3]])
    assert laid_out(worker, None, monkeypatch) == (True, [[0, 1, 2, 3]] * 2)


def test_kv_of_a_prefill_and_of_a_block(worker, monkeypatch):
    """Prevents keys of a resumed turn from being rotated by places in the row, and those of blocks from being moved
    twice."""
    places, lengths, stored = torch.arange(5), torch.tensor([2, 3], dtype=torch.int32), []

    def store(worker, *, positions, extend_lens, cache_loc):
        stored.append((positions.tolist(), cache_loc))

    for evicted, extend_lens in ((torch.tensor([7, 0]), lengths), (torch.tensor([7, 0]), None), (None, lengths)):
        laid_out(worker, evicted, monkeypatch)
        block_drafts._store(store, worker, positions=places, extend_lens=extend_lens, cache_loc="slots")
    assert stored == [([7, 8, 2, 3, 4], "slots"), ([0, 1, 2, 3, 4], "slots"), ([0, 1, 2, 3, 4], "slots")]
