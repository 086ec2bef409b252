"""The scorer that a server uses: kernels and reference agree, and the workspace is bounded and known in advance."""

import itertools

import pytest
import torch

from kernel_cases import KernelCase
from sets import wide
from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.kernels.select import SELECTIONS
from sglang_triattn.kernels.select.importance_kernel import importance_triton
from sglang_triattn.kernels.workspace import LIMIT_BYTES, WorkspacePlan

KEEP, RECENT = 40, 8


def scorer(case: KernelCase, num_tokens: int, selection: str, limit: int, longest: int = 0) -> Scorer:
    """A scorer with kernels and a poisoned workspace; with `limit` 0 it holds what `num_tokens` and `longest` need."""
    made = Scorer(
        case.pools, case.tables, num_tokens=num_tokens, longest=longest, selection=selection, kernels=True, limit=limit
    )
    made._memory.fill_(float("nan"))
    return made


def reference(case: KernelCase, selection: str) -> Scorer:
    return Scorer(case.pools, case.tables, num_tokens=0, longest=0, selection=selection, kernels=False)


def arguments(case: KernelCase, rows: slice = slice(None)) -> tuple:
    """Arguments of `keep` for some rows; their padding points at slot 0, because the reference reads it."""
    lengths = case.lengths[rows]
    slots = case.slots[rows, : int(lengths.max())]
    slots = torch.where(slots < len(case.pools[0]), slots, 0)
    return slots, lengths, case.next_positions[rows], KEEP, RECENT


@pytest.mark.parametrize("selection", [s if s == "per-layer-head" else wide(s) for s in SELECTIONS])
def test_launches_in_parts_equal_the_reference(device, selection):
    """Prevents requests beyond the workspace from being lost, mixed up or answered with another's tokens."""
    case = KernelCase(lengths=[90, 64, 80, 77, 90], device=device, head_dim=16)
    expected = reference(case, selection).keep(*arguments(case))
    launches = set()
    for num_tokens in (90, 200, 1000):
        ours = scorer(case, num_tokens, selection, limit=0)
        launches.add(ours.plan.launch(90))
        before = ours._memory.data_ptr()
        torch.testing.assert_close(ours.keep(*arguments(case)), expected, rtol=0, atol=0)
        assert ours._memory.data_ptr() == before
        assert ours._memory.numel() * 4 == ours.plan.bytes()
    assert len(launches) == 3


