"""What SGLang's kernels compute around drafted tokens, in torch: their slots, their tree, and which of them hold.

Nothing here knows SGLang. Each function has the parameters of the one in whose place it stands, and writes to the
tensors that are marked as outputs there. R is the number of requests, n the drafted tokens of each.
"""

from __future__ import annotations

import torch


def write_rows(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Writes the slots `out_cache_loc`, concatenated over requests, to columns [start, end) of the requests' rows.

    Stands for `assign_req_to_token_pool_func` (sglang/srt/mem_cache/allocation.py).
    """
    request, column = _columns(start_offset, end_offset)
    req_to_token[req_pool_indices[request].long(), column] = out_cache_loc.to(req_to_token.dtype)


def read_rows(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> torch.Tensor:
    """[R * n] int64: the slots in columns [start, end) of the requests' rows.

    Stands for `assign_extend_cache_locs_func` (sglang/kernels/ops/speculative/cache_locs.py).
    """
    request, column = _columns(start_offset, end_offset)
    return req_to_token[req_pool_indices[request].long(), column].long()


def front_slots(num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor) -> None:
    """Packs the first `num_front[i]`, [R], of each request's slots `out_cache_loc`, [R * n], into the last argument.

    Stands for `fill_front_out_cache_loc_func` (sglang/kernels/ops/speculative/cache_locs.py).
    """
    window = out_cache_loc.view(len(num_front), -1)
    found = window[torch.arange(window.shape[1]) < num_front[:, None]]
    front_out_cache_loc[: len(found)] = found


def accepted_slots(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor, size: int
) -> None:
    """Packs the slots that `accept_index` names, [R, depth] with -1 for none, into `accept_out_cache_loc`.

    Stands for `fill_accept_out_cache_loc_func` (sglang/kernels/ops/speculative/eagle.py).
    """
    named = accept_index.flatten()
    found = out_cache_loc[named[named >= 0].long()]
    accept_out_cache_loc[: len(found)] = found


def describe_trees(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Writes where each drafted token stands, and its first child and next sibling, -1 for none.

    Stands for `reconstruct_indices_from_tree_mask_func` (sglang/kernels/ops/speculative/reconstruct_tree.py), whose
    docstring is the definition.

    Args:
        tree_mask: R * n * n bool, which tokens are a token's ancestors or itself.
        verified_seq_len: [R], tokens before the drafted ones.
        positions: R * n int64, out; so are the last three.
    """
    n = draft_token_num
    number = torch.arange(n)
    ancestor = tree_mask.view(-1, n, n).bool() & (number < number[:, None])
    following, sibling = _links(torch.where(ancestor, number, -1).amax(-1))
    shape = retrieve_index.shape
    positions.view(-1, n).copy_(ancestor.sum(-1) + verified_seq_len[:, None])
    retrieve_index.copy_(torch.arange(batch_size * n).view(shape))
    retrieve_next_token.copy_(following.view(shape))
    retrieve_next_sibling.copy_(sibling.view(shape))


def verify_greedily(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follows each tree from its root for as long as one of the drafted tokens is what the target predicts.

    Stands for `verify_tree_greedy_func` (sglang/kernels/ops/speculative/spec_tree.py).

    Args:
        predicts: [R * n] int32, out: what the target predicts after each accepted token.
        accept_index: [R, depth] int32, out: numbers of the accepted tokens within the batch, the root first; later
            entries stay.
        accept_token_num: [R] int32, out: accepted tokens, the root not counted.
        candidates: [R, n], the drafted tokens; the first of each request is its root, which holds already.
        retrieve_index: [R, n], a token's number within the batch.
        retrieve_next_token, retrieve_next_sibling: [R, n], see `describe_trees`.
        target_predict: [R, n], the target's prediction after each token.

    Returns:
        The three outputs.
    """
    for request, accepted in enumerate(accept_index):
        place, found = 0, [0]
        while len(found) < len(accepted):
            token = target_predict[request, place]
            following = int(retrieve_next_token[request, place])
            while following >= 0 and candidates[request, following] != token:
                following = int(retrieve_next_sibling[request, following])
            if following < 0:
                break
            place = following
            found.append(place)
        numbers = retrieve_index[request, found]
        accepted[: len(found)] = numbers.to(accepted.dtype)
        predicts[numbers.long()] = target_predict[request, found].to(predicts.dtype)
        accept_token_num[request] = len(found) - 1
    return predicts, accept_index, accept_token_num


def _columns(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Request and column of each place in the ranges [start, end), both [total] int64."""
    lengths = (end - start).long()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    before = lengths.cumsum(0) - lengths
    return request, torch.arange(len(request)) + (start - before)[request]


def slots_after(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Writes the slots in the `topk * num_cols` columns from `seq_lens`, [R], of the rows to `out_cache_loc`.

    Stands for `assign_draft_cache_locs_contiguous_func` (sglang/kernels/ops/speculative/cache_locs.py).
    """
    # Only a GPU asks for these.
    assert positions is None
    assert mrope is None
    columns = seq_lens[:, None] + torch.arange(topk * num_cols)
    found = req_to_token[req_pool_indices.long()[:, None], columns.long()]
    out_cache_loc.copy_(found.flatten())


def build_trees(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: object,
) -> None:
    """Describes the drafted tokens that were chosen of all that a draft model proposed, after a root that holds.

    Stands for `build_tree_kernel_efficient_func` (sglang/kernels/ops/speculative/spec_tree.py). In each step a draft
    model proposes `topk` successors of each of `topk` tokens, in the first those of the root alone. Proposals are
    numbered in this order, so those with the same number / topk have one parent.

    Args:
        parent_list: [R, groups], the parent of each such group, as a proposal; the first is of the root.
        top_scores_index: [R, n - 1] in ascending order, the proposals that were chosen. One whose parent is not among
            them follows nothing.
        seq_lens: [R], tokens before the drafted ones.
        tree_mask: out, of each request [n, length + n] bool, flattened and concatenated; true on arrival.
        positions: [R * n] int64, out.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [R, n] int64, out, see `describe_trees`.
        spec_steps: steps of the draft, by which a token may be deeper than the root.

    Raises:
        ValueError: the mask is laid out otherwise.
    """
    requests, n = len(seq_lens), num_verify_tokens
    lengths = seq_lens.tolist()
    if tree_mask.numel() < n * (sum(lengths) + requests * n):
        raise ValueError("On a CPU, drafted tokens are verified with a mask over whole rows: use torch_reference.")
    group = top_scores_index // topk
    wanted = parent_list.gather(1, group) if parent_list.shape[1] else group
    is_parent = top_scores_index[:, None, :] == wanted[:, :, None]
    found = torch.where(is_parent.any(-1), is_parent.int().argmax(-1) + 1, -1)
    parent = torch.nn.functional.pad(torch.where(group == 0, 0, found), (1, 0), value=-1)
    number = torch.arange(n)
    above = (parent[:, :, None] == number).float()
    seen = torch.eye(n).repeat(requests, 1, 1)
    for _ in range(spec_steps):
        seen = torch.eye(n) + above @ seen
    seen[:, :, 0] = 1
    positions.view(-1, n).copy_(seq_lens[:, None] + seen.sum(-1).long() - 1)
    retrieve_index.copy_(torch.arange(requests * n).view(requests, n))
    following, sibling = _links(parent)
    retrieve_next_token.copy_(following)
    retrieve_next_sibling.copy_(sibling)
    done = 0
    for length, visible in zip(lengths, seen, strict=True):
        mask = tree_mask[done : done + n * (length + n)].view(n, length + n)
        mask[:, length:] = visible > 0
        done += mask.numel()


def store_front(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    loc_2d: torch.Tensor,
    commit_lens: torch.Tensor,
    row_dim: int,
    store_dtype: torch.dtype,
) -> None:
    """Writes K/V of the first `commit_lens[i]`, [R], of each request's n tokens to their slots `loc_2d`, [R, n].

    Stands for `_set_kv_buffer_prefix_valid_impl` (sglang/srt/mem_cache/memory_pool.py).

    Args:
        k, v: [R * n, H_kv, D], in the dtype of the caches.
        k_cache, v_cache: [slots, H_kv, D], out.
    """
    holds = torch.arange(loc_2d.shape[1]) < commit_lens[:, None]
    for own, cache in ((k, k_cache), (v, v_cache)):
        cache[loc_2d[holds]] = own[holds.flatten()]


def _links(parent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First child and next sibling of each token, [R, n] int64, -1 for none, from `parent` of the same kind.

    A token comes after its parent.
    """
    n = parent.shape[1]
    number = torch.arange(n)
    child = torch.where(parent[:, :, None] == number, number[:, None], n).amin(1)
    is_later = (parent[:, :, None] == parent[:, None, :]) & (number[:, None] > number) & (parent >= 0)[:, None, :]
    sibling = torch.where(is_later, number[:, None], n).amin(1)
    return child.where(child < n, -1), sibling.where(sibling < n, -1)


def last_accepted(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Writes to `bonus_tokens`, [R], the last of the `accept_lens`, [R], tokens of each request in `accept_tokens`,
    [R, accept_stride].

    Stands for `fill_bonus_tokens_func` (sglang/kernels/ops/speculative/eagle.py).
    """
    tokens = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(tokens.gather(1, accept_lens.long()[:, None] - 1)[:, 0])


def relayed(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The rows `indices`, [R], of the buffers in which a step leaves what the next one drafts from.

    Stands for `gather_spec_extras` (sglang/kernels/ops/speculative/gather_spec_extras.py).
    """
    hidden = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden


def shift_inputs(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shifts each request's tokens in `input_ids`, out, by one place to the front, and writes what follows them.

    Args:
        input_ids: [tokens], those of all requests, one after the other.
        extend_start_loc, extend_seq_lens: [R], where each request's begin, and how many it has.
        topk_index: [R] or [R, 1], the token that follows.
        select_index: [R], the place in `input_ids` where it stands; None for the request's last.

    Stands for `rotate_input_ids` (sglang/kernels/ops/speculative/multi_layer_eagle.py).
    """
    follows = topk_index.flatten().to(input_ids.dtype)
    # Requests that fill a batch up, which groups of ranks do, have lengths alone.
    for number, (start, length) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=False)):
        if length:
            own = input_ids[start : start + length]
            own[:-1] = own[1:].clone()
            input_ids[start + length - 1 if select_index is None else select_index[number]] = follows[number]
    return input_ids
