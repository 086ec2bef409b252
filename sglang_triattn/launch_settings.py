"""SGLang's settings that compression cannot work with. A launch and `sglang-triattn check` refuse by the same table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_triattn.errors import TriAttentionError


@dataclass(frozen=True)
class Refusal:
    """A setting that is refused if `applies(value)`; `reason` completes "... does not work with ... because"."""

    field: str
    applies: Callable[[Any], bool]
    reason: str
    remedy: str = ""

    def message(self, value: object, beside: str = "") -> str:
        """One sentence for the user; `beside` is another flag without which the setting would be accepted."""
        name = "--" + self.field.replace("_", "-")
        remedy = self.remedy or f"leave {name} out, or start without --enable-triattention"
        others = f"--enable-triattention and {beside}" if beside else "--enable-triattention"
        # A switch has no value of its own.
        shown = name if value is True else f"{name} {value}"
        return f"{shown} does not work with {others}, because {self.reason}: {remedy}."


def _set(value: object) -> bool:
    return bool(value)


def _many(value: int | None) -> bool:
    return value is not None and value > 1


_OWN_KV = "it reads a request's KV by token position, which a round changes"
_OTHER_POOL = "it keeps the KV in a pool that rounds cannot compact"
_OTHER_LOOP = "it schedules batches in a way for which the safe point of rounds is not known"
_NO_PLUGIN = "its processes do not load SGLang plugins"
_OWN_STEP = "it runs whole decode steps in kernels that take a request's length for its next position"
_BESIDE_ROWS = "it keeps data beside each request's row that a round does not compact"

DRAFT_MODELS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""Ways of drafting tokens by a model of its own that work with rounds. SGLang takes NEXTN for EAGLE."""

# These attach a cache of their own to the row table.
_SPARSE_BACKENDS = ("minicpm_flashattn", "minicpm_flashinfer")


def _sparse(value: object) -> bool:
    return value in _SPARSE_BACKENDS


