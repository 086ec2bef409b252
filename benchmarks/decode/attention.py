"""Decode attention over rows of slots: FlashInfer as SGLang drives it, this folder's Triton kernel, or torch.

Each backend is built for one batch size, planned on the host before a step, and then called once per layer, inside a
CUDA graph or not: `attention(queries, k_pool, v_pool)`. What changes between steps comes through static buffers.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

WORKSPACE = 512 << 20
"""Bytes that SGLang gives FlashInfer for Qwen3."""


@dataclass(frozen=True)
class Rows:
    """The static buffers that attention reads.

    Attributes:
        slots: [B, width] int32, each request's slots in row order.
        lengths: [B] int32, including the new token.
    """

    slots: torch.Tensor
    lengths: torch.Tensor


class TorchAttention:
    """Gathers every row and attends in float32; for CPUs."""

    name = "torch"

    def __init__(self, rows: Rows, shape) -> None:
        self._rows, self._longest = rows, 0

    def plan(self, lengths: Sequence[int]) -> None:
        self._longest = max(lengths)

    def __call__(self, queries: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
        slots = self._rows.slots[:, : self._longest].long()
        there = torch.arange(self._longest, device=slots.device) < self._rows.lengths[:, None]
        slots = torch.where(there, slots, 0)
        k, v = k_pool[slots].float().transpose(1, 2), v_pool[slots].float().transpose(1, 2)  # [B, H_kv, N, D]
        grouped = queries.float().view(len(queries), k.shape[1], -1, queries.shape[-1])  # [B, H_kv, G, D]
        answers = torch.nn.functional.scaled_dot_product_attention(grouped, k, v, attn_mask=there[:, None, None])
        return answers.reshape(queries.shape).to(queries.dtype)


class TritonAttention:
    """This folder's kernel; it reads rows and lengths as they are, so there is nothing to plan."""

    name = "triton"

    def __init__(self, rows: Rows, shape) -> None:
        from benchmarks.decode.attention_triton import SplitAttention, parts_for

        device = rows.slots.device
        processors = torch.cuda.get_device_properties(device).multi_processor_count if rows.slots.is_cuda else 1
        parts = parts_for(len(rows.lengths), shape.kv_heads, processors)
        self._rows = rows
        self._split = SplitAttention(
            len(rows.lengths), shape.q_heads, shape.kv_heads, shape.head_dim, parts, device
        )  # fmt: skip

    def plan(self, lengths: Sequence[int]) -> None:
        pass

    def __call__(self, queries: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
        return self._split(queries, k_pool, v_pool, self._rows.slots, self._rows.lengths)


class FlashInferAttention:
    """FlashInfer's batch decode wrapper with page size 1, planned as SGLang does: first a full plan, then short ones.

    Sources: flashinfer/decode.py, `BatchDecodeWithPagedKVCacheWrapper` and `fast_decode_plan`; SGLang's
    layers/attention/flashinfer_backend.py, `FlashInferIndicesUpdaterDecode.call_begin_forward`.
    """

    name = "flashinfer"
    _workspaces: dict[torch.device, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self, rows: Rows, shape) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        device, requests = rows.slots.device, len(rows.lengths)
        self._rows, self._shape, self._planned = rows, shape, False
        if device not in self._workspaces:
            # One for all batch sizes, as in SGLang; zeroed because some of FlashInfer's backends count in it.
            self._workspaces[device] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self._indices = torch.zeros(rows.slots.numel(), dtype=torch.int32, device=device)
        self._last = torch.ones(requests, dtype=torch.int32, device=device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspaces[device],
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=uses_tensor_cores(shape),
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last,
        )

    def plan(self, lengths: Sequence[int]) -> None:
        """Fills the wrapper's device buffers; the schedule is made on the host from `lengths`, without a read back."""
        host = torch.tensor([0, *lengths]).cumsum(0).int()
        torch.cumsum(self._rows.lengths, 0, dtype=torch.int32, out=self._indptr[1:])
        self._flatten(max(lengths))
        shape = self._shape
        sizes = (self._last, shape.q_heads, shape.kv_heads, shape.head_dim, 1)
        # Plans cache the scale: one without it would go back to FlashInfer's own default.
        options = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": shape.head_dim**-0.5}
        if self._planned:
            from flashinfer.decode import fast_decode_plan

            fast_decode_plan(
                self._wrapper, self._indptr, self._indices, *sizes, **options, global_override_indptr_cpu=host
            )
        else:
            # Copies the host's lengths over the identical ones just summed on the device, and loads the kernels.
            self._wrapper.plan(host, self._indices, *sizes, **options)
            self._planned = True

    def __call__(self, queries: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
        return self._wrapper.run(queries, (k_pool.unsqueeze(1), v_pool.unsqueeze(1)))

    def _flatten(self, longest: int) -> None:
        slots, lengths = self._rows.slots, self._rows.lengths
        if slots.is_cuda:
            from benchmarks.decode.kernels import flatten_rows

            flatten_rows(slots, lengths, self._indptr, self._indices, longest)
        else:
            there = torch.arange(slots.shape[1]) < lengths[:, None]
            self._indices[: int(self._indptr[-1])] = slots[there]


def uses_tensor_cores(shape) -> bool:
    """SGLang's rule for bf16 (`should_use_tensor_core`)."""
    return shape.q_heads // shape.kv_heads >= 4


KINDS = {kind.name: kind for kind in (FlashInferAttention, TritonAttention, TorchAttention)}


def choose(wanted: str, shape, device: str) -> type:
    """Chooses the kind of attention to measure with.

    Args:
        wanted: one of KINDS, or "auto": FlashInfer if it is installed and works, else Triton; torch without CUDA.

    Raises:
        SystemExit: `wanted` cannot run here.
    """
    if wanted == "auto" and device != "cuda":
        return TorchAttention
    if wanted == "triton" and device != "cuda":
        raise SystemExit("--attention triton needs a CUDA device: take --attention torch, or a machine with a GPU.")
    if wanted == "triton" or (wanted == "auto" and importlib.util.find_spec("flashinfer") is None):
        return TritonAttention
    if wanted == "torch":
        if device == "cuda":
            raise SystemExit("--attention torch reads lengths on the host, which a CUDA graph cannot: take triton.")
        return TorchAttention
    try:
        _try_out(shape, device)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if wanted == "flashinfer":
            raise SystemExit(
                f"FlashInfer does not work here ({reason}): mend that, or take --attention triton."
            ) from None
        print(f"FlashInfer does not work here ({reason}); the Triton kernel attends instead.\n", file=sys.stderr)
        return TritonAttention
    return FlashInferAttention


def _try_out(shape, device: str) -> None:
    """Plans and attends twice, which compiles FlashInfer's kernels and shows whether its planner works as expected."""
    rows = Rows(torch.zeros(1, 16, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device))
    attention = FlashInferAttention(rows, shape)
    pool = torch.zeros(16, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        attention.plan([1])
        attention(torch.zeros(1, shape.q_heads, shape.head_dim, dtype=torch.bfloat16, device=device), pool, pool)
    if device == "cuda":
        torch.cuda.synchronize()
