"""Lengths that a queued step published before a round."""

from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

from sglang_triattn.patches.rounds import queued_drafts
from sglang_triattn.patches.rounds.queued_drafts import _take_off, unread_of, write_unread


class Request(SimpleNamespace):
    """What is read of SGLang's Req, which compares by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def requests(*evicted: int) -> list[Request]:
    found = [Request(retraction_count=0) for _ in evicted]
    for request, tokens in zip(found, evicted, strict=True):
        write_unread(request, tokens)
    return found


def batch_of(reqs, *lengths: int, on_host: bool = True, drafts: bool = True) -> SimpleNamespace:
    """A batch as `FutureMap.resolve_seq_lens_cpu` leaves it."""
    return SimpleNamespace(
        reqs=reqs,
        spec_info=SimpleNamespace(future_indices=torch.arange(len(reqs)) if drafts else None),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int32) if on_host else None,
        seq_lens_sum=sum(lengths) if on_host else None,
    )


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device alone"])
def test_evicted_tokens_are_taken_off_once(on_host):
    """Prevents a step that reads its row past the end, and one that forgets tokens because a round counted twice."""
    reqs = requests(32, 0, 16)
    for expected in ([68, 50, 44], [100, 50, 60]):
        batch = batch_of(reqs, 100, 50, 60, on_host=on_host)
        _take_off(None, None, batch, False)
        assert batch.seq_lens.tolist() == expected
        if on_host:
            assert batch.seq_lens_cpu.tolist() == expected
            assert batch.seq_lens_cpu.dtype == torch.int32
            assert batch.seq_lens_sum == sum(expected)
        else:
            assert batch.seq_lens_cpu is batch.seq_lens_sum is None


def test_rounds_add_up_until_a_step_reads():
    """Prevents a second round before the next step, after prefills, from replacing the first."""
    (request,) = requests(32)
    write_unread(request, unread_of(request) + 16)
    batch = batch_of([request], 100)
    _take_off(None, None, batch, False)
    assert batch.seq_lens.tolist() == [52]


def test_a_retracted_request_starts_over():
    """Prevents tokens that were evicted from a row that is gone from being taken off its new one."""
    (request,) = requests(32)
    request.retraction_count += 1
    batch = batch_of([request], 100)
    _take_off(None, None, batch, False)
    assert batch.seq_lens.tolist() == [100]


def test_a_step_that_reads_no_lengths_leaves_them():
    """Prevents a prefill between two steps from taking off what the next step must."""
    reqs = requests(32)
    for batch in (batch_of(reqs, 100, drafts=False), SimpleNamespace(reqs=reqs, spec_info=None)):
        _take_off(None, None, batch, False)
    assert unread_of(reqs[0]) == 32


def test_rows_that_are_gone_are_forgotten(monkeypatch):
    """Prevents every later step from a look at all requests, because of one that was retracted before it was read."""
    monkeypatch.setattr(queued_drafts, "_unread", WeakSet())
    gone, other = requests(32, 16)
    gone.retraction_count += 1
    _take_off(None, None, batch_of([other], 100), False)
    assert set(queued_drafts._unread) == {gone}
    _take_off(None, None, batch_of([other], 84), False)
    assert not queued_drafts._unread
    # Of another batch, a request stays until that is read.
    write_unread(gone, 8)
    batch = batch_of([other], 84)
    _take_off(None, None, batch, False)
    assert batch.seq_lens.tolist() == [84]
    assert set(queued_drafts._unread) == {gone}
