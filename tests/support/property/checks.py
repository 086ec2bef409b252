"""What must hold after every step of the simulation."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_swa_tokens, kv_private_tokens

from content import contents
from memory import ROWS
from running import Running
from sglang_triattn.patches.request.bounds import growth_in
from sglang_triattn.patches.request.compressed import compression_of, inputs_of
from sglang_triattn.rounds.inputs import TurnInputs
from sglang_triattn.rounds.level import LOT
from simulation import Simulation
from whole_server import take_census


def check_books(sim: Simulation) -> None:
    """Every slot is owned once: free, in the tree, or private to one request."""
    page = sim.page_size
    idle = sim.conversations.records()
    private = sum(kv_private_tokens(kv, page) for kv in (*(running.req.kv for running in sim.running), *idle.values()))
    tree = sim.tree.evictable_size() + sim.tree.protected_size()
    counted = sim.slots.available_size() + tree + private
    assert counted == sim.pool_size, f"free, tree and private slots are {counted} of {sim.pool_size}"
    free = sim.slots.get_all_free_pages().tolist()
    owned = dict.fromkeys(free, "free")
    assert len(owned) == len(free), "a page is free twice"
    if sim.radix:
        claim(owned, pages(sim.tree.all_values_flatten(), page), "the tree")
        check_locks(sim)
    for running in sim.running:
        claim(owned, pages(private_slots(sim, running), page), running.req.rid)
        check_pages(sim, running)
    for name, kv in idle.items():
        slots = sim.rows.req_to_token[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len]
        claim(owned, pages(slots, page), name)
    assert sim.rows.available_size() + len(sim.running) + len(idle) == ROWS, "a row has no owner"
    assert len(owned) == sim.pool_size // page, "a page has no owner"
    check_reserved(sim)
    if sim.window:
        check_windows(sim)
    # Last, so that these checks, not the census, notice a planted fault.
    take_census(sim)


def private_slots(sim: Simulation, running: Running) -> torch.Tensor:
    """The slots that a request owns, its reserve's included."""
    kv = running.req.kv
    return sim.rows.req_to_token[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len]


def check_pages(sim: Simulation, running: Running) -> None:
    """After its frozen part, whole pages follow one another in a row, up to the end of its reserve."""
    kv, slots = running.req.kv, private_slots(sim, running)
    place = torch.arange(kv.cache_protected_len, kv.kv_allocated_len)
    assert (slots % sim.page_size == place % sim.page_size).all(), f"{running.req.rid} has a torn page"
    spare = len(pages(slots, sim.page_size)) * sim.page_size - len(slots)
    assert 0 <= spare < sim.page_size, f"{running.req.rid} holds a page twice, or in parts"


def check_windows(sim: Simulation) -> None:
    """Every slot of the window layers' pool is owned once, and the next query finds its window there."""
    own, page = sim.allocator.swa_attn_allocator, sim.page_size
    holders = [*(running.req.kv for running in sim.running), *sim.conversations.records().values()]
    private = sum(kv_private_swa_tokens(kv, page) for kv in holders)
    counted = own.available_size() + sim.tree.swa_evictable_size() + sim.tree.swa_protected_size() + private
    assert counted == own.size, f"free, tree and private slots of the windows are {counted} of {own.size}"
    for running in sim.running:
        length = running.positions.shape[-1]
        newest = sim.row(running)[max(length - sim.window + 1, 0) :].long()
        peers = sim.allocator.full_to_swa_index_mapping[newest]
        positions = running.positions[..., max(length - sim.window + 1, 0) :]
        tainted = positions >= (running.first_tainted if running.first_tainted is not None else len(running.tokens))
        expected = contents(running.tokens, positions, torch.where(tainted, running.req.serial, 0))[:, 0, 0]
        assert (peers > 0).all(), f"{running.req.rid} has lost K/V that its window layers read"
        assert torch.equal(sim.window_keys[peers], expected), f"the windows of {running.req.rid} hold other content"


def check_locks(sim: Simulation) -> None:
    """The tree can evict everything except the prefixes of rows that somebody holds."""
    holders = [*(running.req.kv for running in sim.running), *sim.conversations.records().values()]
    held = [sim.rows.req_to_token[kv.req_pool_idx, : kv.cache_protected_len].tolist() for kv in holders]
    locked = sim.tree.protected_size()
    assert locked == len(set().union(*held)), f"{locked} slots of the tree are locked, but rows hold another number"


