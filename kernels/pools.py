"""SGLang's key pools of all layers as one kernel argument: a tensor of addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

PADDING_SLOT = 0
"""Where SGLang writes the K/V of padding; its allocators never hand it out."""

KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
"""Key dtypes as the kernels distinguish them; float8 is decoded from bytes because older GPUs lack the conversion."""

FLOAT8 = {
    torch.float8_e4m3fn: (20, 0x7F, 2.0**120, float("nan")),
    torch.float8_e5m2: (21, 0x7C, 2.0**112, float("inf")),
}
"""How the bytes of a float8 dtype become float32.

The bits by which exponent and mantissa shift left; the first byte (without its sign) that is not a finite number; the
factor that corrects the exponent's bias; what that first byte stands for.
"""


@dataclass(frozen=True, eq=False)
class KeyPools:
    """The key pools of all layers as one kernel argument."""

    buffers: Sequence[torch.Tensor]
    """Per layer [num_slots, H_kv, head_dim]; held so that the addresses stay valid."""
    addresses: torch.Tensor
    """[L] int64: where each pool begins."""
    scales: torch.Tensor
    """[L] float32: the factor for stored keys, 1 except for float8 pools that were divided by it."""

    def __getitem__(self, layers: slice) -> KeyPools:
        """The pools of some layers."""
        return KeyPools(self.buffers[layers], self.addresses[layers], self.scales[layers])


def key_pools(buffers: Sequence[torch.Tensor], scales: torch.Tensor | None = None) -> KeyPools:
    """Describes `buffers` to the kernel, once per server: the addresses are copied to the device.

    Args:
        buffers: per layer [num_slots, H_kv, head_dim], equal in dtype and strides, dims of a head adjacent.
        scales: [L] float32, SGLang's k_scale of each layer, None where keys are stored as they are.

    Raises:
        ValueError: the pools differ, or the kernel cannot read them.
    """
    first = buffers[0]
    if first.dtype not in KINDS:
        raise ValueError(f"the KV pool must hold one of {', '.join(map(str, KINDS))}, got {first.dtype}")
    for buffer in buffers:
        if (buffer.dtype, buffer.stride(), buffer.shape[1:]) != (first.dtype, first.stride(), first.shape[1:]):
            raise ValueError("the KV pools of all layers must have one dtype, shape of a token and strides")
        if buffer.stride(-1) != 1 or buffer.data_ptr() % 16:
            raise ValueError("the dims of a head must be adjacent in the KV pool, and the pool begin at 16 bytes")
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=first.device)
    if scales is None:
        scales = torch.ones(len(buffers))
    return KeyPools(buffers, addresses, scales.to(first.device, torch.float32))
