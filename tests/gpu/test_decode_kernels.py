"""The kernels of the decode benchmark, compared with their torch references."""

import pytest
import torch

from benchmarks.decode import kernels
from benchmarks.decode.attention_triton import SplitAttention
from benchmarks.decode.model import SHAPES, Model, TorchOps
from sets import matrix


@pytest.fixture
def model(device):
    return Model(SHAPES["Toy"], 2, 64, device)


def random(*shape: int, dtype=torch.bfloat16, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


@pytest.mark.parametrize("add", [False, True])
def test_norm(model, device, add):
    """Prevents a decode loop that is fast because it drops the residual or the norm's weight."""
    x, residual = random(3, 64, device=device), random(1, 3, 64, device=device)[0] if add else None
    expected = TorchOps.add_norm(x, residual, model.norm, 1e-6)
    for got, wanted in zip(kernels.add_norm(x, residual, model.norm, 1e-6), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-3)


def test_gate(device):
    """Prevents swapped halves."""
    x = random(3, 2 * 1500, device=device)
    expected = TorchOps.gate(x)
    torch.testing.assert_close(kernels.gate(x), expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["Toy", "Llama-3-8B"])
def test_rotation_and_stores(device, name):
    """Prevents keys at other slots, heads or positions than named, and a norm in models that have none."""
    shape = SHAPES[name]
    model = Model(SHAPES["Toy"], 1, 64, device)
    model.shape = shape
    turn = torch.arange(64)[:, None] * 100.0 ** -torch.linspace(0, 1, shape.head_dim // 2)
    cos_sin = torch.cat([turn.cos(), turn.sin()], 1).to(device)
    qkv = random(3, shape.width_qkv, device=device)
    positions, slots = (torch.tensor(values, device=device) for values in ([3, 40, 63], [5, 1, 9]))
    pools = torch.zeros(4, 12, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    answers = [
        ops.rotate_and_store(qkv, shape, model.layers[0], positions, cos_sin, slots, *pair)
        for ops, pair in ((TorchOps, pools[:2]), (kernels, pools[2:]))
    ]
    torch.testing.assert_close(answers[1], answers[0], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(pools[2:], pools[:2], rtol=2e-2, atol=1e-2)
    assert pools[:, slots].any(-1).all()


@pytest.mark.parametrize(("parts", "heads"), matrix([1, 4, 16], [(8, 2), (6, 2), (2, 2)], strength=1), ids=str)
def test_attention(device, parts, heads):
    """Prevents attention over other slots than the row's first ones, and parts that are lost or counted twice."""
    (q_heads, kv_heads), dim, lengths = heads, 16, [1, 64, 130, 333]
    # The interpreter cannot multiply matrices in bf16.
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    slots = torch.stack([torch.randperm(699)[:400] for _ in lengths]).to(device, torch.int32)
    k, v = (random(700, kv_heads, dim + n, dtype=dtype, device=device)[..., :dim].contiguous() for n in (0, 1))
    for row, length in zip(slots, lengths, strict=True):
        row[length:] = 699
    k[699] = v[699] = float("nan")
    queries = random(len(lengths), q_heads, dim, dtype=dtype, device=device)
    split = SplitAttention(len(lengths), q_heads, kv_heads, dim, parts, device)
    held = torch.tensor(lengths, dtype=torch.int32, device=device)
    got = split(queries, k, v, slots, held).float()
    for r, length in enumerate(lengths):
        keys, values = (x[slots[r, :length].long()].float().repeat_interleave(q_heads // kv_heads, 1) for x in (k, v))
        weights = torch.einsum("hd,nhd->hn", queries[r].float(), keys).div(dim**0.5).softmax(-1)
        expected = torch.einsum("hn,nhd->hd", weights, values)
        assert (got[r] - expected).norm() < 1e-2 * expected.norm()


def test_flat_rows(device):
    """Prevents slots of one request from landing in another's part of the list that FlashInfer reads."""
    slots = torch.arange(3 * 2000, dtype=torch.int32, device=device).view(3, 2000)
    lengths = torch.tensor([1, 1300, 900], dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 1, 1301, 2201], dtype=torch.int32, device=device)
    indices = torch.full((2300,), -1, dtype=torch.int32, device=device)
    kernels.flatten_rows(slots, lengths, indptr, indices, 1300)
    expected = torch.cat([slots[0, :1], slots[1, :1300], slots[2, :900]])
    assert torch.equal(indices[:2201], expected)
    assert (indices[2201:] == -1).all()
