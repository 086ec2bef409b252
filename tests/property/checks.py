"""What must hold after every step of the simulation."""

from __future__ import annotations

import torch
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens

from simulation import POOL, Running, Simulation, contents


def check_books(sim: Simulation) -> None:
    """Every slot is owned once: free, in the tree, or private to one request."""
    page = sim.page_size
    private = sum(kv_private_tokens(running.req.kv, page) for running in sim.running)
    tree = sim.tree.evictable_size() + sim.tree.protected_size()
    assert sim.allocator.available_size() + tree + private == POOL
    free = sim.allocator.get_all_free_pages().tolist()
    owned = dict.fromkeys(free, "free")
    assert len(owned) == len(free), "a page is free twice"
    if sim.radix:
        claim(owned, pages(sim.tree.all_values_flatten(), page), "the tree")
    for running in sim.running:
        protected = running.req.kv.cache_protected_len
        claim(owned, pages(sim.row(running)[protected:], page), running.req.rid)
    assert len(owned) == POOL // page, "a page is owned by nobody"


def pages(slots: torch.Tensor, page_size: int) -> set[int]:
    return {slot // page_size for slot in slots.tolist()}


def claim(owned: dict[int, str], claimed: set[int], owner: str) -> None:
    for page in claimed:
        assert page not in owned, f"page {page} belongs to {owned[page]} and to {owner}"
        owned[page] = owner


def check_row(sim: Simulation, running: Running) -> None:
    """The row reads back exactly the positions that the account says, with the right tokens, exact where exact."""
    held = sim.content(sim.row(running))
    tokens, positions = running.tokens, running.positions
    assert len(held) == positions.shape[-1]
    tainted = positions >= (running.first_tainted if running.first_tainted is not None else len(tokens))
    expected = contents(tokens, positions, torch.where(tainted, running.req.serial, 0))
    wrong = (held != expected).flatten(1).any(1).nonzero().flatten().tolist()
    assert not wrong, f"{running.req.rid}: entries {wrong} hold other content"
    kv = running.req.kv
    assert kv.kv_committed_len == kv.kv_allocated_len == positions.shape[-1]
    assert kv.kv_allocated_len + running.evicted == len(tokens) - 1


def check_rounds(sim: Simulation) -> None:
    """Runs the due rounds and holds each against the plan: who was due, what stayed, what came back."""
    before = {running: running.positions for running in sim.running}
    frozen = {r: max(r.req.kv.cache_protected_len, prompt_pages(sim, r)) for r in sim.running}
    tree_slots = sim.tree.all_values_flatten() if sim.radix else torch.empty(0, dtype=torch.int64)
    tree_bytes = sim.content(tree_slots)
    free = sim.allocator.available_size()
    batch = sim.compress()
    assert torch.equal(sim.content(tree_slots), tree_bytes), "a round wrote to a slot of the tree"
    freed = 0
    for index, running in enumerate(sim.running):
        old, first = before[running], frozen[running]
        keep, length = kept_private(sim, first), old.shape[-1]
        if length - first >= keep + sim.config.interval:
            running.positions = sim.content(sim.row(running))[:, :, 0, :, 1].permute(1, 2, 0).long()
            if running.first_tainted is None:
                running.first_tainted = length
            check_kept(sim, running, old, first, keep)
            freed += (-(-length // sim.page_size) - -(-(first + keep) // sim.page_size)) * sim.page_size
        assert batch.seq_lens_cpu[index] == batch.seq_lens[index] == running.req.kv.kv_allocated_len
        assert batch.orig_seq_lens[index] - batch.seq_lens[index] == running.evicted
    assert sim.allocator.available_size() - free == freed


def check_kept(sim: Simulation, running: Running, old: torch.Tensor, first: int, keep: int) -> None:
    """What a round left of each head's entries: the frozen ones, the newest, and others that were there."""
    config, new = sim.config, running.positions
    assert new.shape[-1] == first + keep
    assert torch.equal(new[..., :first], old[..., :first]), "a frozen token was evicted"
    for layer in range(len(new)):
        for head in range(new.shape[1]):
            kept, was = new[layer, head, first:].tolist(), old[layer, head, first:].tolist()
            assert len(set(kept)) == keep, "a token is held twice"
            assert set(kept) <= set(was), "a token came from elsewhere"
            assert set(sorted(was)[-config.recent :]) <= set(kept), "a recent token was evicted"
            if config.recent > config.interval:
                assert kept == sorted(kept), "the kept tokens are not in order"
    if config.selection in ("union", "shared-mean"):
        assert (new == new[:1, :1]).all(), "heads hold different tokens"


def kept_private(sim: Simulation, frozen: int) -> int:
    """Private tokens that the settings promise to a request with `frozen` frozen ones."""
    budget, recent = sim.config.budget, sim.config.recent
    return budget if sim.config.budget_scope == "private" else max(budget - frozen, recent)


def prompt_pages(sim: Simulation, running: Running) -> int:
    length = len(running.req.origin_input_ids)
    return length - length % sim.page_size


def decode_together(sim: Simulation, running: list[Running], steps: int) -> None:
    """So many tokens of each request, with every due round held against its plan."""
    for _ in range(steps):
        check_rounds(sim)
        for request in running:
            assert sim.decode(request)