def pages(slots: torch.Tensor, page_size: int) -> set[int]:
    return {slot // page_size for slot in slots.tolist()}


def claim(owned: dict[int, str], claimed: set[int], owner: str) -> None:
    for page in claimed:
        assert page not in owned, f"page {page} belongs to {owned[page]} and to {owner}"
        owned[page] = owner


def check_row(sim: Simulation, running: Running) -> None:
    """The row reads back exactly the positions in the account, with the right tokens, and exact where it should be."""
    held = sim.content(sim.row(running))
    tokens, positions = running.tokens, running.positions
    assert len(held) == positions.shape[-1], f"{running.req.rid} holds {len(held)} entries"
    tainted = positions >= (running.first_tainted if running.first_tainted is not None else len(tokens))
    expected = contents(tokens, positions, torch.where(tainted, running.req.serial, 0))
    wrong = (held != expected).flatten(1).any(1).nonzero().flatten().tolist()
    assert not wrong, f"{running.req.rid}: entries {wrong} hold other content"
    kv = running.req.kv
    assert kv.kv_committed_len == positions.shape[-1], "the request's lengths differ"
    assert sim.reserve or kv.kv_committed_len == kv.kv_allocated_len, "slots after the row have no owner"
    assert kv.kv_committed_len + running.evicted == len(tokens) - 1, "held and evicted tokens are not all"
    check_inputs(running)


def check_inputs(running: Running) -> None:
    """Every head of every layer holds all that resumed turns brought, as far as it has been computed."""
    computed = running.positions.shape[-1] + running.evicted
    for held in running.positions.flatten(0, 1).tolist():
        lost = [position for position in running.inputs - set(held) if position < computed]
        assert not lost, f"{running.req.rid} has lost {len(lost)} input tokens of a resumed turn"


def check_rounds(sim: Simulation, chunked: Running | None = None) -> None:
    """Runs the rounds of a step and checks each against the plan: who was due, what stayed, what came back.

    Args:
        chunked: a request between two chunks of its prefill.
    """
    requests = [*sim.running, *([] if chunked is None else [chunked])]
    before = {running: (running.positions, running.evicted, in_order(running)) for running in requests}
    inputs = {running: inputs_of(compression_of(running.req)) for running in requests}
    fresh = {running for running in requests if not compression_of(running.req).rounds}
    last_slots = {running: int(sim.row(running)[-1]) for running in requests}
    tree_slots = sim.tree.all_values_flatten() if sim.radix else torch.empty(0, dtype=torch.int64)
    tree_bytes = sim.content(tree_slots)
    free = sim.slots.available_size()
    missing = slots_of_next_step(sim) - free - sim.tree.evictable_size()
    idle, room = idle_slots(sim), room_for_others(sim)
    queued = queue_drafts(sim)
    batch = sim.compress(chunked)
    for running, content in queued.items():
        found = drafted_content(sim, slots_after(sim, running)[: len(content)])
        assert torch.equal(found, content), f"{running.req.rid} lost K/V of the queued step"
    assert torch.equal(sim.content(tree_slots), tree_bytes), "a round wrote to a slot of the tree"
    freed, early, between_chunks, rounds, overdue, unclear = {True: 0, False: 0}, 0, 0, 0, 0, 0
    for running in requests:
        old, evicted, ordered = before[running]
        if running.settings is None:
            assert not running.evicted, "a request that declined was compacted"
            continue
        settings, stay = running.settings, entries_that_stay(sim, running, old, inputs[running])
        if inputs[running]:
            settings = replace(settings, round_to=max(settings.round_to, sim.page_size))
        # Those of resumed turns count as the frozen ones do.
        first = sum(stay)
        length = old.shape[-1]
        private = length - first + evicted
        regular = kept_private(settings, first, private)
        due = length - first - regular >= max(settings.interval, settings.round_to)
        if running.evicted == evicted:
            assert not due, "a due round did not run"
            continue
        rounds, overdue = rounds + (running is not chunked), overdue + (due and running is not chunked)
        # A first round may come early, to keep rounds level; it then evicts at least a quarter of a regular one.
        level = (
            not due
            and sim.config.most_rounds != 0
            and running in fresh
            and length - first >= regular + max(settings.interval // 4, 1)
        )
        level &= running.req.kv.kv_committed_len == first + regular + (length - first - regular) % settings.round_to
        pressed = kept_private(settings.under_pressure(), first, private)
        # It may have come for want of memory, too.
        unclear += level and pressed == regular and missing > 0
        keep = regular if due or level else pressed
        keep += (length - first - keep) % settings.round_to
        running.positions = sim.content(sim.row(running))[:, :, 0, :, 1].permute(1, 2, 0).long()
        if running.first_tainted is None:
            running.first_tainted = length
        check_kept(sim, running, old, stay, keep, ordered)
        sim.input_rounds += stay[1] > 0
        slots = (-(-length // sim.page_size) - -(-(first + keep) // sim.page_size)) * sim.page_size
        freed[due or level] += slots
        between_chunks += slots * (running is chunked)
        early += not (due or level)
        sim.level_rounds += level
        sim.prefill_rounds += running is chunked
        sim.cut_rounds += sim.compressor.strategies != ("remap",) and int(sim.row(running)[-1]) == last_slots[running]
    lot = LOT if sim.config.most_rounds is None else sim.config.most_rounds
    assert rounds - early - unclear <= max(lot, overdue), "more rounds than there may be meet in a step"
    assert not early or missing > freed[True] - between_chunks, "a round ran early although memory was there"
    for index, running in enumerate(sim.running):
        lengths = batch.seq_lens_cpu[index], batch.seq_lens[index], running.req.kv.kv_committed_len
        assert len(set(map(int, lengths))) == 1, "the batch has other lengths than the rows"
        assert batch.orig_seq_lens[index] - batch.seq_lens[index] == running.evicted, "positions would be wrong"
    sim.early_rounds += early
    came_back = sim.slots.available_size() - free - (idle - idle_slots(sim))
    # When the tree is given a chunk, it frees what it already held.
    promised = sum(freed.values())
    assert came_back == promised or (chunked and came_back > promised), f"{came_back} slots came back, not {promised}"
    if chunked is None and idle == idle_slots(sim):
        more = room_for_others(sim) - room
        assert more >= 0, "a round took room"
        assert batch.batch_is_full == (more == 0), "admission must open where there is more room, and nowhere else"


def queue_drafts(sim: Simulation) -> dict[Running, torch.Tensor]:
    """A step that is queued writes K/V of its drafts after each row: returns what it writes."""
    written = {}
    for running in sim.running if sim.queued else ():
        slots = slots_after(sim, running)[: sim.queued].long()
        for buffer in (*sim.pool.k_buffer, *sim.pool.v_buffer):
            buffer[slots] = slots[:, None, None] + 0.5
        if sim.window:
            sim.window_keys[sim.allocator.full_to_swa_index_mapping[slots]] = slots[:, None, None] + 0.25
        written[running] = drafted_content(sim, slots)
    return written


def drafted_content(sim: Simulation, slots: torch.Tensor) -> torch.Tensor:
    """[n, values]: what all layers hold at `slots`, in both pools if there are two."""
    held = [sim.content(slots).flatten(1)]
    if sim.window:
        held.append(sim.window_keys[sim.allocator.full_to_swa_index_mapping[slots.long()]].flatten(1))
    return torch.cat(held, 1)


def slots_after(sim: Simulation, running: Running) -> torch.Tensor:
    """The reserve of a row."""
    kv = running.req.kv
    return sim.rows.req_to_token[kv.req_pool_idx, kv.kv_committed_len : kv.kv_allocated_len]


def room_for_others(sim: Simulation) -> int:
    """Slots that no request holds and that no compressed request may still take."""
    page = sim.page_size
    room = sim.slots.available_size() + sim.tree.evictable_size()
    for running in (running for running in sim.running if running.settings is not None):
        held = -(-running.req.kv.kv_allocated_len // page) * page
        room -= max(-(-most_entries(sim, running) // page) * page - held, 0)
    return room


def most_entries(sim: Simulation, running: Running) -> int:
    """Most entries of a row: up to its next round, or to the end of its answer, and its reserve."""
    settings, inputs = running.settings, inputs_of(compression_of(running.req))
    if inputs:
        settings = replace(settings, round_to=max(settings.round_to, sim.page_size))
    first = inputs.target(frozen_length(sim, running), sim.page_size)
    first += inputs.all_waiting_len(first)
    end = len(running.req.origin_input_ids) + running.req.sampling_params.max_new_tokens - 1 - running.evicted
    kept = kept_private(settings, first, end - first + running.evicted)
    return min(first + kept + max(settings.interval, settings.round_to), end) + sim.reserve


def check_reserved(sim: Simulation) -> None:
    """Admission reserves what running requests may still take, computed from what holds now and from nothing older."""
    page, expected, windows = sim.page_size, 0, 0
    for running in sim.running:
        kv, params = running.req.kv, running.req.sampling_params
        held = -(-kv.kv_allocated_len // page) * page
        if running.settings is not None:
            most = max(most_entries(sim, running), kv.kv_committed_len + max(sim.reserve, 1))
            expected += max(-(-most // page) * page - held, 0)
        if sim.window:
            left = max(params.max_new_tokens - len(running.req.output_ids), 0) + max(sim.reserve, 1)
            growth = sim.conversations.windows.peak - kv_private_swa_tokens(kv, page)
            windows += max(min(growth, -(-left // page) * page), 0)
    requests = [running.req for running in sim.running]
    reserved, others = growth_in(requests, page)
    assert reserved == expected, f"{reserved} slots are reserved instead of {expected}"
    assert others == [running.req for running in sim.running if running.settings is None]
    if sim.window:
        assert sim.conversations.windows.growth_in(requests) == windows, "another number is reserved for windows"


def idle_slots(sim: Simulation) -> int:
    return sum(kv_private_tokens(kv, sim.page_size) for kv in sim.conversations.records().values())


def slots_of_next_step(sim: Simulation) -> int:
    page, kvs = sim.page_size, [running.req.kv for running in sim.running]
    ends = [kv.kv_committed_len + (sim.reserve or 1) for kv in kvs]
    return sum(
        max(-(-end // page) - -(-kv.kv_allocated_len // page), 0) * page for end, kv in zip(ends, kvs, strict=True)
    )


def entries_that_stay(sim: Simulation, running: Running, old: torch.Tensor, inputs: TurnInputs) -> tuple[int, int]:
    """(entries at the front of a row that no round may touch, input tokens of resumed turns among the others).

    Args:
        old: the row's positions.
        inputs: the row's record of them.
    """
    length = old.shape[-1]
    first = inputs.target(frozen_length(sim, running), sim.page_size)
    others = inputs.waiting_len(first, length)
    found = len(running.inputs.intersection(old[0, 0, first:].tolist()))
    assert found <= others <= found + running.neighbours, f"{others} entries count as inputs, but {found} are"
    return first, others


def in_order(running: Running) -> int | None:
    """Newest entries of a row whose order is known, if a turn before may have had other settings; None for any."""
    compression = compression_of(running.req)
    if compression.start != "resumed" or running.inputs:
        return None
    return running.positions.shape[-1] - compression.held_record.unordered_len


def check_kept(
    sim: Simulation, running: Running, old: torch.Tensor, stay: tuple[int, int], keep: int, ordered: int | None
) -> None:
    """A round left, of each head's entries, the frozen ones, the newest, the inputs of resumed turns, and others that
    were there before.

    Args:
        stay: from `entries_that_stay`.
        ordered: from `in_order`; a round takes no more for the newest.
    """
    config, new, (first, others) = running.settings, running.positions, stay
    recent = config.recent if ordered is None else min(config.recent, ordered)
    assert new.shape[-1] == first + others + keep, "a round kept another number of tokens"
    assert torch.equal(new[..., :first], old[..., :first]), "a frozen token was evicted"
    check_inputs(running)
    for layer in range(len(new)):
        for head in range(new.shape[1]):
            kept, was = new[layer, head, first:].tolist(), old[layer, head, first:].tolist()
            assert len(set(kept)) == keep + others, "a token is held twice"
            assert set(kept) <= set(was), "a token came from elsewhere"
            # Window layers count along the row; so does a page that holds inputs and is not full, which stays in place.
            along_row = config.window or (others and sim.page_size > 1)
            generated = was if along_row else [place for place in was if place not in running.inputs]
            newest = sorted(generated)[len(generated) - recent :]
            assert set(newest) <= set(kept), "a recent token was evicted"
            whole = sim.page_size == 1 or not others
            if whole and (config.recent > config.interval or sim.page_size == 1):
                assert kept[len(kept) - recent :] == newest, "the newest tokens are not in order"
            if (sim.compressor.strategies == ("remap",) or config.recency) and not running.inputs:
                assert kept == sorted(kept), "a row lost its order"
    if config.selection in ("union", "shared-mean"):
        assert (new == new[:1, :1]).all(), "heads hold different tokens"


def kept_private(config, frozen: int, private: int) -> int:
    """Private tokens that the settings guarantee to a request with `frozen` frozen tokens and `private` others so far,
    evicted ones included."""
    budget = config.budget if config.budget_scope == "private" else max(config.budget - frozen, config.recent)
    return max(budget, config.recent + config.round_to - 1, math.ceil(config.keep_share * private))


def frozen_length(sim: Simulation, running: Running) -> int:
    """What rounds must leave alone: the tree's tokens, the first ones, and whole pages of a frozen prompt."""
    prompt = running.prompt_length if running.settings.prompt == "frozen" else 0
    return max(running.req.kv.cache_protected_len, running.settings.sinks, prompt - prompt % sim.page_size)


def decode_together(sim: Simulation, running: list[Running], steps: int) -> None:
    """Decodes `steps` tokens of each request and checks every due round against its plan."""
    for _ in range(steps):
        check_rounds(sim)
        for request in running:
            assert sim.decode(request)
