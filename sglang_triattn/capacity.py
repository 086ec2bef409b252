"""Capacity arithmetic: how many tokens and requests a KV pool holds, dense and compressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_triattn.model.sizes import FP8_KV, ModelSizes
from sglang_triattn.rounds.plan import ceil_align, frozen_length, max_kv_tokens, most_kept, scored_tokens
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
        dp: groups of equally many GPUs with requests and KV of their own (SGLang's --attn-dp-size).
        copied_bytes: weights that one GPU holds beyond an even split, because several GPUs hold the same.
    """

    memory_bytes: int
    reserve: float
    weight_bytes: int
    scratch_bytes: int
    tp: int
    page_size: int
    dp: int = 1
    copied_bytes: int = 0

    @property
    def ranks(self) -> int:
        """GPUs that share the attention of one request."""
        return self.tp // self.dp

    @property
    def weight_share(self) -> int:
        """Bytes of weights on one GPU."""
        return -(-self.weight_bytes // self.tp) + self.copied_bytes

    def group(self, requests: int) -> int:
        """Most requests in one group, if the groups share `requests` evenly."""
        return -(-requests // self.dp)

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
        requests: requests of the workload that fit all groups together with all of them at their peak.
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
    return [capacity(name, sizes, gpus, settings, workload, dtype) for name, dtype, settings in rows]


def longest_dense(sizes: ModelSizes, gpus: Gpus, kv_dtype: str, requests: int) -> int | None:
    """Most tokens, at most the context limit, of each of `requests` requests that fit dense together; None if none."""

    def fit(length: int) -> bool:
        return capacity("dense", sizes, gpus, None, Workload(1, length), kv_dtype).requests >= requests

    return largest(fit, 1, sizes.context)


def budget_for_share(share: float, workload: Workload) -> int:
    """The budget of which that share of the whole answer stays at its end; at least 1 token."""
    return max(int(share * (workload.length - workload.prompt)), 1)


def budget_for_requests(
    sizes: ModelSizes,
    gpus: Gpus,
    rules_of: Callable[[int], RoundRules],
    workload: Workload,
    kv_dtype: str,
    requests: int,
    *,
    least: int = 1,
) -> int | None:
    """The largest budget, up to that at which nothing is evicted, with which so many requests fit; None if none.

    Args:
        rules_of: the rules with a budget.
        least: smallest budget that the model allows.
    """

    def fit(budget: int) -> bool:
        rules = rules_of(budget)
        with_scratch = replace(gpus, scratch_bytes=scratch_bytes(sizes, rules, gpus.ranks))
        return capacity("compressed", sizes, with_scratch, rules, workload, kv_dtype).requests >= requests

    return largest(fit, least, max(workload.length, least))


def largest(holds: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest number from `least` to `most` that `holds`, if none above a number that fails does; None if none."""
    if least > most or not holds(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if holds(middle) else (least, middle - 1)
    return least


def scratch_bytes(sizes: ModelSizes, rules: RoundRules, ranks: int) -> int:
    """Device memory that a compressing server takes from the pool of one of `ranks` GPUs for scoring."""
    # This imports torch.
    from sglang_triattn.kernels.scorer import WorkspacePlan

    num_tokens, longest = scored_tokens(rules, sizes.context)
    return WorkspacePlan(
        layers=len(sizes.layout.scored),
        q_heads=sizes.q_heads // ranks,
        kv_heads=max(sizes.kv_heads // ranks, 1),
        num_tokens=num_tokens,
        longest=longest,
        selection=rules.selection,
        value_share=rules.value_share,
        most_kept=most_kept(rules, sizes.context),
    ).bytes()


def capacity(
    name: str, sizes: ModelSizes, gpus: Gpus, config: RoundRules | None, workload: Workload, kv_dtype: str
) -> Capacity:
    """Capacity of one kind of cache; `config` is None for a dense one."""
    bytes_per_token = sizes.bytes_per_token(kv_dtype, gpus.ranks)
    free = max(gpus.kv_bytes - (gpus.scratch_bytes if config else 0), 0)
    page_bytes = (bytes_per_token + int(WINDOW_SHARE * sizes.window_bytes(kv_dtype, gpus.ranks))) * gpus.page_size
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
        requests=min(pool // peak, _requests_by_window(sizes, pool, workload, gpus.page_size)) * gpus.dp,
    )


def _requests_by_window(sizes: ModelSizes, pool: int, workload: Workload, page_size: int) -> int:
    """Requests whose windows fit the pool of the window layers; the size of the other pool without one."""
    if not sizes.layout.window_pool:
        return pool
    held = min(workload.length, sizes.layout.window + WINDOW_INTERVAL)
    return int(WINDOW_SHARE * pool) // ceil_align(held, page_size)
