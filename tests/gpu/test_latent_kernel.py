"""The score kernel for latent KV, compared with its definition in float64."""

import pytest
import torch

from kernel_cases import KernelCase, may_race, score_tolerance
from sets import matrix
from sglang_triattn.kernels.pools import key_pools
from sglang_triattn.kernels.score.latent_kernel import score_latents_triton
from sglang_triattn.kernels.score.latent_tuning import latent_columns
from sglang_triattn.kernels.score.reference import CHUNK, score_torch
from sglang_triattn.kernels.scorer import Scorer

SENTINEL = -12345.0
LATENT = {"latent": True, "kv_heads": 1, "style": "interleaved"}
SHAPES = {
    # Widths of 512 and 64 as published, with as many heads as one rank of two has.
    "deepseek-v3": {"lengths": [35, 7], "layers": 1, "group": 64, "head_dim": 576, "rotary_dim": 64},
    "all-heads": {"lengths": [5], "layers": 1, "group": 128, "head_dim": 96, "rotary_dim": 32},
    "more-heads-than-a-program": {"lengths": [5], "layers": 1, "group": 130, "head_dim": 80, "rotary_dim": 16},
    "glm-4.7-flash": {"lengths": [70, 4, 33], "group": 20, "head_dim": 104, "rotary_dim": 64},
    "few-heads": {"lengths": [40], "layers": 3, "group": 3, "head_dim": 56, "rotary_dim": 32},
    "halves": {"lengths": [40], "group": 17, "head_dim": 88, "rotary_dim": 48, "style": "half"},
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def launch(case: KernelCase, aggregation: str, recent: int = 0, **given):
    """Scores and moments, in buffers that show what was not written."""
    layers, heads, _ = case.mean.shape
    scores = torch.full((*case.slots.shape[:1], layers, heads, case.slots.shape[1]), SENTINEL, device=case.slots.device)
    arguments = (key_pools(case.pools, case.scales), case.slots, case.lengths, case.next_positions, case.tables, recent)
    return score_latents_triton(*arguments, aggregation=aggregation, scores=scores, **given)


def check(case: KernelCase, aggregation: str, recent: int = 0) -> None:
    scores, moments = (x.cpu() for x in launch(case, aggregation, recent))
    if may_race(case.slots.device.type):
        assert torch.equal(scores, launch(case, aggregation, recent)[0].cpu())
    for r, length in enumerate(case.lengths.tolist()):
        candidates = max(length - recent, 0)
        expected = case.expected(r, aggregation)[..., :candidates]
        tolerance = score_tolerance(expected, case.slots.device.type)
        torch.testing.assert_close(scores[r, ..., :candidates].double(), expected, rtol=0, atol=tolerance)
        assert (scores[r, ..., candidates:] == SENTINEL).all()
        for c in range(moments.shape[3]):
            part = expected[..., c * CHUNK : (c + 1) * CHUNK]
            if part.shape[-1]:
                torch.testing.assert_close(moments[r, ..., c, 0].double(), part.mean(-1), rtol=0, atol=tolerance)
                square = part.sub(part.mean(-1, keepdim=True)).square().sum(-1)
                torch.testing.assert_close(moments[r, ..., c, 1].double(), square, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_shapes(device, shape):
    """Prevents heads scored by no program or by another's columns, a latent taken for a rotated key, poison from
    leaking."""
    check(KernelCase(device=device, **{**LATENT, "dtype": torch.bfloat16, **shape}), "mean", recent=3)


@pytest.mark.parametrize(("aggregation", "dtype"), matrix(["mean", "max", "norm"], DTYPES, strength=1), ids=str)
def test_dtypes_and_aggregations(device, dtype, aggregation):
    """Prevents a dtype from being decoded or split wrongly, and phases of another offset."""
    case = KernelCase(lengths=[9, 3], device=device, group=5, layers=2, head_dim=64, rotary_dim=16, dtype=dtype,
                      scales=dtype.itemsize == 1, **LATENT)  # fmt: skip
    check(case, aggregation)


def test_more_than_one_chunk(device):
    """Prevents seams between programs, and statistics that count the newest tokens."""
    case = KernelCase(
        lengths=[CHUNK + 1, CHUNK + 9], device=device, layers=1, group=2, head_dim=24, rotary_dim=16, **LATENT
    )
    check(case, "mean", recent=5)


@pytest.mark.parametrize("where", [3, 45])
def test_a_row_with_nan_has_a_score_of_nan(device, where):
    """Prevents a NaN in a latent or a rotated key from turning into a number."""
    case = KernelCase(lengths=[9], device=device, group=4, head_dim=56, rotary_dim=16, **LATENT)
    for pool in case.pools:
        pool[case.slots[0, 4], :, where] = float("nan")
    scores, _ = launch(case, "mean")
    assert scores[0, ..., 4].isnan().all()
    assert scores[0].isnan().sum() == scores[0, ..., 4].numel()


def test_rows_beyond_two_billion_elements(device):
    """Prevents 32-bit offsets. The pool is never filled: only the pages of used slots are ever backed by memory."""
    case = KernelCase(lengths=[6], device=device, dtype=torch.float8_e4m3fn, layers=1, group=2, head_dim=64,
                      rotary_dim=16, **LATENT)  # fmt: skip
    expected, _ = launch(case, "mean")
    count = (1 << 31) // 64 + 100
    pool = torch.empty(count, 1, 64, dtype=torch.uint8, device=device)
    far = torch.arange(count - 6, count, device=device)[None]
    pool[far[0]] = case.pools[0].view(torch.uint8)[case.slots[0]]
    case.pools, case.slots = [pool.view(torch.float8_e4m3fn)], far
    assert torch.equal(launch(case, "mean")[0], expected)


@pytest.mark.parametrize("selection", ["per-layer-head", "shared-mean"])
def test_scorer_keeps_what_the_reference_keeps(device, selection):
    """Prevents columns of other layers, where a launch scores some of them at a time."""
    case = KernelCase(lengths=[90, 80], device=device, group=20, layers=3, head_dim=56, rotary_dim=16, **LATENT)
    options = {"num_tokens": 90, "longest": 90, "limit": 1, "selection": selection}
    arguments = (case.slots.clamp_max(len(case.pools[0]) - 1), case.lengths, case.next_positions, 30, 10)
    kept = [Scorer(case.pools, case.tables, kernels=used, **options).keep(*arguments) for used in (True, False)]
    assert torch.equal(*kept)


def test_columns_are_exact():
    """Prevents parts that do not add up to what they are the parts of."""
    case = KernelCase(lengths=[4], group=20, head_dim=56, rotary_dim=16, **LATENT)
    columns = latent_columns(case.tables, "mean").float().sum(1)
    tables = case.tables
    whole = torch.cat([tables.unrotated, tables.spread, tables.center.real, tables.center.imag], dim=-1)
    assert (columns[..., :20].transpose(1, 2) - whole).abs().max() <= 2.0**-22 * whole.abs().max()
    assert not columns[..., 20:].any()


def test_reference_scores_absorbed_queries():
    """Prevents a score of a latent other than the mean logit of the queries that meet it."""
    generator = torch.Generator().manual_seed(1)
    case = KernelCase(lengths=[12], layers=1, group=3, head_dim=24, rotary_dim=8, **LATENT)
    queries, keys = torch.randn(50, 3, 6, generator=generator), torch.randn(3, 6, 16, generator=generator)
    case.tables.unrotated.copy_(torch.einsum("qhd,hdc->hc", queries, keys)[None] / 50)
    case.tables.center.zero_()
    case.tables.spread.zero_()
    latents = case.pools[0][case.slots[0], 0, :16]
    logits = torch.einsum("qhd,hdc,nc->hn", queries, keys, latents) / 50
    scores = score_torch(case.pools, case.slots, case.next_positions, case.tables)
    torch.testing.assert_close(scores[0, 0], logits, rtol=1e-4, atol=1e-4)
