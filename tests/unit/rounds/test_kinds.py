"""How a round goes and what it does to its row, as far as the host decides."""

from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.config import Config
from sglang_triattn.patches.rounds.launches import RoundShape, shape_for, snapshot
from sglang_triattn.rounds.plan import Plan, ceil_align
from sglang_triattn.rounds.rules import complete

CONFIG = complete(Config("s", budget=64, interval=32, recent=48))


def plan_of(frozen: int, length: int, page_size: int, keep: int = 64) -> Plan:
    new = frozen + keep
    freed = ceil_align(length, page_size) - ceil_align(new, page_size)
    return Plan(frozen=frozen, old_length=length, new_length=new, next_position=length, freed_slots=freed)


@pytest.mark.parametrize(
    ("page_size", "frozen", "length", "recent", "strategy", "cut"),
    [
        (1, 7, 103, 48, "fill", 16),
        (1, 7, 99, 48, "fill", 16),
        (1, 7, 103, 0, "fill", 64),
        (16, 16, 112, 48, "fill", 16),
        (16, 4, 100, 48, "fill", 12),
        # Half a page would have to go.
        (16, 16, 109, 48, "slide", 64),
        (64, 64, 160, 48, "slide", 64),
        # Nothing older has a page of its own.
        (16, 1, 97, 58, "slide", 64),
    ],
)
def test_rows_are_cut_where_whole_pages_can_go(page_size, frozen, length, recent, strategy, cut):
    """Prevents copying all kept tokens where a few would do, and a last page that is not the one being written."""
    shape = shape_for(CONFIG, plan_of(frozen, length, page_size), recent, moves=True, page_size=page_size)
    assert (shape.strategy, shape.cut, shape.num_kept, shape.recent) == (strategy, cut, 64, recent)


def test_the_end_of_a_row_is_emptied_where_its_order_is_not_needed():
    """Prevents a slide for tokens that have all been appended since the last round."""
    settings = complete(Config("s", budget=64, interval=32, recent=32))
    shape = shape_for(settings, plan_of(16, 109, 16), 32, moves=True, page_size=16)
    assert (shape.strategy, shape.cut) == ("fill", 64)
    shape = shape_for(settings, plan_of(16, 109, 16), 32, moves=False, page_size=1)
    assert (shape.strategy, shape.cut) == ("remap", 64)


@pytest.mark.parametrize(("page_size", "length", "cut"), [(1, 103, 16), (16, 112, 16), (16, 109, 64)])
def test_rows_whose_order_counts_slide(page_size, length, cut):
    """Prevents a rank that says nothing of a token's age, and newest tokens that are copied for nothing."""
    settings = complete(Config("s", budget=64, interval=32, recent=48, recency=0.5))
    frozen = 16 if page_size > 1 else 7
    shape = shape_for(settings, plan_of(frozen, length, page_size), 48, moves=True, page_size=page_size)
    assert (shape.strategy, shape.cut) == ("slide", cut)


def test_newest_tokens_of_window_layers_are_never_copied():
    """Prevents window layers from reading the K/V of other tokens after a round."""
    check_newest_stay(complete(Config("s", budget=64, interval=32, recent=48), window=48, page_size=16))


def test_newest_tokens_before_queued_drafts_are_never_copied():
    """Prevents a queued step from writing K/V where a round no longer looks for it."""
    check_newest_stay(complete(Config("s", budget=64, interval=32, recent=48), page_size=16, whole_pages=True))


def check_newest_stay(settings):
    assert shape_for(settings, plan_of(16, 112, 16), 48, moves=True, page_size=16).cut == 16
    with pytest.raises(RuntimeError, match="would copy the newest tokens"):
        shape_for(settings, plan_of(16, 109, 16), 48, moves=True, page_size=16)


@pytest.mark.parametrize(
    ("strategy", "cut", "before", "after"),
    [("fill", 16, 0, 32), ("fill", 10, 0, 32), ("fill", 64, 0, 80), ("slide", 64, 0, 0), ("slide", 64, 90, 80),
     ("slide", 64, 40, 40), ("slide", 16, 0, 0), ("slide", 16, 40, 40), ("remap", 64, 40, 40)],
)  # fmt: skip
def test_what_is_known_of_the_order_after_a_round(strategy, cut, before, after):
    """Prevents old tokens from being taken for the newest, and early rounds from waiting for a known order."""
    shape = RoundShape(num_kept=64, recent=48, strategy=strategy, cut=cut, width=128)
    assert shape.unordered_len(plan_of(16, 112, 16), before) == after


@pytest.mark.parametrize(("strategy", "moves"), [("remap", 0), ("fill", 32), ("slide", 64)])
def test_most_moves(strategy, moves):
    """Prevents counting bytes for a round that moves none, or fewer than it may copy."""
    shape = RoundShape(num_kept=64, recent=16, strategy=strategy, cut=48, width=128)
    assert shape.most_moves(plan_of(16, 112, 1)) == moves


@pytest.mark.parametrize(("page_size", "lengths"), [(1, (96, 97, 80)), (16, (96, 80, 112)), (16, (91, 75, 107))])
def test_rows_of_unequal_length_are_closed_up(page_size, lengths):
    """Prevents a slot from being lost, or freed while it is held, and newest tokens from changing order."""
    rows = torch.zeros(4, 160, dtype=torch.int32)
    generator, rounds = torch.Generator().manual_seed(0), []
    keep = 48 + lengths[0] % page_size
    for row, length in enumerate(lengths, start=1):
        pages = torch.randperm(200, generator=generator)[: -(-(16 + length) // page_size)]
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[: 16 + length]
        rows[row, : 16 + length] = slots.int()
        held = SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=row, kv_allocated_len=16 + length),
            request=SimpleNamespace(multimodal_inputs=None),
        )
        rounds.append((held, plan_of(16, 16 + length, page_size, keep)))
    settings, before = complete(Config("s", budget=64, interval=16, recent=32)), rows.clone()

    def kind_of(_, plan):
        return shape_for(settings, plan, 32, moves=True, page_size=page_size)

    (launch,) = snapshot(rows, rounds, kind_of, page_size)
    launch.close_up(rows, launch.slots)
    for row, (_, plan), freed in zip((1, 2, 3), rounds, launch.emptied(launch.slots, page_size), strict=True):
        old, new = before[row, : plan.old_length].tolist(), rows[row, : plan.new_length].tolist()
        assert new[-32:] == old[-32:], "the newest tokens are no longer the last"
        assert new[: -32 - page_size] == old[: len(new) - 32 - page_size], "older ones changed their places"
        pages = [{slot // page_size for slot in slots} for slots in (old, new, freed.tolist())]
        assert pages[1] | pages[2] == pages[0]
        assert not pages[1] & pages[2]
        assert len(freed) * page_size == plan.freed_slots
        assert all(slot % page_size == place % page_size for place, slot in enumerate(new))
