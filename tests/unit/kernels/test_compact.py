"""The moves of a round, compared with a plain account of which token ends up where."""

import pytest
import torch

from sglang_triattn.kernels.compact.reference import cut_column, list_moves, move_torch, needs_order, remap

LAYERS, HEADS, DIM = 2, 3, 4
SETS = {"shared": (), "per-head": (HEADS,), "per-layer-head": (LAYERS, HEADS)}


def random_case(seed: int, sets: str, keep: int = 7, lengths=(7, 12, 20, 9), recent: int = 0):
    """slots [R, N] padded with -1, kept [R, ..., keep] ascending, pools whose content names slot, layer, head, K/V.

    Every set contains the newest `recent` tokens of its request.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(lengths) + 5, generator=generator)
    slots, kept = torch.full((len(lengths), max(lengths)), -1), []
    for row, length in zip(slots, lengths, strict=True):
        row[:length], order = order[:length], order[length:]
        newest = torch.arange(length - recent, length)
        picks = [
            torch.cat([torch.randperm(length - recent, generator=generator)[: keep - recent].sort().values, newest])
            for _ in range(LAYERS * HEADS)
        ]
        kept.append(torch.stack(picks).view(LAYERS, HEADS, keep))
    kept = torch.stack(kept)
    kept = {"shared": kept[:, 0, 0], "per-head": kept[:, 0], "per-layer-head": kept}[sets]
    count = sum(lengths) + 5
    pools = [torch.arange(count * HEADS * DIM).view(count, HEADS, DIM) + 10**6 * pool for pool in range(2 * LAYERS)]
    return slots, kept, [pool.double() for pool in pools]


def moved(pools, slots, kept, strategy, **options):
    sources, targets = list_moves(slots, kept, strategy, **options)
    after = [pool.clone() for pool in pools]
    move_torch(after[:LAYERS], sources, targets)
    move_torch(after[LAYERS:], sources, targets)
    return after, sources, targets


@pytest.mark.parametrize("strategy", ["slide", "fill"])
@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("seed", range(5))
def test_the_front_holds_the_kept_tokens(seed, sets, strategy):
    """Prevents a lost, doubled or foreign row, and writes outside the slots that stay."""
    slots, kept, pools = random_case(seed, sets)
    after, _, _ = moved(pools, slots, kept, strategy)
    keep = kept.shape[-1]
    every = every_head(kept)
    untouched = torch.ones(len(pools[0]), dtype=torch.bool)
    for r in range(len(slots)):
        untouched[slots[r, :keep]] = False
        for p, pool in enumerate(pools):
            for head in range(HEADS):
                expected = pool[slots[r][every[r, p % LAYERS, head]], head]
                found = after[p][slots[r, :keep], head]
                if strategy == "fill":
                    expected, found = expected.sort(0).values, found.sort(0).values
                assert torch.equal(found, expected)
    for before, pool in zip(pools, after, strict=True):
        assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("sets", SETS)
def test_fill_moves_only_what_lies_past_the_new_length(sets):
    """Prevents copies that the strategy exists to save, and a source that another move overwrites."""
    slots, kept, pools = random_case(3, sets)
    _, sources, targets = moved(pools, slots, kept, "fill")
    assert ((sources != targets).sum(-1) == (kept >= kept.shape[-1]).sum(-1)).all()
    slide_sources, slide_targets = list_moves(slots, kept, "slide")
    assert ((sources != targets).sum(-1) <= (slide_sources != slide_targets).sum(-1)).all()
    for r in range(len(slots)):
        moving = sources[r] != targets[r]
        assert not set(sources[r][moving].tolist()) & set(slots[r, : kept.shape[-1]].tolist())
        assert set(targets[r][moving].tolist()) <= set(slots[r, : kept.shape[-1]].tolist())


def every_head(kept):
    """[R, L, H_kv, keep]: the kept set of each layer and head."""
    return kept.view(len(kept), *[1] * (4 - kept.ndim), *kept.shape[1:]).expand(-1, LAYERS, HEADS, -1)


@pytest.mark.parametrize("cut", [0, 2, 5])
@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("lengths", [(13, 12, 20, 31), (13,), (12,), (40, 13)], ids=str)
def test_a_cut_leaves_the_newest_where_they_are(lengths, sets, cut):
    """Prevents newest tokens that are copied or change order, and rows of unequal length cut as if they were equal."""
    keep, recent = 12, 7
    slots, kept, pools = random_case(sum(lengths) + cut, sets, keep, lengths, recent)
    tokens = torch.tensor(lengths)
    after, sources, targets = moved(pools, slots, kept, "fill", cut=cut, lengths=tokens)
    emptied = (kept >= cut) & (kept < cut + (tokens - keep).view(-1, *[1] * (kept.ndim - 1)))
    assert ((sources != targets).sum(-1) == emptied.sum(-1)).all(), "copies that the strategy exists to save"
    untouched = torch.ones(len(pools[0]), dtype=torch.bool)
    for r, length in enumerate(lengths):
        moving = sources[r] != targets[r]
        stays = torch.cat([slots[r, :cut], slots[r, cut + length - keep : length]])
        assert not set(sources[r][moving].tolist()) & set(stays.tolist()), "a source that another move may overwrite"
        assert set(targets[r][moving].tolist()) <= set(stays[:-recent].tolist())
        untouched[stays[:-recent]] = False
        for p, pool in enumerate(pools):
            for head in range(HEADS):
                expected = pool[slots[r][every_head(kept)[r, p % LAYERS, head]], head]
                found = after[p][stays, head]
                assert torch.equal(found.sort(0).values, expected.sort(0).values)
    for before, pool in zip(pools, after, strict=True):
        assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("cut", [0, 2, 5])
@pytest.mark.parametrize("sets", SETS)
def test_order_is_kept_on_both_sides_of_a_cut(sets, cut):
    """Prevents tokens that change places, newest tokens that are copied, and a source that an earlier move has
    overwritten."""
    lengths, keep, recent = (13, 12, 20, 40), 12, 7
    slots, kept, pools = random_case(cut, sets, keep, lengths, recent)
    after, sources, targets = moved(pools, slots, kept, "slide", cut=cut, lengths=torch.tensor(lengths))
    for row_sources, row_targets in zip(sources.flatten(0, -2), targets.flatten(0, -2), strict=True):
        assert not any(row_sources[m] in row_targets[:m] for m in range(len(row_sources)))
    for r, length in enumerate(lengths):
        moving = sources[r] != targets[r]
        stays = torch.cat([slots[r, :cut], slots[r, cut + length - keep : length]])
        assert set(targets[r][moving].tolist()) <= set(stays[:-recent].tolist())
        for p, pool in enumerate(pools):
            for head in range(HEADS):
                expected = pool[slots[r][every_head(kept)[r, p % LAYERS, head]], head]
                assert torch.equal(after[p][stays, head], expected)


@pytest.mark.parametrize("sets", SETS)
def test_a_cut_never_copies_more_than_the_end_of_the_row(sets):
    """Prevents cutting a row elsewhere when emptying its end would cost less."""
    for seed in range(20):
        slots, kept, _ = random_case(seed, sets, 12, (20, 20, 20), 5)
        least, most = (list_moves(slots, kept, "fill", cut=cut) for cut in (7, None))
        assert ((least[0] != least[1]).sum(-1) <= (most[0] != most[1]).sum(-1)).all()


def test_where_a_row_is_cut():
    """Prevents cutting out half a page, or newest tokens with it."""
    assert cut_column(num_kept=2048, recent=512, frozen=77, evicted=128, page_size=1) == 1536
    assert cut_column(num_kept=2048, recent=512, frozen=64, evicted=128, page_size=16) == 1536
    # After an odd number of frozen tokens the page begins earlier.
    assert cut_column(num_kept=2048, recent=512, frozen=4, evicted=128, page_size=16) == 1532
    assert cut_column(num_kept=2048, recent=500, frozen=64, evicted=128, page_size=16) == 1536
    assert cut_column(num_kept=2048, recent=512, frozen=64, evicted=100, page_size=16) is None
    assert cut_column(num_kept=40, recent=38, frozen=4, evicted=16, page_size=16) is None
    assert cut_column(num_kept=40, recent=40, frozen=0, evicted=1, page_size=1) == 0


def test_slide_never_reads_what_an_earlier_move_wrote():
    """Prevents losing the order of moves that the kernel relies on."""
    slots, kept, _ = random_case(4, "per-layer-head")
    sources, targets = list_moves(slots, kept, "slide")
    for row_sources, row_targets in zip(sources.flatten(0, -2), targets.flatten(0, -2), strict=True):
        for m in range(len(row_sources)):
            assert row_sources[m] not in row_targets[:m]


def test_nothing_moves_when_the_front_is_kept():
    """Prevents copies of tokens that are already in place."""
    slots = torch.tensor([[4, 2, 9, 7, 1]])
    for strategy in ("slide", "fill"):
        sources, targets = list_moves(slots, torch.tensor([[0, 1, 2]]), strategy)
        assert torch.equal(sources, targets)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16])
def test_bytes_are_copied_as_they_are(dtype):
    """Prevents a conversion on the way, which would change NaN payloads and rounded values."""
    slots, kept, _ = random_case(5, "per-head")
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (53, HEADS, DIM * width), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sources, targets = list_moves(slots, kept, "slide")
    pool = raw.clone().view(dtype)
    move_torch([pool], sources, targets)
    expected = raw.clone()
    move_torch([expected], sources, targets)
    assert torch.equal(pool.view(torch.uint8), expected)


def test_unknown_strategy():
    """Prevents a typo from silently choosing a strategy."""
    with pytest.raises(ValueError, match="'push'"):
        list_moves(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), "push")


def test_order_is_needed_only_for_tokens_older_than_an_interval():
    """Prevents `fill` when the next round would look for its newest tokens in the wrong places."""
    assert not needs_order(recent=128, interval=128)
    assert needs_order(recent=129, interval=128)


def test_remap_orders_slots():
    """Prevents slots from being lost, doubled or reordered when only the row changes."""
    slots, kept = torch.tensor([[4, 2, 9, 7, 1], [8, 3, 5, -1, -1]]), torch.tensor([[1, 4], [0, 2]])
    ordered = remap(slots, kept)
    assert ordered.tolist()[0] == [2, 1, 4, 9, 7]
    assert ordered.tolist()[1][:3] == [8, 5, 3]
