"""What the kernels cannot read or move is refused when Scorer and Mover are built, not in the first round."""

import pytest
import torch

from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.score.tables import build_tables
from sglang_triattn.kernels.scorer import Scorer

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def pools(*, layers=2, heads=2, head_dim=64, dtype=torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(8, heads, head_dim, dtype=dtype) for _ in range(layers)]


def build_scorer(k_buffers: list[torch.Tensor], *, group=3, frequencies=32, **options) -> Scorer:
    mean = torch.ones(2, 2 * group, frequencies, dtype=torch.complex64)
    tables = build_tables(mean, mean.abs(), torch.ones(frequencies), 1.0, "half", 2, "cpu")
    return Scorer(k_buffers, tables, **{"num_tokens": 100, "longest": 200, "kernels": True, "limit": 0} | options)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("buffers", "options", "message"),
    [
        (pools(layers=1), {}, "2 layers, got 1"),
        (pools(heads=4), {}, "for 2 KV heads, the key pool has 4"),
        (pools(head_dim=48), {}, "RoPE turns 64 dims of a head, keys in the pool have 48"),
        (pools(), {"selection": "best"}, "selection must be"),
        (pools(), {"aggregation": "sum"}, "aggregation must be"),
    ],
)
def test_models_that_do_not_fit_their_pool(buffers, options, message, kernels):
    """Prevents the first round from crashing the scheduler or misreading keys."""
    with pytest.raises(ValueError, match=message) as refused:
        build_scorer(buffers, kernels=kernels, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (pools(), {"selection": "union"}, "needs the selection per-layer-head, got 'union'"),
        (pools(), {"value_share": 1.5}, "between 0 and 1, got 1.5"),
        (pools(), {"value_share": -0.1}, "between 0 and 1, got -0.1"),
        (pools(), {"value_share": float("nan")}, "between 0 and 1, got nan"),
        (None, {}, "needs the value pool"),
        (pools(layers=1), {}, "one number of layers"),
        (pools(heads=4), {}, "one number of layers"),
    ],
)
def test_values_that_cannot_decide(values, options, message, kernels):
    """Prevents a share for values that is ignored, or read from another model's pool, once requests arrive."""
    options = {"selection": "per-layer-head", "value_share": 0.5} | options
    with pytest.raises(ValueError, match=message) as refused:
        build_scorer(pools(), kernels=kernels, v_buffers=values, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [(pools(dtype=torch.uint8), "got torch.uint8"), (pools(head_dim=60), "a head of 60 torch.bfloat16")],
)
def test_value_pools_that_no_kernel_reads(values, message):
    """Prevents misreading values under traffic; values of another width or dtype than keys are fine."""
    options = {"selection": "per-layer-head", "value_share": 0.5}
    with pytest.raises(ValueError, match=message):
        build_scorer(pools(), v_buffers=values, **options)
    build_scorer(pools(), v_buffers=pools(head_dim=96, dtype=torch.float8_e5m2), **options)
    # What is not requested is not checked.
    build_scorer(pools(), v_buffers=values)


BFLOAT = torch.zeros(9 * 2 * 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (pools(dtype=torch.uint8), "must hold one of .* got torch.uint8"),
        ([pools()[0], pools(dtype=torch.float16)[0]], "one dtype"),
        ([torch.zeros(8, 64, 2).transpose(1, 2)] * 2, "must be adjacent"),
        ([BFLOAT[1:1025].view(8, 2, 64)] * 2, "begin at 16 bytes"),
    ],
)
def test_pools_that_no_kernel_reads(buffers, message):
    """Prevents discovering only under traffic that a pool would be misread."""
    for build in (build_scorer, lambda pool: Mover(pool, pool, kernels=True)):
        with pytest.raises(ValueError, match=message) as refused:
            build(buffers)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        (pools(head_dim=120, dtype=torch.float8_e4m3fn), "a head of 120 torch.float8_e4m3fn cannot be moved"),
        ([torch.zeros(8, 2, 68, dtype=torch.bfloat16)[..., :64]] * 2, "from one head to the next"),
        (pools(head_dim=1028, dtype=torch.float32), "exceeds 4096 bytes"),
    ],
)
def test_heads_that_cannot_be_moved(buffers, message):
    """Prevents a ValueError in the first round; a pool in which only the values are unusual counts too."""
    build_scorer(buffers, kernels=True)
    for k, v in ((buffers, buffers), (pools(), buffers)):
        with pytest.raises(ValueError, match=message) as refused:
            Mover(k, v, kernels=True)
        assert "\n" not in str(refused.value)


def test_no_limit_on_heads_and_frequencies():
    """Prevents refusing models with few KV heads or wide heads that the kernels can handle."""
    for group, frequencies in ((1, 1), (17, 64), (71, 32), (128, 256)):
        build_scorer(pools(head_dim=512, dtype=torch.float16), group=group, frequencies=frequencies)
    Mover(pools(head_dim=512, dtype=torch.float32), pools(head_dim=64), kernels=True)


def test_keys_and_values_of_different_dtypes():
    """Prevents values from being copied as if they were as wide as keys."""
    k, v = pools(layers=1), pools(layers=1, dtype=torch.float8_e5m2)
    mover = Mover(k, v, kernels=True)
    assert [kernel._pools.buffers[0].dtype for kernel in mover._move_kernels] == [torch.bfloat16, torch.float8_e5m2]
