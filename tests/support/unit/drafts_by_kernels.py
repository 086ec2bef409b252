"""The torch functions of `patches/cpu/drafts.py` against SGLang's Triton kernels; run under Triton's interpreter.

See tests/unit/patches/test_cpu_drafts.py.
"""

from __future__ import annotations

import pytest
import torch
from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
from sglang.kernels.ops.speculative.gather_spec_extras import gather_spec_extras
from sglang.srt.mem_cache import allocation, memory_pool
from sglang.srt.speculative import eagle_utils, spec_utils

from sglang_triattn.patches.cpu import drafts
from sglang_triattn.patches.cpu.speculation import import_tree

REQUESTS, DRAFTED, STEPS, ROWS, COLUMNS = 5, 7, 3, 9, 64


@pytest.fixture(params=range(4))
def random(request):
    return torch.Generator().manual_seed(request.param)


def integers(random, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=random)


def trees(random, branching: bool) -> torch.Tensor:
    """[REQUESTS, DRAFTED, DRAFTED] bool: each token's ancestors and itself; chains unless `branching`."""
    mask = torch.zeros(REQUESTS, DRAFTED, DRAFTED, dtype=torch.bool)
    for tree in mask:
        for token in range(DRAFTED):
            if token:
                tree[token] = tree[int(integers(random, token, 1)) if branching else token - 1]
            tree[token, token] = True
    return mask


def described(describe, mask: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.full((REQUESTS, DRAFTED), -7) for _ in range(4)]
    describe(mask.flatten(), lengths, found[0].view(-1), *found[1:], REQUESTS, DRAFTED)
    return found


@pytest.mark.parametrize("branching", [False, True])
def test_trees(random, branching):
    """Prevents drafted tokens at wrong positions, and links that lead elsewhere."""
    mask, lengths = trees(random, branching), integers(random, 1000, REQUESTS)
    kernel = import_tree().reconstruct_indices_from_tree_mask_triton
    ours, theirs = (described(describe, mask, lengths) for describe in (drafts.describe_trees, kernel))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("branching", [False, True])
def test_verification(random, branching):
    """Prevents tokens that are accepted though the model says another, and the other way round."""
    _, index, following, sibling = described(drafts.describe_trees, trees(random, branching), torch.zeros(REQUESTS))
    # Two tokens, so that most drafts hold for a while.
    candidates, predicted = (integers(random, 2, REQUESTS, DRAFTED) for _ in range(2))

    def verified(verify):
        predicts = torch.zeros(REQUESTS * DRAFTED, dtype=torch.int32)
        accepted = torch.full((REQUESTS, DRAFTED), -1, dtype=torch.int32)
        number = torch.empty(REQUESTS, dtype=torch.int32)
        verify(predicts, accepted, number, candidates, index, following, sibling, predicted)
        return predicts, accepted, number

    ours, theirs = verified(drafts.verify_greedily), verified(spec_tree.verify_tree_greedy_triton)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert ours[2].max() > 1


def test_slots(random):
    """Prevents K/V of drafted tokens that is written to, or moved between, other slots than the row names."""
    rows = integers(random, 10_000, ROWS, COLUMNS).int()
    row, start = torch.randperm(ROWS, generator=random)[:REQUESTS], integers(random, 40, REQUESTS)
    slots = drafts.read_rows(
        req_pool_indices=row,
        req_to_token=rows,
        start_offset=start,
        end_offset=start + DRAFTED,
        batch_size=REQUESTS,
        draft_token_num=DRAFTED,
        device="cpu",
    )
    expected = torch.empty(REQUESTS * DRAFTED, dtype=torch.int64)
    cache_locs.assign_extend_cache_locs[(REQUESTS,)](row, rows, start, start + DRAFTED, expected, COLUMNS, 8)
    assert torch.equal(slots, expected)

    lengths = integers(random, DRAFTED, REQUESTS)
    written = integers(random, 10_000, int(lengths.sum()))
    ours, theirs = rows.clone(), rows.clone()
    drafts.write_rows(row, ours, start, start + lengths, written, REQUESTS)
    allocation.assign_req_to_token_pool[(REQUESTS,)](row, theirs, start, start + lengths, written, COLUMNS, 8)
    assert torch.equal(ours, theirs)

    number = 1 + integers(random, DRAFTED, REQUESTS).int()
    ours, theirs = (torch.zeros(REQUESTS * DRAFTED, dtype=torch.int64) for _ in range(2))
    drafts.front_slots(number, slots, ours)
    cache_locs.fill_front_out_cache_loc_func(number, slots, theirs)
    assert torch.equal(ours, theirs)

    index = torch.where(torch.arange(DRAFTED) < number[:, None], integers(random, len(slots), REQUESTS, DRAFTED), -1)
    ours, theirs = (torch.zeros(index.numel(), dtype=torch.int64) for _ in range(2))
    drafts.accepted_slots(index, slots, ours, index.numel())
    eagle.fill_accept_out_cache_loc_func(index, slots, theirs, index.numel())
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("topk", [1, 4])
def test_slots_of_a_draft(random, topk):
    """Prevents a draft model that writes K/V to other slots than those after the row."""
    rows = integers(random, 10_000, ROWS, COLUMNS).int()
    row, lengths = torch.randperm(ROWS, generator=random)[:REQUESTS], integers(random, 40, REQUESTS)
    ours, theirs = (torch.zeros(REQUESTS * topk * STEPS, dtype=torch.int64) for _ in range(2))
    drafts.slots_after(row, rows, lengths, ours, topk, STEPS)
    cache_locs.assign_draft_cache_locs_contiguous[(REQUESTS,)](row, rows, lengths, theirs, COLUMNS, topk, STEPS)
    assert torch.equal(ours, theirs)


