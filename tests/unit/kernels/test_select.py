"""Selection compared with the published kept sets and with docs/method.md in plain numpy."""

import numpy as np
import pytest
import torch

from kernel_cases import importance_reference
from sglang_triattn.kernels.score.reference import score_torch
from sglang_triattn.kernels.score.tables import build_tables
from sglang_triattn.kernels.select import SELECTIONS
from sglang_triattn.kernels.select.reference import select_torch
from sglang_triattn.stats.file import load_stats


def reference(scores: np.ndarray, keep: int, recent: int, selection: str, kv_heads: int) -> np.ndarray:
    """Kept sets of one request from scores [L, H_q, n], in float64."""
    n = scores.shape[-1]
    candidates = n - recent
    importance = importance_reference(scores, candidates, selection, kv_heads)
    shape = {"per-head": (kv_heads,), "per-layer-head": (scores.shape[0], kv_heads)}.get(selection, ())
    importance = importance.reshape(*shape, candidates)
    best = np.argsort(-importance, axis=-1, kind="stable")[..., : keep - recent]
    newest = np.broadcast_to(np.arange(candidates, n), (*best.shape[:-1], recent))
    return np.sort(np.concatenate([best, newest], -1), -1)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize(("keep", "recent"), [(16, 0), (16, 5), (5, 5), (1, 0), (17, 16)], ids=str)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_ragged_batches_equal_the_definition(selection, keep, recent, poison):
    """Prevents padding from being kept or entering the statistics, and a lost recent window."""
    lengths = [40, 17, 64, 33]
    layers, kv_heads, group = 3, 2, 3
    generator = np.random.default_rng(keep * 100 + recent)
    # Rows of very different scales, so that the result would differ without the z-score.
    scale = generator.uniform(0.1, 100, (4, layers, kv_heads * group, 1))
    scores = generator.normal(size=(4, layers, kv_heads * group, 64)) * scale + 3 * scale
    padded = torch.tensor(scores, dtype=torch.float32)
    for r, n in enumerate(lengths):
        padded[r, ..., n:] = poison
    before = padded.clone()
    kept = select_torch(padded, torch.tensor(lengths), keep, recent, selection=selection, num_kv_heads=kv_heads)
    assert kept.dtype == torch.int64
    torch.testing.assert_close(padded, before, equal_nan=True, rtol=0, atol=0)
    for r, n in enumerate(lengths):
        expected = reference(scores[r, ..., :n], keep, recent, selection, kv_heads)
        np.testing.assert_array_equal(kept[r].numpy(), expected)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.75, 0.99, 1.0])
@pytest.mark.parametrize(("keep", "recent"), [(16, 0), (16, 5), (5, 5), (1, 0), (17, 16)], ids=str)
def test_large_values_have_a_share_of_their_own(keep, recent, share):
    """Prevents values and scores from competing for a place, a token that takes two, and padding of either kind."""
    lengths, layers, kv_heads, group = [40, 17, 64, 33], 3, 2, 3
    generator = np.random.default_rng(keep * 100 + recent)
    scores = generator.normal(size=(4, layers, kv_heads * group, 64)).astype(np.float32)
    # Few sizes, so that many tie.
    sizes = generator.integers(0, 30, size=(4, layers, kv_heads, 64)).astype(np.float32)
    padded = torch.tensor(scores), torch.tensor(sizes)
    for r, n in enumerate(lengths):
        padded[0][r, ..., n:] = float("nan")
        # The newest tokens stay at any size.
        padded[1][r, ..., n - recent :] = float("nan")
    kept = select_torch(
        padded[0] if share < 1 else None, torch.tensor(lengths), keep, recent,
        selection="per-layer-head", num_kv_heads=kv_heads, sizes=padded[1], value_share=share,
    )  # fmt: skip
    large = round(share * (keep - recent))
    for r, n in enumerate(lengths):
        candidates = n - recent
        rows = scores[r, ..., :candidates].astype(np.float64)
        z = (rows - rows.mean(-1, keepdims=True)) / np.maximum(rows.std(-1, keepdims=True), 1e-6)
        z = z.reshape(layers, kv_heads, group, candidates).max(2)
        for layer in range(layers):
            for head in range(kv_heads):
                by_size = sorted(range(candidates), key=lambda i: (-sizes[r, layer, head, i], i))[:large]
                others = sorted(set(range(candidates)) - set(by_size), key=lambda i: (-z[layer, head, i], i))
                expected = {*by_size, *others[: keep - recent - large], *range(candidates, n)}
                assert kept[r, layer, head].tolist() == sorted(expected)


def test_value_shares_that_cannot_be_served():
    """Prevents a share that is accepted and ignored."""
    scores, sizes = torch.zeros(1, 2, 4, 9), torch.zeros(1, 2, 2, 9)
    for selection, given in (("union", sizes), ("per-head", sizes), ("per-layer-head", None)):
        with pytest.raises(ValueError, match="value_share needs sizes and the selection per-layer-head"):
            select_torch(scores, torch.tensor([9]), 4, 1, selection=selection, num_kv_heads=2, sizes=given,
                         value_share=0.5)  # fmt: skip


@pytest.mark.parametrize("selection", SELECTIONS)
def test_recent_tokens_do_not_shift_the_statistics(selection):
    """Prevents the newest tokens, which stay anyway, from influencing the choice among the others."""
    scores = torch.randn(1, 2, 4, 30, generator=torch.Generator().manual_seed(0))
    loud = scores.clone()
    loud[..., 20:] = 1e6
    arguments = (torch.tensor([30]), 18, 10)
    expected = select_torch(scores, *arguments, selection=selection, num_kv_heads=2)
    torch.testing.assert_close(select_torch(loud, *arguments, selection=selection, num_kv_heads=2), expected)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("value", [0.0, 7.5])