@pytest.mark.parametrize(("selection", "aggregation"), [*((s, "mean") for s in SELECTIONS), wide("per-head", "max")])
def test_long_rows_are_scored_some_layers_at_a_time(device, selection, aggregation):
    """Prevents layers from being lost, counted twice or divided by their number more than once."""
    case = KernelCase(lengths=[90, 50], device=device, layers=3, group=3, head_dim=16)
    options = {"num_tokens": 40, "longest": 90, "selection": selection, "aggregation": aggregation}
    ours = Scorer(case.pools, case.tables, kernels=True, limit=0, **options)
    requests, layers = ours.plan.launch(90)
    assert (requests, 1 <= layers < 3) == (1, True)
    expected = Scorer(case.pools, case.tables, kernels=False, **options).keep(*arguments(case))
    ours._memory.fill_(float("nan"))
    torch.testing.assert_close(ours.keep(*arguments(case)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("value_share", [0.5, 1.0])
def test_look_ups_of_a_scorer(device, value_share):
    """Prevents weights of other layers where a launch has some of them, and weights that one of both ways ignores."""
    case = KernelCase(lengths=[90, 50], device=device, layers=3, head_dim=32)
    options = {"num_tokens": 40, "longest": 90, "selection": "per-layer-head", "value_share": value_share}
    options |= {"v_buffers": case.value_pools, "limit": 0}
    kept = []
    for weights in (case.lookups().weights, None):
        made = Scorer(case.pools, case.tables, kernels=True, lookups=weights, **options)
        # Without scores, all layers fit.
        assert made.plan.launch(90)[1] == (3 if value_share == 1 else 2)
        made._memory.fill_(float("nan"))
        kept.append(made.keep(*arguments(case)))
        expected = Scorer(case.pools, case.tables, kernels=False, lookups=weights, **options).keep(*arguments(case))
        torch.testing.assert_close(kept[-1], expected, rtol=0, atol=0)
    assert not torch.equal(*kept)


@pytest.mark.parametrize(
    ("kv_heads", "group", "selection", "aggregation"),
    [
        *((1, 71, s, "mean") if s == "per-layer-head" else wide(1, 71, s, "mean") for s in SELECTIONS),
        *(wide(2, 24, s, "norm") for s in SELECTIONS),
        wide(1, 17, "per-head", "max"),
    ],
)
def test_large_groups_keep_what_the_reference_keeps(device, kv_heads, group, selection, aggregation):
    """Prevents query heads beyond those of one program from having no say in what stays."""
    case = KernelCase(lengths=[60, 45], device=device, kv_heads=kv_heads, group=group, head_dim=16)
    options = {"num_tokens": 60, "longest": 60, "selection": selection, "aggregation": aggregation}
    ours, theirs = (Scorer(case.pools, case.tables, kernels=kernels, **options) for kernels in (True, False))
    torch.testing.assert_close(ours.keep(*arguments(case)), theirs.keep(*arguments(case)), rtol=0, atol=0)


SHARES = [0.75, 1.0]


def valued(case: KernelCase, share: float, kernels: bool, num_tokens: int = 90, **options) -> Scorer:
    """A scorer that also decides by values, with a poisoned workspace."""
    options = {"longest": 90, "limit": 0, "selection": "per-layer-head", "most_kept": KEEP, **options}
    made = Scorer(
        case.pools, case.tables, num_tokens=num_tokens, v_buffers=case.value_pools, value_share=share, kernels=kernels,
        **options,
    )  # fmt: skip
    if kernels:
        made._memory.fill_(float("nan"))
    return made


def kept_by_definition(case: KernelCase, request: int, keep: int, recent: int, share: float) -> list[list[int]]:
    """One set per layer and KV head, from float64 sizes and scores."""
    n = int(case.lengths[request])
    candidates, large = n - recent, round(share * (keep - recent))
    sizes = case.expected_sizes(request, recent).flatten(0, 1)[:, :candidates].tolist()
    scores = case.expected(request, "mean")[..., :candidates]
    z = (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True, unbiased=False)
    best = z.unflatten(1, (case.tables.num_kv_heads, -1)).amax(2).flatten(0, 1).tolist()
    sets = []
    for size, score in zip(sizes, best, strict=True):
        order = sorted(range(candidates), key=lambda i: -size[i])
        rest = sorted(order[large:], key=lambda i: -score[i])
        sets.append(sorted([*order[:large], *rest[: keep - recent - large], *range(candidates, n)]))
    return sets


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "shape",
    [
        {"dtype": torch.float32, "head_dim": 16, "group": 2},
        {"dtype": torch.bfloat16, "head_dim": 16, "value_dim": 48, "kv_heads": 1, "group": 5},
        {"dtype": torch.float8_e4m3fn, "head_dim": 32, "value_dim": 64, "group": 1},
    ],
    ids=lambda shape: str(shape["dtype"])[6:],
)
def test_values_and_scores_keep_what_the_definition_says(device, shape, share):
    """Prevents a share from going to another head's or request's tokens, or twice to the same tokens."""
    case = KernelCase(lengths=[90, 41, 64], device=device, **shape)
    for kernels in (True, False):
        kept = valued(case, share, kernels).keep(*arguments(case)).cpu()
        for r in range(3):
            expected = kept_by_definition(case, r, KEEP, RECENT, share)
            assert kept[r].flatten(0, 1).tolist() == expected


@pytest.mark.parametrize("share", SHARES)
def test_launches_in_parts_equal_the_reference_where_values_decide(device, share):
    """Prevents layers or requests from being lost, mixed up or cut when one launch cannot hold them."""
    case = KernelCase(lengths=[90, 64, 77], device=device, layers=3, kv_heads=1, group=2, head_dim=16)
    expected = valued(case, share, False).keep(*arguments(case))
    launches = set()
    for num_tokens in (40, 90, 300):
        ours = valued(case, share, True, num_tokens)
        launches.add(ours.plan.launch(90, KEEP))
        torch.testing.assert_close(ours.keep(*arguments(case)), expected, rtol=0, atol=0)
        assert torch.equal(ours.keep(*arguments(case, slice(1, 2)))[0], expected[1])
        assert ours._memory.numel() * 4 == ours.plan.bytes()
    assert len(launches) == 3


@pytest.mark.parametrize(("keep", "recent"), [(40, 40), (1, 0), wide(9, 8), wide(41, 0)])
def test_small_shares_that_round_to_nothing_or_all(device, keep, recent):
    """Prevents a count below zero, or one that exceeds what is to be kept."""
    case = KernelCase(lengths=[60, 41], device=device, layers=1, group=1, head_dim=16)
    where = (*arguments(case)[:3], keep, recent)
    for share in (0.0, 0.4, 0.6, 1.0):
        for kernels in (True, False):
            kept = valued(case, share, kernels).keep(*where).cpu()
            for r in range(2):
                assert kept[r].flatten(0, 1).tolist() == kept_by_definition(case, r, keep, recent, share)
    for kernels in (True, False):
        with pytest.raises(ValueError, match="recent 5"):
            valued(case, 0.5, kernels).keep(*arguments(case)[:3], 4, 5)


@pytest.mark.parametrize("kernels", [True, False])
def test_no_key_is_read_where_values_decide_alone(device, kernels):
    """Prevents computing scores that are not used: every key is poisoned."""
    case = KernelCase(lengths=[90, 64], device=device, head_dim=16)
    scorer = valued(case, 1.0, kernels)
    expected = scorer.keep(*arguments(case))
    for pool in case.pools:
        pool.fill_(float("nan"))
    if kernels:
        # Forget where the keys were.
        scorer._pools.addresses.zero_()
    assert torch.equal(scorer.keep(*arguments(case)), expected)
    with pytest.raises(ValueError, match="nothing is decided by scores"):
        scorer.scores(*arguments(case)[:3])


@pytest.mark.parametrize("aggregation", ["mean", wide("norm")])
def test_scores_for_inspection_are_those_that_decide(device, aggregation):
    """Prevents displayed scores from differing from those that decide, also when they come in pieces."""
    case = KernelCase(lengths=[90, 64, 70], device=device, layers=3, head_dim=16)
    for num_tokens in (40, 90, 300):
        options = {"num_tokens": num_tokens, "longest": 90, "aggregation": aggregation, "limit": 0}
        ours, theirs = (Scorer(case.pools, case.tables, kernels=kernels, **options) for kernels in (True, False))
        found, expected = (each.scores(*arguments(case)[:3]) for each in (ours, theirs))
        assert found.shape == expected.shape
        for r, length in enumerate(case.lengths.tolist()):
            torch.testing.assert_close(found[r, ..., :length], expected[r, ..., :length], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("selection", [wide(s) if s == "per-head" else s for s in SELECTIONS])
def test_importance_has_the_same_bits_however_layers_are_cut(device, selection):
    """Prevents a request's result from depending on the width of its batch, which decides how layers are split."""
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(2, 5, 6, 200, generator=generator).to(device)
    # Moments of one chunk per row; any will do.
    moments = (1 + torch.rand(2, 5, 6, 1, 2, generator=generator)).to(device)
    lengths, options = torch.tensor([200, 131], device=device), {"selection": selection, "num_kv_heads": 2}
    whole = importance_triton(scores, moments, lengths, 7, **options)
    for cuts in ((0, 2, 4, 5), (0, 1, 5), (0, 3, 5)):
        parts = torch.full_like(whole, float("nan"))
        step = whole.shape[1] // 5
        for first, last in itertools.pairwise(cuts):
            own = selection == "per-layer-head"
            target = parts[:, first * step : last * step].contiguous() if own else parts
            part = [x[:, first:last].contiguous() for x in (scores, moments)]
            importance_triton(*part, lengths, 7, importance=target, before=first, after=5 - last, **options)
            if own:
                parts[:, first * step : last * step] = target
        for r, length in enumerate(lengths.tolist()):
            assert torch.equal(parts[r, :, : length - 7], whole[r, :, : length - 7])


@pytest.mark.parametrize("selection", [s if s in ("union", "per-layer-head") else wide(s) for s in SELECTIONS])
def test_a_request_keeps_the_same_alone_and_with_a_long_one(device, selection):
    """Prevents the batch around a request from changing what it keeps."""
    case = KernelCase(lengths=[130, 64, 50], device=device, layers=4, kv_heads=1, head_dim=16)
    ours = scorer(case, 64, selection, limit=0, longest=130)
    assert ours.plan.launch(130)[1] < 4 == ours.plan.launch(64)[1]
    together = ours.keep(*arguments(case))
    for r in range(3):
        assert torch.equal(ours.keep(*arguments(case, slice(r, r + 1)))[0], together[r])


def test_layers_before_need_an_importance(device):
    """Prevents merging into memory that is not initialised."""
    zeros = torch.zeros(1, 1, 2, 30, device=device)
    with pytest.raises(ValueError, match="without their importance"):
        importance_triton(zeros, zeros[..., :1, None], torch.tensor([30], device=device), 0, before=1,
                          selection="union", num_kv_heads=1)  # fmt: skip


def test_a_row_beyond_the_plan_is_refused(device):
    """Prevents writing past the workspace."""
    case = KernelCase(lengths=[3 * CHUNK], device=device, layers=1, kv_heads=1, group=1, head_dim=8)
    with pytest.raises(ValueError, match="planned for"):
        scorer(case, CHUNK, "union", limit=0).keep(*arguments(case))


@pytest.mark.parametrize(
    ("selection", "share"), [*((s, 0.0) for s in SELECTIONS), ("per-layer-head", 0.5), ("per-layer-head", 1.0)]
)
def test_any_request_within_the_plan_fits(selection, share):
    """Prevents an announced workspace size that does not suffice, for few long rows and for many short ones."""
    for limit, slides in itertools.product((0, 1 << 20, 64 << 20), (False, True)):
        plan = WorkspacePlan(36, 32, 8, 2176, 131_072, limit, selection, share, most_kept=2048)
        for num_tokens in (1, 100, CHUNK, CHUNK + 1, 2176, 2177, 39_999, 131_072):
            num_kept = min(2048, num_tokens)
            rest = (num_kept, num_kept if slides else min(num_kept, num_tokens - num_kept))
            requests, layers = plan.launch(num_tokens, *rest)
            assert plan.needs(requests, num_tokens, layers, *rest) <= plan.bytes()
            assert requests >= 1 <= layers <= 36
            assert layers == 36 or (requests == 1 and num_tokens > 2176)
            # No further request or layer would fit: there are as few launches as possible.
            assert plan.needs(requests + 1, num_tokens, layers, *rest) > plan.bytes() or layers < 36


def test_workspace_holds_what_decides():
    """Prevents memory for scores where there are none, and for sizes where they are not used."""
    plans = [WorkspacePlan(36, 32, 8, 2176, 4096, selection="per-layer-head", value_share=s) for s in (0.0, 0.5, 1.0)]
    parts = [{name: shape for name, (_, shape) in plan.parts(2, 100, 3, 50, 9).items()} for plan in plans]
    sizes = {"sizes": (2, 3, 8, 100)}
    always = {"kept": (2, 288, 50), "sources": (2, 288, 9), "targets": (2, 288, 9)}
    assert "sizes" not in parts[0]
    assert parts[1:] == [parts[0] | sizes, always | sizes]


def test_parts_share_memory_only_one_after_the_other():
    """Prevents value sizes or moves from overwriting what is still read when they are written."""
    plan = WorkspacePlan(4, 8, 2, 300, 300, selection="per-layer-head", value_share=0.5)
    parts = plan.parts(3, 300, 4, 200, 100)
    ends = {name: start + 4 * torch.Size(shape).numel() for name, (start, shape) in parts.items()}
    together = [("kept", "importance", each) for each in ("sources", "targets", "sizes")]
    for names in (("kept", "importance", "scores", "moments", "scales"), ("sources", "targets"), *together):
        for one, other in itertools.combinations(sorted(names, key=lambda name: parts[name][0]), 2):
            assert ends[one] <= parts[other][0]
    assert plan.needs(3, 300, 4, 200, 100) >= max(ends.values())


def test_workspace_does_not_grow_with_the_context():
    """Prevents holding memory for all layers of the longest request that could ever arrive."""
    plan = WorkspacePlan(36, 32, 8, 2176, 131_072, most_kept=2048)
    assert plan.bytes() == LIMIT_BYTES
    assert WorkspacePlan(36, 32, 8, 2176, 131_072, limit=0, most_kept=2048).bytes() < 20 << 20
    assert plan.launch(2176)[0] >= 10
    assert plan.launch(131_072)[1] >= 6


def test_a_lot_of_rounds_is_one_launch():
    """Prevents rounds that share a step, of a model like Qwen3-8B, from taking one launch after another."""
    plan = WorkspacePlan(36, 32, 8, 2176, 40_960, selection="per-layer-head", value_share=0.75, most_kept=2048)
    assert plan.launch(2176, 2048, 128) == (8, 36)
