"""The scorer that a server uses: kernels and twin agree, scratch is bounded and known beforehand."""

import pytest
import torch

from sglang_triattn.kernels.score import CHUNK
from sglang_triattn.kernels.scorer import Scorer, ScratchPlan
from sglang_triattn.kernels.select import SELECTIONS

from kernel_cases import KernelCase


def scorer(case: KernelCase, columns: int, selection: str, kernels: bool) -> Scorer:
    return Scorer(case.pools, case.tables, columns=columns, selection=selection, kernels=kernels)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_launches_in_parts_equal_the_twin(device, selection):
    """Prevents requests beyond the scratch from being lost, mixed up or answered with another's tokens."""
    case = KernelCase(lengths=[90, 64, 80, 77, 90], device=device)
    slots = case.slots.clamp_max(0).where(case.slots > len(case.pools[0]), case.slots)
    arguments = (slots, case.lengths, case.next_positions, 40, 8)
    expected = scorer(case, 0, selection, kernels=False).keep(*arguments)
    for columns in (90, 200, 10_000):
        ours = scorer(case, columns, selection, kernels=True)
        before = ours._memory.data_ptr()
        torch.testing.assert_close(ours.keep(*arguments), expected, rtol=0, atol=0)
        assert ours._memory.data_ptr() == before
        assert ours._memory.numel() * 4 == ours.plan.bytes()


def test_a_row_beyond_the_plan_is_refused(device):
    """Prevents writing past the scratch."""
    case = KernelCase(lengths=[3 * CHUNK], device=device, layers=1, kv_heads=1, group=1, head_dim=8)
    with pytest.raises(ValueError, match="planned for"):
        scorer(case, CHUNK, "union", kernels=True).keep(case.slots, case.lengths, case.next_positions, 40, 8)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_any_batch_within_the_plan_fits(selection):
    """Prevents a scratch size that is announced and then not enough, for few long rows and for many short ones."""
    plan = ScratchPlan(4, 12, 3, 32, columns=40_000, selection=selection)
    for columns in (1, 100, CHUNK, CHUNK + 1, 2176, 39_999, 40_000):
        requests = plan.most_requests(columns)
        used = sum(-(-torch.Size(shape).numel() * 4 // 256) * 256 for shape in plan.parts(requests, columns).values())
        assert used <= plan.bytes()
        if columns >= CHUNK:
            assert requests >= 40_000 // columns * 0.9
