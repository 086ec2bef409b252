"""An SGLang plugin, only for tests: deterministic inference on a CPU.

SGLang lists the attention backends that are deterministic on a GPU, and lets plugins add theirs. Its hash of seed,
position and token is a Triton kernel; a function with the same arguments replaces it here. Its batch-invariant matrix
products are Triton kernels too and are left out: the tests send one request at a time.
"""

from __future__ import annotations

import torch

LARGEST = 2**32 - 1


def hashed(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """[rows, columns] int64 in [0, LARGEST]; seed and positions [rows], col_indices [columns]."""
    row = seed.to(torch.int64) * 0x1E3779B97F4A7C15 + positions.to(torch.int64) * 0x3F58476D1CE4E5B9
    mixed = row[:, None] + col_indices.to(torch.int64) * 0x14D049BB133111EB
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 31)) * 0x2545F4914F6CDD1D
    return (mixed >> 24) & LARGEST


def activate() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backends = ["torch_native", "intel_amx"]
    choices.add_deterministic_attention_backend_choices(backends)
    choices.add_radix_supported_deterministic_attention_backend_choices(backends)
    HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", hashed, HookType.REPLACE)
    model_runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    HookRegistry.register(f"{model_runner}.maybe_enable_batch_invariant_mode", lambda self: None, HookType.REPLACE)
