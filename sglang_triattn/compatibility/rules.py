"""What is refused: one table of SGLang's settings, one of environment variables; `uncovered` has that of models."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_triattn.compatibility.draft_rules import CHAIN, DRAFT_RULES
from sglang_triattn.compatibility.rule import (
    ASSISTANT,
    DRAFT_MODELS,
    WITHOUT_CONVERSATIONS,
    Rule,
    Server,
    is_set,
    many,
    only,
)
from sglang_triattn.config import AUTO
from sglang_triattn.errors import TriAttentionError

_OWN_KV = "it reads a request's KV by token position, which a round changes"
_OTHER_POOL = "it keeps the KV in a pool that rounds cannot compact"
_OTHER_LOOP = "it schedules batches in a way for which the safe point of rounds is not known"
_NO_PLUGIN = "its processes do not load SGLang plugins"
_OWN_STEP = "it runs whole decode steps in kernels that take a request's length for its next position"
_DATA_OF_ROWS = "it keeps data of each request's row that a round does not compact"

# These attach a cache of their own to the row table.
_SPARSE_BACKENDS = ("minicpm_flashattn", "minicpm_flashinfer")


def _sparse(value: object) -> bool:
    return value in _SPARSE_BACKENDS


_ALWAYS = (
    Rule(
        "speculative_algorithm",
        lambda value: value is not None and str(value).upper() not in ("NGRAM", *DRAFT_MODELS),
        "what such drafts keep of a request's row is not tested with rounds",
        "use --speculative-algorithm EAGLE, EAGLE3, DFLASH, STANDALONE or NGRAM, or leave --speculative-algorithm out",
    ),
    Rule(
        "disaggregation_mode",
        lambda value: value == "prefill",
        "a prefill server does not decode",
        "use --enable-triattention on the decode server alone",
    ),
    Rule("dcp_size", many, _OTHER_POOL),
    Rule("attn_cp_size", many, _OTHER_POOL),
    Rule("enable_two_batch_overlap", is_set, _OTHER_LOOP),
    Rule("enable_pdmux", is_set, _OTHER_LOOP),
    Rule("dllm_algorithm", is_set, "a diffusion model rewrites its tokens"),
    Rule("enable_unified_memory", is_set, _OTHER_POOL),
    Rule("enable_page_major_kv_layout", is_set, _OTHER_POOL),
    Rule("enable_kv_cache_sharding", is_set, _OTHER_POOL),
    Rule("enable_hisparse", is_set, _OTHER_POOL),
    Rule("prefill_only_disable_kv_cache", is_set, "there is no KV cache to compress"),
    Rule(
        "kv_cache_dtype",
        lambda value: value not in (None, "auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        "its keys cannot be scored",
        "use --kv-cache-dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2",
    ),
    Rule("enable_lmcache", is_set, _OWN_KV),
    Rule("enable_flexkv", is_set, _OWN_KV),
    Rule("enable_unified_cache_external_linker", is_set, _OWN_KV),
    Rule("radix_cache_backend", is_set, "only SGLang's own radix tree is known to keep frozen prefixes separate"),
    Rule("enable_streaming_session", is_set, _OWN_KV),
    Rule("enable_session_radix_cache", is_set, "a session's reference to the tree assumes uncompacted requests"),
    Rule("kv_canary", lambda value: value not in (None, "none"), _OWN_KV),
    Rule("enable_return_routed_experts", is_set, _OWN_KV),
    Rule("enable_return_indexer_topk", is_set, _OWN_KV),
    Rule("device", lambda value: value not in ("cuda", "cpu"), "its streams and KV layouts are not known to fit"),
    Rule("encoder_only", is_set, "an encoder does not decode"),
    Rule("use_ray", is_set, _NO_PLUGIN),
    Rule("is_embedding", is_set, "an embedding model does not decode"),
    Rule("enable_nvidia_megakernel", is_set, _OWN_STEP),
    Rule("enable_amd_monokernel", is_set, _OWN_STEP),
    Rule("attention_backend", _sparse, _DATA_OF_ROWS),
    Rule("prefill_attention_backend", _sparse, _DATA_OF_ROWS),
    Rule("decode_attention_backend", _sparse, _DATA_OF_ROWS),
    Rule(
        "model_impl",
        lambda value: value not in ("auto", "sglang", "transformers"),
        "its attention layers are not known",
        "use --model-impl auto",
    ),
)


_STAGES = only(
    (
        Rule(
            "speculative_algorithm",
            is_set,
            "SGLang drafts in stages with SGLANG_ENABLE_PP_SPEC alone, which is not tested with rounds",
        ),
    ),
    lambda server: server.is_above_one("pp_size"),
)

_GRPC = only(
    (
        Rule("nnodes", many, "the main processes of several nodes do not wait for one another there"),
        Rule("language_only", is_set, "its servicer imports what receives images from a module that SGLang has not"),
    ),
    lambda server: bool(server.settings.get("smg_grpc_mode") or server.settings.get("grpc_mode")),
    "smg_grpc_mode",
)

_DECODE_SERVERS = (
    *only(
        (
            Rule("disaggregation_decode_enable_offload_kvcache", is_set, _OWN_KV),
            Rule("enable_pd_role_switch", is_set, "a prefill server does not decode"),
            Rule(
                "disaggregation_decode_host_receive_threshold",
                lambda value: value is not None and value < 1,
                "none of SGLang's transfer backends takes it",
            ),
            Rule(
                "disaggregation_decode_allocation_policy",
                lambda value: value == "prefill_complete",
                "SGLang takes it with Mooncake's transfer alone, with which rounds are not tested",
            ),
            Rule(
                "pp_size",
                many,
                "of two stages under pressure, one request ended early for a reason that is not known",
                "use --pp-size 1",
            ),
            Rule(
                "speculative_algorithm",
                lambda value: value is not None and str(value).upper() in ("NGRAM", "STANDALONE", ASSISTANT),
                "SGLang hands the first drafts over for EAGLE, EAGLE3, NEXTN and DFLASH alone, and its decode server "
                "ends at the first request with others",
                "use one of these, or leave --speculative-algorithm out",
            ),
        ),
        lambda server: server.is_decode_server,
        "disaggregation_mode",
    ),
    *(
        Rule("disaggregation_mode", lambda value: value == "decode", reason, remedy, when, names_model=True)
        for reason, remedy, when in (
            (
                "with overlap scheduling, SGLang computes a retracted request's newest token again on a state that has "
                "seen it",
                "use --disable-overlap-schedule",
                lambda server: server.traits.linear_states and not server.settings.get("disable_overlap_schedule"),
            ),
        )
    ),
)

_LINEAR_STATES = only(
    (Rule("enable_linear_replayssm", is_set, "it counts a state's tokens by the row's length, which a round changes"),),
    lambda server: server.traits.linear_states,
)

_NOT_TOGETHER = "its ranks take an update of the weights in different steps, and cannot measure together"
_MEASURING = only(
    (
        Rule("pp_size", many, _NOT_TOGETHER, "use --triattention-stats-after-update keep"),
        Rule("attn_dp_size", many, _NOT_TOGETHER, "use --triattention-stats-after-update keep"),
    ),
    lambda server: server.config.stats_after_update == "measure",
    "triattention_stats_after_update",
)

_LEVEL = only(
    (
        Rule(
            "enable_deterministic_inference",
            is_set,
            "a first round that comes early makes what a request keeps depend on the requests that run with it",
            "use --triattention-rounds-per-step auto, which then leaves rounds where they are due",
        ),
    ),
    lambda server: server.config.rounds_per_step not in (AUTO, 0),
    "triattention_rounds_per_step",
)

_AUTO_CONVERSATIONS = only(
    (
        Rule(
            "disaggregation_mode",
            lambda value: value == "decode",
            "another server sends it whole prompts, and not what follows a row",
            WITHOUT_CONVERSATIONS,
        ),
    ),
    lambda server: server.config.conversations == "auto",
    "triattention_conversations",
)

FIRST_RULES = _ALWAYS
"""Those for every model and server, which need no traits."""
RULES = (
    *(*_STAGES, *_GRPC, *_DECODE_SERVERS, *_LINEAR_STATES),
    *(*_MEASURING, *_LEVEL, *_AUTO_CONVERSATIONS, *DRAFT_RULES),
)
"""Those for some, in the order in which they are applied."""

_NOT_REFUSED = (
    *("context_length", "disable_overlap_schedule", "enable_multimodal", "grpc_mode", "max_total_tokens", "page_size"),
    *("smg_grpc_mode", "speculative_draft_model_path", "speculative_draft_window_size"),
)
SETTING_FIELDS = frozenset({*(rule.field for rule in (*FIRST_RULES, *RULES)), *CHAIN, *_NOT_REFUSED})
"""SGLang's settings that matter."""

ENVIRONMENT = {
    "SGLANG_RUST_SERVER": _NO_PLUGIN,
    "SGLANG_USE_HND_KVCACHE": _OTHER_POOL,
    "SGLANG_USE_MLX": _OTHER_LOOP,
}
"""Environment variables that select another KV layout, server or engine, and why they are refused."""


def refusals(rules: tuple[Rule, ...], server: Server) -> Iterator[TriAttentionError]:
    return (TriAttentionError(rule.message(server)) for rule in rules if rule.refuses(server))