SETTINGS = (
    Refusal(
        "speculative_algorithm",
        lambda value: value is not None and str(value).upper() not in ("NGRAM", *DRAFT_MODELS),
        "what such drafts keep beside a request's row is not tested with rounds",
        "use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or NGRAM, or leave --speculative-algorithm out",
    ),
    Refusal(
        "disaggregation_mode",
        lambda value: value == "prefill",
        "a prefill server does not decode",
        "use --enable-triattention on the decode server alone",
    ),
    Refusal("dcp_size", _many, _OTHER_POOL),
    Refusal("attn_cp_size", _many, _OTHER_POOL),
    Refusal("enable_two_batch_overlap", _set, _OTHER_LOOP),
    Refusal("enable_pdmux", _set, _OTHER_LOOP),
    Refusal("dllm_algorithm", _set, "a diffusion model rewrites its tokens"),
    Refusal("enable_unified_memory", _set, _OTHER_POOL),
    Refusal("enable_page_major_kv_layout", _set, _OTHER_POOL),
    Refusal("enable_kv_cache_sharding", _set, _OTHER_POOL),
    Refusal("enable_hisparse", _set, _OTHER_POOL),
    Refusal("prefill_only_disable_kv_cache", _set, "there is no KV cache to compress"),
    Refusal(
        "kv_cache_dtype",
        lambda value: value not in (None, "auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        "its keys cannot be scored",
        "use --kv-cache-dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2",
    ),
    Refusal(
        "hicache_host_memory_mode",
        lambda value: value == "buffer_only",
        "the copies that it stages for a storage are not tested with rounds",
        "use --hicache-host-memory-mode cache",
    ),
    Refusal("enable_lmcache", _set, _OWN_KV),
    Refusal("enable_flexkv", _set, _OWN_KV),
    Refusal("enable_unified_cache_external_linker", _set, _OWN_KV),
    Refusal("radix_cache_backend", _set, "only SGLang's own radix tree is known to keep frozen prefixes apart"),
    Refusal("enable_streaming_session", _set, _OWN_KV),
    Refusal("enable_session_radix_cache", _set, "a session's reference to the tree assumes uncompacted requests"),
    Refusal("kv_canary", lambda value: value not in (None, "none"), _OWN_KV),
    Refusal("enable_return_routed_experts", _set, _OWN_KV),
    Refusal("enable_return_indexer_topk", _set, _OWN_KV),
    Refusal("device", lambda value: value not in ("cuda", "cpu"), "its streams and KV layouts are not known to fit"),
    Refusal("encoder_only", _set, "an encoder does not decode"),
    Refusal("language_only", _set, "images that another server has encoded are not tested with rounds"),
    Refusal("use_ray", _set, _NO_PLUGIN),
    Refusal("smg_grpc_mode", _set, _NO_PLUGIN),
    Refusal("grpc_mode", _set, _NO_PLUGIN),
    Refusal("is_embedding", _set, "an embedding model does not decode"),
    Refusal("enable_nvidia_megakernel", _set, _OWN_STEP),
    Refusal("enable_amd_monokernel", _set, _OWN_STEP),
    Refusal("attention_backend", _sparse, _BESIDE_ROWS),
    Refusal("prefill_attention_backend", _sparse, _BESIDE_ROWS),
    Refusal("decode_attention_backend", _sparse, _BESIDE_ROWS),
    Refusal(
        "model_impl",
        lambda value: value not in ("auto", "sglang", "transformers"),
        "its attention layers are not known",
        "use --model-impl auto",
    ),
)

# Only for models whose window layers have a KV pool of their own.
BESIDE_WINDOW_POOL = (
    Refusal(
        "enable_hierarchical_cache",
        _set,
        "the copies that it makes of the window layers' own KV pool are not tested with rounds",
    ),
    Refusal("pp_size", _many, "window layers with a KV pool of their own are not tested in stages", "use --pp-size 1"),
)

# Only for models with latent KV.
BESIDE_LATENTS = (
    Refusal("enable_hierarchical_cache", _set, "the copies that it makes of latent KV are not tested with rounds"),
)

# Only for models with layers that keep a state instead of KV.
BESIDE_STATES = (
    Refusal("enable_hierarchical_cache", _set, "the copies that it makes of layers' states are not tested with rounds"),
    Refusal("pp_size", _many, "layers that keep a state are not tested in stages", "use --pp-size 1"),
    Refusal("attn_dp_size", _many, "layers that keep a state are not tested in groups with batches of their own"),
    Refusal("enable_mixed_chunk", _set, "layers that keep a state are not tested in steps that prefill and decode"),
    Refusal(
        "mamba_radix_cache_strategy",
        lambda value: value == "extra_buffer_lazy",
        "the states that it gives to the tree late are not tested with rounds",
        "use --mamba-radix-cache-strategy auto",
    ),
    Refusal("enable_int8_mamba_checkpoint", _set, "the states that it gives to the tree are not tested with rounds"),
    Refusal("enable_linear_replayssm", _set, "it counts a state's tokens by the row's length, which a round changes"),
)

# Only with --speculative-algorithm.
BESIDE_SPECULATION = (
    Refusal(
        "enable_deterministic_inference",
        _set,
        "the numbers that a seed draws follow from the row's length there, which a round changes",
    ),
)

CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
"""A draft that does not branch, by SGLang's settings."""

_USE_CHAIN = "use " + " ".join(f"--{field.replace('_', '-')} {number}" for field, number in CHAIN.items())

# Only with a draft model.
BESIDE_DRAFT_MODEL = (
    Refusal(
        "speculative_eagle_topk",
        _many,
        "drafts of a model that branch are not tested with rounds",
        _USE_CHAIN,
    ),
    Refusal("enable_hierarchical_cache", _set, "the copies that it makes of a draft model's KV are not tested"),
    Refusal("speculative_adaptive", _set, "drafts whose length changes are not tested with rounds"),
    Refusal("enable_multi_layer_eagle", _set, "draft models of several layers are not tested with rounds"),
    Refusal("speculative_draft_window_size", _set, "a draft model that attends to a window is not tested with rounds"),
    Refusal("enable_lora", _set, "adapters are not tested with a draft model"),
    Refusal("attn_dp_size", _many, "groups of ranks with batches of their own are not tested with a draft model"),
    *(
        Refusal(
            f"{kind}attention_backend",
            lambda value: value == "aiter",
            "it takes the positions of drafted tokens for the lengths of rows, which rounds shorten",
            "use triton",
        )
        for kind in ("", "decode_", "speculative_draft_")
    ),
)

# Only with drafts that read the model's hidden states. For the others, SGLang turns it off by itself.
BESIDE_HIDDEN_STATES = (
    Refusal(
        "enable_mixed_chunk",
        _set,
        "what decodes beside a prefill takes its logical length for its row's there",
    ),
)


def beside_drafts(algorithm: object) -> tuple[Refusal, ...]:
    """What may be refused beside this way of drafting."""
    name, found = str(algorithm).upper(), BESIDE_SPECULATION
    if name in DRAFT_MODELS:
        found += BESIDE_DRAFT_MODEL
    return found + BESIDE_HIDDEN_STATES if name in DRAFT_MODELS and name != "STANDALONE" else found


# Models for which SGLang itself chooses drafts that branch, unless it is given numbers.
_BRANCHING = ("LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM")
_BRANCHES = 4


def branches_by_itself(algorithm: object, architecture: str) -> int:
    """SGLang's `speculative_eagle_topk` for a draft model, if it is given no numbers."""
    return _BRANCHES if architecture in _BRANCHING and str(algorithm).upper() != "STANDALONE" else 1


def check_draft_numbers(algorithm: object, given: Mapping[str, Any]) -> None:
    """Raises TriAttentionError for numbers of a draft model's drafts that lack one which SGLang then demands.

    Args:
        given: settings that the user gave, by field; others are absent or None.
    """
    numbers = {field: given[field] for field in CHAIN if given.get(field) is not None}
    missing = [field for field in ("speculative_num_steps", "speculative_eagle_topk") if field not in numbers]
    if str(algorithm).upper() not in DRAFT_MODELS or not numbers or not missing:
        return
    name, lacking = (f"--{field.replace('_', '-')}" for field in (next(iter(numbers)), missing[0]))
    raise TriAttentionError(
        f"{name} {next(iter(numbers.values()))} does not work without {lacking}, because SGLang takes the numbers of a "
        f"draft together: {_USE_CHAIN}."
    )


def refused_drafts(algorithm: object, model: str, reason: str) -> TriAttentionError:
    """The refusal of --speculative-algorithm for one model; `reason` completes "because ..."."""
    return TriAttentionError(
        f"--speculative-algorithm {algorithm} does not work with --enable-triattention for {model}, because {reason}: "
        "leave --speculative-algorithm out."
    )


def refused_decode_server(model: str) -> TriAttentionError:
    """The refusal of --disaggregation-mode decode for one model."""
    return TriAttentionError(
        f"--disaggregation-mode decode does not work with --enable-triattention for {model}, because models that take "
        "images, whose window layers have a KV pool of their own, or whose layers keep a state instead of KV are not "
        "tested on a decode server: leave --disaggregation-mode out."
    )


STATES_UNTRIED = "its layers that keep a state instead of KV are not tested with drafted tokens"
WINDOWS_UNTRIED = "its layers with a sliding window are not tested with drafted tokens"
IMAGES_UNTRIED = "positions behind images are not tested with drafted tokens"

# Only for models that take images.
BESIDE_IMAGES = (Refusal("pp_size", _many, "models that take images are not tested in stages", "use --pp-size 1"),)

# Only with several pipeline stages.
BESIDE_STAGES = (
    Refusal("attn_dp_size", _many, "groups of ranks with batches of their own are not tested in stages"),
    Refusal("speculative_algorithm", _set, "drafted tokens are not tested in stages"),
    Refusal("enable_hierarchical_cache", _set, "the copies that each pipeline stage makes are not tested with rounds"),
    Refusal("enable_mixed_chunk", _set, "what decodes beside a prefill in a pipeline stage is not tested with rounds"),
    Refusal(
        "enable_dynamic_chunking",
        _set,
        "chunks that a pipeline stage sizes by its speed are not tested with the room that rounds leave",
    ),
)

MEASURE = "--triattention-stats-after-update measure"
_NOT_TOGETHER = "its ranks take an update of the weights in different steps, and cannot measure together"
BESIDE_MEASURING = (
    Refusal("pp_size", _many, _NOT_TOGETHER, "use --triattention-stats-after-update keep"),
    Refusal("attn_dp_size", _many, _NOT_TOGETHER, "use --triattention-stats-after-update keep"),
)
"""Only with --triattention-stats-after-update measure."""

_UNTRIED_ALONE = "it is not tested on a decode server"

# Only with --disaggregation-mode decode.
BESIDE_PREFILL_ELSEWHERE = (
    Refusal(
        "disaggregation_decode_enable_radix_cache",
        _set,
        "prefixes that a decode server shares are not tested with rounds",
    ),
    Refusal("disaggregation_decode_enable_offload_kvcache", _set, _OWN_KV),
    Refusal("enable_pd_role_switch", _set, "a prefill server does not decode"),
    Refusal(
        "disaggregation_decode_host_receive_threshold",
        lambda value: value is not None and value < 1,
        _UNTRIED_ALONE,
    ),
    Refusal("disaggregation_decode_allocation_policy", lambda value: value == "prefill_complete", _UNTRIED_ALONE),
    Refusal("enable_hierarchical_cache", _set, _UNTRIED_ALONE),
    Refusal("speculative_algorithm", _set, _UNTRIED_ALONE),
    Refusal("pp_size", _many, _UNTRIED_ALONE, "use --pp-size 1"),
    Refusal("tp_size", _many, _UNTRIED_ALONE, "use --tp-size 1"),
    Refusal("dp_size", _many, _UNTRIED_ALONE, "use --dp-size 1"),
    Refusal("enable_lora", _set, _UNTRIED_ALONE),
)

_BESIDE = (
    *BESIDE_PREFILL_ELSEWHERE,
    *BESIDE_WINDOW_POOL,
    *BESIDE_LATENTS,
    *BESIDE_IMAGES,
    *BESIDE_STAGES,
    *BESIDE_MEASURING,
    *BESIDE_STATES,
    *BESIDE_SPECULATION,
    *BESIDE_DRAFT_MODEL,
    *BESIDE_HIDDEN_STATES,
)
GIVEN = frozenset((*(refusal.field for refusal in (*SETTINGS, *_BESIDE)), *CHAIN))
"""All settings by which a launch may be refused."""

# Environment variables that select another KV layout, server or engine.
ENVIRONMENT = {
    "SGLANG_RUST_SERVER": _NO_PLUGIN,
    "SGLANG_USE_HND_KVCACHE": _OTHER_POOL,
    "SGLANG_USE_MLX": _OTHER_LOOP,
}
