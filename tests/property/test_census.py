"""The census finds each kind of fault in SGLang's real tree, allocator and row table, and says what it is."""

from __future__ import annotations

import pytest
import torch

from scene import Scene
from sglang_triattn.census import IntegrityError
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.launch import census_switch
from whole_server import fault_of, server_of, take_census


def freed(scene):
    slot = scene.row[20]
    scene.free(slot)
    return f"{scene.place(slot)} belongs to request r2 and is free"


def freed_of_the_tree(scene):
    scene.free(scene.row[0])
    return f"{scene.place(scene.row[0])} belongs to the tree and is free"


def freed_of_a_conversation(scene):
    slot = scene.talk_row[scene.chat.kv.kv_allocated_len - 1]
    scene.free(slot)
    return f"{scene.place(slot)} belongs to conversation 'chat' and is free"


def freed_twice(scene):
    page = scene.sim.allocator.free_pages[0]
    scene.free(page * scene.page)
    return f"{scene.place(page * scene.page)} is free twice"


def lost(scene):
    page, scene.sim.allocator.free_pages = scene.sim.allocator.free_pages[0], scene.sim.allocator.free_pages[1:]
    return f"{scene.place(page * scene.page)} has no owner and is not free"


def shared(scene):
    scene.other[20 : 20 + scene.page] = scene.row[20 : 20 + scene.page]
    return f"{scene.place(scene.row[20])} belongs to request r2 and to request r3"


def private_and_the_trees(scene):
    scene.row[20 : 20 + scene.page] = scene.row[: scene.page]
    return f"{scene.place(scene.row[0])} belongs to request r2 and to the tree"


def held_twice(scene):
    scene.row[20 + scene.page : 20 + 2 * scene.page] = scene.row[20 : 20 + scene.page]
    return f"{scene.place(scene.row[20])} belongs to request r2 twice"


def outside(scene):
    scene.row[20 : 20 + scene.page] = torch.arange(7 * 64, 7 * 64 + scene.page)
    return f"{scene.place(7 * 64)} does not exist, but belongs to request r2"


def padding(scene):
    scene.row[20 : 20 + scene.page] = torch.arange(scene.page)
    return f"{scene.place(0)} does not exist, but belongs to request r2"


def frozen_elsewhere(scene):
    scene.row[:4], scene.row[4:8] = scene.row[4:8].clone(), scene.row[:4].clone()
    slots = scene.row[:8].tolist()
    return f"slot {slots[0]} is entry 0 of request r2, which is frozen, but the tree holds it in slot {slots[4]}"


def unlocked(scene):
    scene.sim.tree.unlock(scene.first.req.lock)
    scene.first.req.lock = None
    return f"request r2 has 20 frozen entries in row {scene.kv.req_pool_idx}, but its lock on the tree covers 0 of them"


def row_free(scene):
    scene.sim.rows.free_slots.append(scene.kv.req_pool_idx)
    return f"row {scene.kv.req_pool_idx} belongs to request r2 and is free"


def row_shared(scene):
    scene.second.req.kv.req_pool_idx = scene.kv.req_pool_idx
    return f"row {scene.kv.req_pool_idx} belongs to request r2 and to request r3"


def row_lost(scene):
    return f"row {scene.sim.rows.free_slots.pop()} has no owner and is not free"


def length_too_great(scene):
    held, evicted = scene.kv.kv_allocated_len, scene.first.evicted
    scene.kv.kv_allocated_len = scene.kv.kv_committed_len = held + 1
    return (
        f"request r2 has {held + 1} entries in row {scene.kv.req_pool_idx} and {evicted} evicted ones, "
        f"but computed {held + evicted} tokens"
    )


def committed_too_little(scene):
    held = scene.kv.kv_allocated_len
    scene.kv.kv_committed_len -= 1
    return f"request r2 has {held} entries in row {scene.kv.req_pool_idx}, {held - 1} of them computed and 20 frozen"


def evictions_forgotten(scene):
    scene.first.req.triattention.record.evicted_tokens -= 1
    held, evicted = scene.kv.kv_allocated_len, scene.first.evicted
    return (
        f"request r2 has {held} entries in row {scene.kv.req_pool_idx} and {evicted} evicted ones, "
        f"but computed {held + evicted + 1} tokens"
    )


def conversation_of_other_tokens(scene):
    held, evicted = scene.chat.kv.kv_allocated_len, scene.chat.record.evicted_tokens
    scene.chat.ids = scene.chat.ids[:-1]
    return (
        f"conversation 'chat' has {held} entries in row {scene.chat.kv.req_pool_idx} and {evicted} evicted ones, "
        f"but computed {held + evicted - 1} tokens"
    )


PLANTED = [
    freed, freed_of_the_tree, freed_of_a_conversation, freed_twice, lost, shared, private_and_the_trees, held_twice,
    outside, padding, frozen_elsewhere, unlocked, row_free, row_shared, row_lost, length_too_great,
    committed_too_little, evictions_forgotten, conversation_of_other_tokens,
]  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_faults(page_size, plant):
    """Prevents a fault from passing silently, or being blamed on something else."""
    scene = Scene(page_size)
    sentence = plant(scene)
    with pytest.raises(IntegrityError) as caught:
        take_census(scene.sim)
    assert str(caught.value) == f"Integrity: idle after step 412, {sentence}."


@pytest.mark.parametrize("field", ["req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens"])
def test_batch_of_other_lengths(field):
    """Prevents a batch from attending, writing or rotating at other places than its requests expect."""
    scene = Scene(1)
    scheduler = server_of(scene.sim)
    right = getattr(scheduler.running_batch, field)[1].item()
    getattr(scheduler.running_batch, field)[1] += 1
    row = scene.second.req.kv.req_pool_idx
    assert fault_of(scheduler, scene.sim) == (
        f"{field} of the batch is {right + 1} for request r3 in row {row}, but by its own books {right}"
    )


def test_pages_in_disorder():
    """Prevents a page whose tokens the attention kernels would read in the wrong order."""
    scene = Scene(4)
    slots = scene.row[21:23].tolist()
    scene.row[21:23] = scene.row[21:23].flip(0)
    with pytest.raises(IntegrityError, match=f"slot {slots[1]} is entry 21 of request r2, but another place of its"):
        take_census(scene.sim)


def test_a_tree_that_miscounts(monkeypatch):
    """Prevents slots that the tree holds but will never give up, or counts but does not hold."""
    scene = Scene(1)
    held, locked = len(scene.sim.tree.all_values_flatten()), scene.sim.tree.protected_size()
    monkeypatch.setattr(scene.sim.tree, "evictable_size", lambda: held - locked + 1)
    with pytest.raises(IntegrityError, match=f"the tree counts {held + 1} slots, but holds {held}"):
        take_census(scene.sim)


def test_the_variable(monkeypatch):
    """Prevents a check from staying off although it was requested with another spelling."""
    for value, wanted in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("SGLANG_TRIATTN_CHECK", value)
        assert census_switch.is_wanted() is wanted
    monkeypatch.delenv("SGLANG_TRIATTN_CHECK")
    assert not census_switch.is_wanted()
    monkeypatch.setenv("SGLANG_TRIATTN_CHECK", "yes")
    with pytest.raises(TriAttentionError, match="SGLANG_TRIATTN_CHECK is 'yes': set it to 1"):
        census_switch.is_wanted()
