"""Scores compared with the published reference and the spec's vectors."""

import numpy as np
import pytest
import torch

from kernel_cases import GOLDEN_SCORES
from sglang_triattn.kernels.score.reference import score_torch
from sglang_triattn.kernels.score.tables import build_tables
from sglang_triattn.model.rope import Rope, rotate
from sglang_triattn.stats.file import load_stats

# The layers that the reduced statistics hold.
LAYERS = (0, 3, 10, 21, 35)
HEADS = (0, 1, 2, 3, 20, 21, 22, 23, 28, 29, 30, 31)
# layer, head, aggregation, scores of six keys by the paper's own code (see tests/golden).
SPEC_VECTORS = [
    (10, 20, "mean", [20.6082, 32.2140, 30.0219, 39.8545, 64.3067, 83.0624]),
    (10, 20, "norm", [16.5263, 24.7504, 32.1867, 41.3967, 48.9047, 57.4142]),
    (10, 20, "max", [34.0945, 52.6842, 63.1555, 69.5101, 92.0401, 113.1812]),
    (10, 21, "mean", [13.1127, 31.2626, 28.3343, 19.9644, 58.3109, 47.8042]),
    (10, 22, "mean", [20.5613, 31.6624, 43.4567, 58.3986, 84.8474, 109.2571]),
    (10, 23, "mean", [27.6134, 33.3602, 43.8832, 53.7658, 66.5219, 82.6663]),
    (10, 23, "max", [31.7108, 45.2364, 48.1297, 60.5956, 80.0730, 113.3359]),
    (0, 0, "mean", [15.8129, 26.8814, 12.6461, 6.3152, 32.8646, 71.0639]),
    (0, 0, "max", [32.2453, 40.1413, 48.3297, 50.4655, 63.3393, 102.6234]),
    (35, 31, "mean", [9.1216, 8.6229, 47.3838, 63.0894, 56.1678, 54.4382]),
    (35, 31, "norm", [17.1389, 24.9538, 36.2123, 46.4507, 59.9994, 65.4411]),
]


@pytest.fixture(scope="module")
def qwen3_8b(reference_files):
    return load_stats(reference_files / "qwen3_8b.pt")


@pytest.mark.parametrize(("aggregation", "field", "tolerance"), GOLDEN_SCORES)
@pytest.mark.parametrize("name", ["qwen3_8b_a", "qwen3_8b_b"])
def test_golden_scores(reference_files, qwen3_8b, name, aggregation, field, tolerance):
    """Prevents drift from the published method on a real model's statistics."""
    golden = np.load(reference_files / f"{name}.npz")
    layers = torch.tensor(golden["layers"])
    tables = build_tables(
        qwen3_8b.mean[layers], qwen3_8b.abs_mean[layers], torch.tensor(golden["inv_freq"]), 1.0, "half",
        int(golden["num_kv_heads"]), "cpu",
    )  # fmt: skip
    pools = [keys.transpose(0, 1).contiguous() for keys in torch.tensor(golden["keys_cached"])]
    count = pools[0].shape[0]
    next_position = torch.tensor([int(golden["next_position"])])
    scores = score_torch(pools, torch.arange(count)[None], next_position, tables, aggregation=aggregation)
    torch.testing.assert_close(scores[0], torch.tensor(golden[field]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("vector", SPEC_VECTORS, ids=lambda v: f"layer{v[0]}-head{v[1]}-{v[2]}")
def test_spec_vectors(qwen3_8b, vector):
    """Prevents an error shared by the golden files and this code: these vectors come from another program."""
    layer, head, aggregation, expected = vector
    layer, head = LAYERS.index(layer), HEADS.index(head)
    inv_freq = 1e6 ** (-2 * torch.arange(64, dtype=torch.float32) / 128)
    i, j = torch.arange(6, dtype=torch.float64)[:, None], torch.arange(128, dtype=torch.float64)
    keys = torch.sin(0.1 * (i + 1) * (j + 1)) * (1 + 0.5 * i)
    positions = torch.tensor([0, 17, 1000, 2999, 4095, 5999])
    pool = rotate(keys, positions, Rope(inv_freq.double(), 1.0, 128, "half")).float()[:, None]
    tables = build_tables(
        qwen3_8b.mean[layer, head][None, None], qwen3_8b.abs_mean[layer, head][None, None], inv_freq, 1.0,
        "half", 1, "cpu",
    )  # fmt: skip
    scores = score_torch([pool], torch.arange(6)[None], torch.tensor([6000]), tables, aggregation=aggregation)
    tolerance = {"mean": 1e-2, "max": 5e-2, "norm": 1e-3}[aggregation]
    torch.testing.assert_close(scores[0, 0, 0], torch.tensor(expected), rtol=0, atol=tolerance)
