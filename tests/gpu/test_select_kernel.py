"""The selection kernels, compared with docs/method.md in plain numpy, and kept sets with the published ones."""

import numpy as np
import pytest
import torch

from kernel_cases import KernelCase, importance_reference, may_race, published_means
from sets import matrix, wide
from sglang_triattn.kernels.compact.reference import unchanged_start
from sglang_triattn.kernels.pools import key_pools
from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.score.score_kernel import score_triton
from sglang_triattn.kernels.score.tables import build_tables
from sglang_triattn.kernels.select import SELECTIONS
from sglang_triattn.kernels.select.importance_kernel import importance_triton
from sglang_triattn.kernels.select.keep_kernel import BLOCK, KeepKernel, keep_triton
from sglang_triattn.kernels.select.reference import importance_torch, keep_torch, select_torch


def moments_of(scores: torch.Tensor, lengths: list[int], recent: int) -> torch.Tensor:
    """The moments that `score_triton` would return with `scores`; NaN where it need not write."""
    requests, layers, heads, num_tokens = scores.shape
    moments = torch.full((requests, layers, heads, -(-num_tokens // CHUNK), 2), float("nan"))
    for r, length in enumerate(lengths):
        rows = scores[r, ..., : length - recent].double()
        for c in range(-(-rows.shape[-1] // CHUNK)):
            part = rows[..., c * CHUNK : (c + 1) * CHUNK]
            mean = part.mean(-1, keepdim=True)
            moments[r, ..., c, 0], moments[r, ..., c, 1] = mean[..., 0], (part - mean).square().sum(-1)
    return moments


def random_scores(lengths: list[int], layers: int, heads: int, seed: int, poison: float) -> torch.Tensor:
    """Rows of very different scales, so that the result would differ without the z-score."""
    generator = torch.Generator().manual_seed(seed)
    scale = 0.1 + 100 * torch.rand(len(lengths), layers, heads, 1, generator=generator)
    scores = (torch.randn(len(lengths), layers, heads, max(lengths), generator=generator) + 3) * scale
    for row, length in zip(scores, lengths, strict=True):
        row[..., length:] = poison
    return scores


def select_by_kernels(scores, moments, lengths, keep, recent, *, selection, num_kv_heads):
    """Kept sets, shaped as by `Scorer.keep`, from scores and moments in memory."""
    options = {"selection": selection, "num_kv_heads": num_kv_heads}
    kept = keep_triton(importance_triton(scores, moments, lengths, recent, **options), lengths, keep, recent).long()
    if selection == "per-layer-head":
        return kept.unflatten(1, (scores.shape[1], num_kv_heads))
    return kept if selection == "per-head" else kept[:, 0]


def select(device, scores, lengths, keep, recent, selection, kv_heads):
    arguments = (scores.to(device), moments_of(scores, lengths, recent).to(device))
    on_device = torch.tensor(lengths, device=device)
    return select_by_kernels(*arguments, on_device, keep, recent, selection=selection, num_kv_heads=kv_heads).cpu()


@pytest.mark.parametrize(
    ("heads", "selection"),
    matrix([(2, 3), (1, 1), (2, 4), (1, 7), (1, 16), (2, 17), (1, 71)], list(SELECTIONS), strength=1),
)
def test_importance_equals_the_definition(device, heads, selection):
    """Prevents a row of another head, layer or request, or padding, from influencing a token."""
    # Two blocks of one row, part of one block of the other; longer rows are tested below.
    lengths, layers, recent = [37, 140], 3, 6
    kv_heads, group = heads
    poison = 1e30 if heads == (2, 3) else float("nan")
    scores = random_scores(lengths, layers, kv_heads * group, group, poison)
    moments = moments_of(scores, lengths, recent).to(device)
    arguments = (scores.to(device), moments, torch.tensor(lengths, device=device), recent)
    got = importance_triton(*arguments, selection=selection, num_kv_heads=kv_heads)
    again = importance_triton(*arguments, selection=selection, num_kv_heads=kv_heads) if may_race(device) else got
    for r, length in enumerate(lengths):
        expected = importance_reference(scores[r].numpy(), length - recent, selection, kv_heads)
        np.testing.assert_allclose(got[r, :, : length - recent].cpu().numpy(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(got[r, :, : length - recent], again[r, :, : length - recent])


def test_importance_of_long_rows(device):
    """Prevents sums of several chunks from being joined wrongly, however different the chunks are."""
    lengths = [3 * CHUNK + 17, CHUNK, CHUNK + 1]
    scores = random_scores(lengths, 1, 2, 5, float("nan"))
    scores[0, :, :, CHUNK : 2 * CHUNK] += 1000
    got = importance_triton(
        scores.to(device), moments_of(scores, lengths, 1).to(device), torch.tensor(lengths, device=device), 1,
        selection="union", num_kv_heads=1,
    ).cpu()  # fmt: skip
    for r, length in enumerate(lengths):
        expected = importance_reference(scores[r].numpy(), length - 1, "union", 1)
        np.testing.assert_allclose(got[r, :, : length - 1].numpy(), expected, rtol=1e-4, atol=1e-5)


def check_keep(device, importance: torch.Tensor, lengths: list[int], keep: int, recent: int) -> None:
    """importance: [R, S, N]; the reference needs -inf outside the candidates, the kernel must not care."""
    clean = importance.clone()
    for row, length in zip(clean, lengths, strict=True):
        row[..., length - recent :] = float("-inf")
    on_device = (importance.to(device), torch.tensor(lengths, device=device), keep, recent)
    kept = keep_triton(*on_device)
    assert not may_race(device) or torch.equal(kept, keep_triton(*on_device))
    expected = keep_torch(clean, torch.tensor(lengths), keep, recent)
    torch.testing.assert_close(kept.cpu().long(), expected, rtol=0, atol=0)
    holes = torch.full_like(kept[..., 0], -1)
    KeepKernel().keep(*on_device, kept, holes)
    assert torch.equal(holes.amin(1).cpu().long(), unchanged_start(expected))
    assert torch.equal(holes.flatten().cpu().long(), unchanged_start(expected.flatten(0, 1)))


@pytest.mark.parametrize(("count", "recent"), [(3, 0), (5, 7), (26, 7)])
def test_marked_are_those_that_would_stay(device, count, recent):
    """Prevents places for large values from going to other tokens, or twice, and a tie from counting as two."""
    lengths = torch.tensor([40, 33])
    sizes = torch.randint(0, 9, (2, 3, 40), generator=torch.Generator().manual_seed(count)).float()
    outside = torch.arange(40) >= (lengths - recent)[:, None, None]
    best = keep_torch(sizes.masked_fill(outside, float("-inf")), lengths, count, 0)
    importance = torch.arange(240.0).view(2, 3, 40)
    found = importance.to(device)
    KeepKernel().mark(sizes.to(device), lengths.to(device), count, recent, found)
    assert torch.equal(found.cpu(), importance.scatter(2, best, float("inf")))


@pytest.mark.parametrize(
    ("values", "counts"),
    matrix(["random", "ties", "special"], [(16, 0), (16, 5), (5, 5), (1, 0), (17, 16), (17, 0)], strength=1),
    ids=str,
)
def test_keep_equals_a_stable_sort(device, values, counts):
    """Prevents a lost or doubled tie, padding in a kept set, and an order that depends on the sign of a zero."""
    keep, recent = counts
    lengths = [40, 17, 300, 33]
    generator = torch.Generator().manual_seed(keep)
    importance = torch.randn(4, 3, 300, generator=generator)
    if values == "ties":
        importance = importance.round()
    if values == "special":
        pick = torch.randint(0, 7, importance.shape, generator=generator)
        table = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-42, -1e-42, -3e38])
        importance = table[pick]
    for row, length in zip(importance, lengths, strict=True):
        row[..., length - recent :] = float("nan")
    check_keep(device, importance, lengths, keep, recent)


@pytest.mark.parametrize("num_tokens", [wide(BLOCK - 1), BLOCK, BLOCK + 1, wide(16384), 20001])
def test_keep_of_long_rows(device, num_tokens):
    """Prevents seams between blocks, and a limit on the length of a row."""
    generator = torch.Generator().manual_seed(num_tokens)
    lengths = [num_tokens, num_tokens // 2 + 130]
    for importance in (
        torch.randn(2, 1, num_tokens, generator=generator),
        torch.randint(0, 9, (2, 1, num_tokens), generator=generator).float(),
    ):
        check_keep(device, importance, lengths, 2048, 128)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_ties_keep_the_oldest(device, selection):
    """Prevents a division by zero where nothing differs, and ties that fall to any but the oldest."""
    for value in (0.0, 0.1):
        kept = select(device, torch.full((2, 2, 4, 50), value), [50, 20], 8, 3, selection, 2)
        for row, length in zip(kept, (50, 20), strict=True):
            assert (row == torch.tensor([0, 1, 2, 3, 4, length - 3, length - 2, length - 1])).all()


@pytest.mark.parametrize("selection", SELECTIONS)
def test_broken_scores_are_treated_as_the_reference_does(device, selection):
    """Prevents a NaN in one key from being hidden, and an invalid kept set."""
    scores = torch.randn(1, 2, 4, 40, generator=torch.Generator().manual_seed(2))
    scores[0, 1, 2, 7] = float("nan")
    kept = select(device, scores, [30], 12, 4, selection, 2)
    torch.testing.assert_close(
        kept, select_torch(scores, torch.tensor([30]), 12, 4, selection=selection, num_kv_heads=2)
    )


@pytest.mark.parametrize(
    ("selection", "aggregation"),
    [*((s, "mean") if s == "per-layer-head" else wide(s, "mean") for s in SELECTIONS), wide("per-head", "max")],
)
def test_keys_to_kept_sets(device, selection, aggregation):
    """Prevents score and selection from disagreeing about layouts; the references get the kernels' own scores."""
    # Seventeen offsets take the interpreter a long time.
    lengths, keep, recent = [150, 64, 97] if aggregation == "mean" else [66, 49, 64], 48, 16
    case = KernelCase(lengths=lengths, device=device, group=3, dtype=torch.bfloat16)
    arguments = (key_pools(case.pools), case.slots, case.lengths, case.next_positions, case.tables, recent)
    scores, moments = score_triton(*arguments, aggregation=aggregation)
    options = {"selection": selection, "num_kv_heads": 2}
    kept = select_by_kernels(scores, moments, case.lengths, keep, recent, **options)
    theirs = select_torch(scores, case.lengths, keep, recent, **options)
    assert kept.shape == theirs.shape
    # Importances are equal up to rounding: a token may differ only where it ties with the last one kept.
    importance = importance_torch(scores, case.lengths, recent, **options).flatten(1, -2 if kept.ndim > 2 else 1)
    importance = importance.view(-1, scores.shape[-1]).cpu()
    for ours, other, row in zip(kept.flatten(0, -2).cpu(), theirs.flatten(0, -2).cpu(), importance, strict=True):
        swapped = set(ours.tolist()) ^ set(other.tolist())
        edge = row[other[:-recent]].min()
        assert all(abs(row[i] - edge) < 1e-4 for i in swapped)


def test_impossible_requests_are_refused(device):
    """Prevents a silent negative slice or an unknown way to merge rows."""
    scores = torch.zeros(1, 1, 2, 30)
    for keep, recent, selection, message in ((4, 5, "union", "recent 5"), (31, 0, "union", "num_kept 31"),
                                             (4, 0, "best", "selection")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            select(device, scores, [30], keep, recent, selection, 1)


@pytest.mark.parametrize(
    ("name", "selection"),
    matrix(["qwen3_8b_a", "qwen3_8b_b"], ["union", "per-head", "per-layer-head"], strength=1),
)
def test_golden_kept_sets(device, reference_files, name, selection):
    """Prevents keeping other tokens than the published method; at most one near-tie in 64 may swap."""
    golden = np.load(reference_files / f"{name}.npz")
    mean, abs_mean = published_means(reference_files / "qwen3_8b.pt")
    layers, kv_heads, keep = torch.tensor(golden["layers"]), int(golden["num_kv_heads"]), int(golden["keep"])
    inv_freq = torch.tensor(golden["inv_freq"])
    tables = build_tables(mean[layers], abs_mean[layers], inv_freq, 1.0, "half", kv_heads, device)
    pools = [keys.transpose(0, 1).contiguous().to(device) for keys in torch.tensor(golden["keys_cached"])]
    count = pools[0].shape[0]
    slots, lengths = torch.arange(count, device=device)[None], torch.tensor([count], device=device)
    position = torch.tensor([int(golden["next_position"])], device=device)
    scores, moments = score_triton(key_pools(pools), slots, lengths, position, tables, 0)
    kept = select_by_kernels(scores, moments, lengths, keep, 0, selection=selection, num_kv_heads=kv_heads)[0].cpu()
    expected = golden[f"kept_{selection.replace('-', '_')}"]
    assert kept.shape == expected.shape
    for ours, theirs in zip(kept.reshape(-1, keep).tolist(), expected.reshape(-1, keep).tolist(), strict=True):
        assert len(set(theirs) - set(ours)) <= -(-keep // 64)