def test_ties_keep_the_oldest(selection, value):
    """Prevents ranks or devices from breaking ties differently, and a division by zero where nothing differs."""
    kept = select_torch(
        torch.full((2, 2, 4, 50), value), torch.tensor([50, 20]), 8, 3, selection=selection, num_kv_heads=2
    )
    for row, length in zip(kept, (50, 20), strict=True):
        expected = torch.tensor([0, 1, 2, 3, 4, length - 3, length - 2, length - 1])
        assert (row == expected).all()


def test_tied_maxima_keep_the_oldest():
    """Prevents an unstable sort from going unnoticed because everything ties."""
    scores = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0, 0.0]).expand(1, 1, 1, 6)
    assert select_torch(scores, torch.tensor([6]), 2, 0).tolist() == [[1, 3]]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_everything_fits(selection):
    """Prevents duplicates or gaps in the edge case in which nothing is evicted."""
    scores = torch.randn(1, 2, 4, 9, generator=torch.Generator().manual_seed(1))
    kept = select_torch(scores, torch.tensor([9]), 9, 4, selection=selection, num_kv_heads=2)
    assert (kept == torch.arange(9)).all()


@pytest.mark.parametrize("selection", SELECTIONS)
def test_broken_scores_still_give_a_valid_set(selection):
    """Prevents a NaN in one key from making a round keep a token twice or keep padding."""
    scores = torch.randn(1, 2, 4, 40, generator=torch.Generator().manual_seed(2))
    scores[0, 1, 2, 7] = float("nan")
    kept = select_torch(scores, torch.tensor([30]), 12, 4, selection=selection, num_kv_heads=2)
    flat = kept.reshape(-1, 12)
    assert (flat[:, 1:] > flat[:, :-1]).all()
    assert flat.min() >= 0
    assert (flat[:, -4:] == torch.arange(26, 30)).all()


def test_batch_does_not_change_a_request():
    """Prevents the width of a batch from deciding what a request keeps."""
    scores = torch.randn(1, 8, 4, 700, generator=torch.Generator().manual_seed(3))
    wide = torch.nn.functional.pad(scores, (0, 1348), value=float("nan"))
    alone = select_torch(scores, torch.tensor([700]), 256, 32)
    torch.testing.assert_close(select_torch(wide, torch.tensor([700]), 256, 32), alone)


def test_no_value_is_read_on_the_host():
    """Prevents a hidden device synchronisation: tensors without data fail on any read."""
    scores, lengths = (
        torch.empty(2, 3, 4, 30, device="meta"),
        torch.empty(2, dtype=torch.int64, device="meta"),
    )
    shapes = [
        select_torch(scores, lengths, 9, 2, selection=selection, num_kv_heads=2).shape for selection in SELECTIONS
    ]
    assert shapes == [(2, 9), (2, 9), (2, 2, 9), (2, 3, 2, 9)]
    sizes, options = torch.empty(2, 3, 2, 30, device="meta"), {"selection": "per-layer-head", "num_kv_heads": 2}
    for share in (0.5, 1.0):
        kept = select_torch(scores, lengths, 9, 2, sizes=sizes, value_share=share, **options)
        assert kept.shape == (2, 3, 2, 9)


@pytest.mark.parametrize(
    ("keep", "recent", "options", "message"),
    [
        (4, 5, {}, "recent 5, num_kept 4"),
        (4, -1, {}, "recent -1"),
        (31, 0, {}, "num_kept 31"),
        (4, 0, {"selection": "best"}, "selection must be"),
        (4, 0, {"selection": "per-head"}, "needs num_kv_heads"),
    ],
)
def test_impossible_requests_are_refused(keep, recent, options, message):
    """Prevents a silent negative slice."""
    with pytest.raises(ValueError, match=message):
        select_torch(torch.zeros(1, 1, 2, 30), torch.tensor([30]), keep, recent, **options)


@pytest.mark.parametrize("selection", ["union", "per-head", "per-layer-head"])
@pytest.mark.parametrize("name", ["qwen3_8b_a", "qwen3_8b_b"])
def test_golden_kept_sets(reference_files, name, selection):
    """Prevents keeping other tokens than the published method; at most one near-tie in 64 may swap."""
    golden = np.load(reference_files / f"{name}.npz")
    stats, layers = load_stats(reference_files / "qwen3_8b.pt"), torch.tensor(golden["layers"])
    kv_heads, keep = int(golden["num_kv_heads"]), int(golden["keep"])
    tables = build_tables(
        stats.mean[layers], stats.abs_mean[layers], torch.tensor(golden["inv_freq"]), 1.0, "half", kv_heads,
        "cpu",
    )  # fmt: skip
    pools = [keys.transpose(0, 1).contiguous() for keys in torch.tensor(golden["keys_cached"])]
    count = torch.tensor([pools[0].shape[0]])
    next_position = torch.tensor([int(golden["next_position"])])
    computed = score_torch(pools, torch.arange(count[0])[None], next_position, tables)
    expected = golden[f"kept_{selection.replace('-', '_')}"]
    # From the reference's own scores the sets are equal; from ours, equal up to rounding.
    for scores, swaps in ((torch.tensor(golden["score_mean"])[None], 0), (computed, -(-keep // 64))):
        kept = select_torch(scores, count, keep, 0, selection=selection, num_kv_heads=kv_heads)[0].numpy()
        assert kept.shape == expected.shape
        for ours, theirs in zip(kept.reshape(-1, keep), expected.reshape(-1, keep), strict=True):
            assert len(set(theirs) - set(ours)) <= swaps
