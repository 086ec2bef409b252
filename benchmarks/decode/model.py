"""A decoder with random weights in the shape of a real model: one decode step for a batch, in plain torch.

Matrix products are torch's. Everything between them is one kernel each on a CUDA device (kernels.py), as in a
server, and torch elsewhere. The pool holds rotated keys, at the slot that the caller names for each new token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries [B, H_q, D] and a layer's K and V pools to [B, H_q, D]."""

DTYPE = torch.bfloat16
BYTES = DTYPE.itemsize


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as in its config.json."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    theta: float
    norm_heads: bool
    """Whether each query and key head is normalised before RoPE, as in Qwen3."""
    epsilon: float = 1e-6

    @property
    def width_qkv(self) -> int:
        return (self.q_heads + 2 * self.kv_heads) * self.head_dim

    def kv_bytes(self, layers: int) -> int:
        """Bytes of K and V per token."""
        return 2 * layers * self.kv_heads * self.head_dim * BYTES

    def read_bytes(self, layers: int) -> int:
        """Bytes of weights that a step of any batch size reads: all but the embedding, of which it reads one row per
        request."""
        attention = self.hidden * (self.width_qkv + self.q_heads * self.head_dim)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        layer += 2 * self.head_dim * self.norm_heads
        return BYTES * (layers * layer + self.hidden * (self.vocabulary + 1))

    def held_bytes(self, layers: int) -> int:
        """Bytes of all weights."""
        return self.read_bytes(layers) + BYTES * self.hidden * self.vocabulary


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, 1e6, True),
        Shape("Llama-3-8B", 32, 4096, 32, 8, 128, 14336, 128256, 5e5, False, 1e-5),
        Shape("Toy", 2, 64, 8, 2, 16, 128, 512, 1e4, True),
    )
}


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, [out, in] in bf16; norms are [in]."""

    norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    inner_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Seen:
    """What a step computed in one layer, for checks: QKV [B, width_qkv], queries and answers [B, H_q, D]."""

    qkv: torch.Tensor
    queries: torch.Tensor
    answers: torch.Tensor


class Model:
    """Random weights; activations stay around 1 in size, so that attention is neither flat nor on a single token.

    Args:
        layers: how many of the shape's layers to build.
        positions: number of logical positions to prepare RoPE for.
    """

    def __init__(self, shape: Shape, layers: int, positions: int, device: str) -> None:
        self.shape, self.device = shape, torch.device(device)
        self._random = torch.Generator(self.device).manual_seed(0)
        self.embedding = self._matrix(shape.vocabulary, shape.hidden, 1.0)
        self.layers = [self._layer() for _ in range(layers)]
        self.norm = self._norm(shape.hidden)
        self.head = self._matrix(shape.vocabulary, shape.hidden)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * self.inv_freq
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(self.device, torch.float32)  # [P, D]

    @cached_property
    def inv_freq(self) -> torch.Tensor:
        """[D / 2] float64 on the host, in radians per token."""
        dim = self.shape.head_dim
        return self.shape.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    @cached_property
    def ops(self):
        """What runs between the matrix products."""
        if self.device.type == "cuda":
            from benchmarks.decode import kernels

            return kernels
        return TorchOps

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        k_pools: Sequence[torch.Tensor],
        v_pools: Sequence[torch.Tensor],
        attend: Attend,
    ) -> tuple[torch.Tensor, list[Seen]]:
        """Logits [B, vocabulary] of one step and what each layer saw. Uses as many layers as there are pools.

        Args:
            ids, positions, slots: [B] int64; each token, its logical position, and where its K and V go.
            k_pools, v_pools: per layer [num_slots, H_kv, D]; written at `slots`.
        """
        shape, seen = self.shape, []
        x, residual = functional.embedding(ids, self.embedding), None
        for layer, k_pool, v_pool in zip(self.layers, k_pools, v_pools, strict=False):
            x, residual = self.ops.add_norm(x, residual, layer.norm, shape.epsilon)
            qkv = functional.linear(x, layer.qkv)
            queries = self.ops.rotate_and_store(qkv, shape, layer, positions, self.cos_sin, slots, k_pool, v_pool)
            answers = attend(queries, k_pool, v_pool)
            seen.append(Seen(qkv, queries, answers))
            x, residual = self.ops.add_norm(
                functional.linear(answers.flatten(1), layer.out), residual, layer.inner_norm, shape.epsilon
            )
            x = functional.linear(self.ops.gate(functional.linear(x, layer.gate_up)), layer.down)
        x, _ = self.ops.add_norm(x, residual, self.norm, shape.epsilon)
        return functional.linear(x, self.head), seen

    def _layer(self) -> Layer:
        s = self.shape
        return Layer(
            norm=self._norm(s.hidden),
            qkv=self._matrix(s.width_qkv, s.hidden),
            q_norm=self._norm(s.head_dim) if s.norm_heads else None,
            k_norm=self._norm(s.head_dim) if s.norm_heads else None,
            out=self._matrix(s.hidden, s.q_heads * s.head_dim),
            inner_norm=self._norm(s.hidden),
            gate_up=self._matrix(2 * s.inner, s.hidden),
            down=self._matrix(s.hidden, s.inner),
        )

    def _matrix(self, rows: int, num_tokens: int, deviation: float | None = None) -> torch.Tensor:
        made = torch.empty(rows, num_tokens, dtype=DTYPE, device=self.device)
        return made.normal_(0, num_tokens**-0.5 if deviation is None else deviation, generator=self._random)

    def _norm(self, size: int) -> torch.Tensor:
        """Random norm weights: not all ones, so that a norm that ignores its weight is noticed."""
        made = torch.empty(size, dtype=DTYPE, device=self.device)
        return made.uniform_(0.8, 1.2, generator=self._random)


class TorchOps:
    """Reference for kernels.py."""

    @staticmethod
    def add_norm(x, residual, weight, epsilon: float):
        """(RMSNorm of x + residual, that sum), [B, hidden]; without a residual, of x."""
        total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
        return normed(total, weight, epsilon), total

    @staticmethod
    def rotate_and_store(qkv, shape: Shape, layer: Layer, positions, cos_sin, slots, k_pool, v_pool) -> torch.Tensor:
        """Queries [B, H_q, D], normalised and rotated; K and V go to the pools."""
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        q, k, v = heads.split([shape.q_heads, shape.kv_heads, shape.kv_heads], 1)
        if shape.norm_heads:
            q, k = normed(q, layer.q_norm, shape.epsilon), normed(k, layer.k_norm, shape.epsilon)
        cos, sin = cos_sin[positions][:, None].chunk(2, -1)
        k_pool[slots], v_pool[slots] = _rotated(k, cos, sin), v
        return _rotated(q, cos, sin)

    @staticmethod
    def gate(gate_up) -> torch.Tensor:
        """[B, inner] from [B, 2 inner]: SiLU of the first half times the second."""
        gate, up = gate_up.float().chunk(2, -1)
        return (functional.silu(gate) * up).to(gate_up.dtype)


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm over the last dim, computed in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * weight.float()).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Component f of a head is (x[f], x[f + D / 2])."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