def proposed(random, topk: int, likely: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What SGLang makes of a draft model's proposals: the parents of groups of them, and those that are chosen.

    Args:
        likely: whether some proposals are certain, so that others than their parents may be chosen.
    """
    scores, hidden, found = None, None, ([], [], [])
    for step in range(STEPS):
        shape = (REQUESTS if step == 0 else REQUESTS * topk, topk)
        p, index = torch.rand(shape, generator=random), integers(random, 999, *shape)
        if likely:
            p = (2 * p).clamp(max=1)
        # SGLang compiles a function here, which takes longer than all else in these tests.
        with torch.compiler.set_stance("force_eager"):
            _, hidden, scores, info = spec_utils.select_top_k_tokens(step, p, index, hidden, scores, topk)
        for known, new in zip(found, info, strict=True):
            known.append(new)
    # The most that a chain proposes.
    most = DRAFTED if topk > 1 else STEPS + 1
    parents, chosen, _ = eagle_utils.organize_draft_results(*found, most)
    return parents, chosen


@pytest.mark.parametrize("likely", [False, True])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_trees_of_a_draft_model(random, topk, likely):
    """Prevents drafted tokens at wrong positions, and masks that show them others than those that they follow."""
    lengths, (parents, chosen) = integers(random, 40, REQUESTS), proposed(random, topk, likely)
    n = chosen.shape[1] + 1

    def built(build):
        mask = torch.ones(n * (int(lengths.sum()) + REQUESTS * n), dtype=torch.bool)
        positions = torch.zeros(REQUESTS * n, dtype=torch.int64)
        links = torch.full((3, REQUESTS, n), -1)
        mode = spec_tree.TreeMaskMode.FULL_MASK
        build(parents, chosen, lengths, mask, positions, *links, topk, STEPS, n, mode)
        return mask, positions, links

    ours, theirs = built(drafts.build_trees), built(spec_tree.sgl_build_tree_kernel_triton)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def test_masks_of_drafted_tokens_alone_are_refused(random):
    """Prevents a mask that the reference backend would read as one over whole rows."""
    lengths, (parents, chosen) = 1 + integers(random, 40, REQUESTS), proposed(random, 4, likely=False)
    mask, links = torch.ones(REQUESTS * DRAFTED**2, dtype=torch.bool), torch.full((3, REQUESTS, DRAFTED), -1)
    positions = torch.zeros(REQUESTS * DRAFTED, dtype=torch.int64)
    with pytest.raises(ValueError, match="a mask over whole rows"):
        drafts.build_trees(parents, chosen, lengths, mask, positions, *links, 4, STEPS, DRAFTED, None)


def test_last_accepted_token(random):
    """Prevents an answer that goes on from another token than the last one that holds."""
    tokens, number = integers(random, 1000, REQUESTS * DRAFTED), 1 + integers(random, DRAFTED, REQUESTS).int()
    ours, theirs = (torch.zeros(REQUESTS, dtype=torch.int32) for _ in range(2))
    drafts.last_accepted(tokens.int(), number, ours, DRAFTED, REQUESTS)
    eagle.fill_bonus_tokens[(REQUESTS,)](tokens.int(), number, theirs, DRAFTED)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("hidden", [True, False])
def test_what_a_step_leaves_to_the_next(random, hidden):
    """Prevents a step with overlap that drafts from another request's tokens."""
    buffers = [torch.rand(ROWS, 1, generator=random), integers(random, 99, ROWS, 1), integers(random, 99, ROWS)]
    states = torch.rand(ROWS, 11, generator=random) if hidden else None
    rows = integers(random, ROWS, REQUESTS)
    ours, theirs = (gather(rows, *buffers, states) for gather in (drafts.relayed, gather_spec_extras))
    assert (ours[3] is None) == (theirs[3] is None) == (not hidden)
    for mine, other in zip(ours[: 3 + hidden], theirs[: 3 + hidden], strict=True):
        assert torch.equal(mine, other)


def test_kv_of_accepted_tokens(random):
    """Prevents K/V of tokens that did not hold from being stored, and those of one request in slots of another."""
    shape = REQUESTS * DRAFTED, 2, 8
    key, value = (torch.rand(shape, generator=random) for _ in range(2))
    slots = torch.randperm(REQUESTS * DRAFTED + 5, generator=random)[: REQUESTS * DRAFTED].view(REQUESTS, DRAFTED)
    accepted = integers(random, DRAFTED + 1, REQUESTS).int()

    def stored(store):
        caches = [torch.full((REQUESTS * DRAFTED + 5, 2, 8), -7.0) for _ in range(2)]
        store(key, value, *caches, slots, accepted, 16, torch.float32)
        return caches

    for ours, theirs in zip(
        *map(stored, (drafts.store_front, memory_pool._set_kv_buffer_prefix_valid_impl)), strict=True
    ):
        assert torch.equal(ours, theirs)
