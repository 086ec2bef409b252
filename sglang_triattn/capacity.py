"""Capacity arithmetic: how many tokens and requests a KV pool holds, dense and compressed."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_triattn.model.sizes import FP8_KV, ModelSizes
from sglang_triattn.rounds.plan import ceil_align, frozen_length, max_kv_tokens
from sglang_triattn.rounds.rules import RoundRules

WINDOW_SHARE = 0.8
"""Tokens in the pool of window layers per token in the other, SGLang's `--swa-full-tokens-ratio` by default."""

WINDOW_INTERVAL = 128
"""Tokens that a request's window grows before SGLang frees what has left it (SGLANG_SWA_EVICTION_INTERVAL)."""


@dataclass(frozen=True)
class Workload:
    """Equal requests that share no prefix. Both fields are logical lengths in tokens; `length` includes the prompt."""

    prompt: int
    length: int


@dataclass(frozen=True)
class Gpus:
    """Identical GPUs that share one model.

    Attributes:
        memory_bytes: memory of one GPU.
        reserve: fraction of that memory that holds neither weights nor KV.
        weight_bytes: size of the whole model.
        scratch_bytes: memory for scoring that a compressing server takes from the pool of one GPU.
        tp: number of GPUs.
        page_size: slots per page.
    """

    memory_bytes: int
    reserve: float
    weight_bytes: int
    scratch_bytes: int
    tp: int
    page_size: int

    @property
    def weight_share(self) -> int:
        """Bytes of weights on one GPU."""
        return -(-self.weight_bytes // self.tp)

    @property
    def kv_bytes(self) -> int:
        """Bytes for KV and workspace on one GPU; negative if the weights do not fit."""
        return int(self.memory_bytes * (1 - self.reserve)) - self.weight_share


@dataclass(frozen=True)
class Capacity:
    """What one kind of KV cache holds on one GPU.

    Attributes:
        bytes_per_token: KV bytes of one token on this GPU.
        pool_tokens: size of the pool, in whole pages.
        peak_tokens: most tokens that one request of the workload holds at once, in whole pages.
        longest_trace: longest logical length, within the context limit, that fits the pool if one request runs alone.
        requests: requests of the workload that fit together with all of them at their peak.
    """

    name: str
    kv_dtype: str
    bytes_per_token: int
    pool_tokens: int
    peak_tokens: int
    longest_trace: int
    requests: int


def peak_tokens(config: RoundRules | None, workload: Workload, page_size: int) -> int:
    """Most tokens that one request holds at once, rounded up to whole pages.

    A dense request (`config` None) holds its full length. A compressed one keeps its frozen prompt, and its private
    part grows up to the trigger of a round. The trigger counts the token in flight, because SGLang allocates its slot
    before the round is planned.
    """
    held = workload.length
    if config is not None:
        frozen = frozen_length(config, 0, workload.prompt, page_size)
        held = max_kv_tokens(config, frozen=frozen, logical_end=held)
    return ceil_align(held, page_size)


def plan(sizes: ModelSizes, gpus: Gpus, config: RoundRules, workload: Workload, kv_dtype: str) -> list[Capacity]:
    """Capacities dense and compressed, in `kv_dtype` and in 8 bits; a single pair if `kv_dtype` already has 8 bits."""
    fp8 = kv_dtype if kv_dtype in FP8_KV else "fp8_e5m2"
    rows = [("fp8", fp8, None), ("both", fp8, config)]
    if fp8 != kv_dtype:
        rows = [("dense", kv_dtype, None), rows[0], ("compressed", kv_dtype, config), rows[1]]
    return [_capacity(name, sizes, gpus, settings, workload, dtype) for name, dtype, settings in rows]


def _capacity(
    name: str, sizes: ModelSizes, gpus: Gpus, config: RoundRules | None, workload: Workload, kv_dtype: str
) -> Capacity:
    """Capacity of one kind of cache; `config` is None for a dense one."""
    bytes_per_token = sizes.bytes_per_token(kv_dtype, gpus.tp)
    free = max(gpus.kv_bytes - (gpus.scratch_bytes if config else 0), 0)
    page_bytes = (bytes_per_token + int(WINDOW_SHARE * sizes.window_bytes(kv_dtype, gpus.tp))) * gpus.page_size
    pool = free // page_bytes * gpus.page_size
    peak = peak_tokens(config, workload, gpus.page_size)
    longest = peak_tokens(config, Workload(workload.prompt, sizes.context), gpus.page_size)
    return Capacity(
        name=name,
        kv_dtype=kv_dtype,
        bytes_per_token=bytes_per_token,
        pool_tokens=pool,
        peak_tokens=peak,
        longest_trace=sizes.context if longest <= pool else min(sizes.context, pool),
        requests=min(pool // peak, _requests_by_window(sizes, pool, workload, gpus.page_size)),
    )


def _requests_by_window(sizes: ModelSizes, pool: int, workload: Workload, page_size: int) -> int:
    """Requests whose windows fit the pool of the window layers; the size of the other pool without one."""
    if not sizes.layout.window_pool:
        return pool
    held = min(workload.length, sizes.layout.window + WINDOW_INTERVAL)
    return int(WINDOW_SHARE * pool) // ceil_align(held, page_size)
