"""What is refused: one table of SGLang's settings, one of environment variables; `uncovered` has that of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from sglang_triattn.compatibility.rule import Rule, Server, flag, many
from sglang_triattn.config import AUTO
from sglang_triattn.errors import TriAttentionError


def _set(value: object) -> bool:
    return bool(value)


_OWN_KV = "it reads a request's KV by token position, which a round changes"
_OTHER_POOL = "it keeps the KV in a pool that rounds cannot compact"
_OTHER_LOOP = "it schedules batches in a way for which the safe point of rounds is not known"
_NO_PLUGIN = "its processes do not load SGLang plugins"
_OWN_STEP = "it runs whole decode steps in kernels that take a request's length for its next position"
_DATA_OF_ROWS = "it keeps data of each request's row that a round does not compact"

DRAFT_MODELS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""Ways of drafting tokens by a model of its own that work with rounds. SGLang takes NEXTN for EAGLE."""

# These attach a cache of their own to the row table.
_SPARSE_BACKENDS = ("minicpm_flashattn", "minicpm_flashinfer")


def _sparse(value: object) -> bool:
    return value in _SPARSE_BACKENDS


_ALWAYS = (
    Rule(
        "speculative_algorithm",
        lambda value: value is not None and str(value).upper() not in ("NGRAM", *DRAFT_MODELS),
        "what such drafts keep of a request's row is not tested with rounds",
        "use --speculative-algorithm EAGLE, EAGLE3, STANDALONE or NGRAM, or leave --speculative-algorithm out",
    ),
    Rule(
        "disaggregation_mode",
        lambda value: value == "prefill",
        "a prefill server does not decode",
        "use --enable-triattention on the decode server alone",
    ),
    Rule("dcp_size", many, _OTHER_POOL),
    Rule("attn_cp_size", many, _OTHER_POOL),
    Rule("enable_two_batch_overlap", _set, _OTHER_LOOP),
    Rule("enable_pdmux", _set, _OTHER_LOOP),
    Rule("dllm_algorithm", _set, "a diffusion model rewrites its tokens"),
    Rule("enable_unified_memory", _set, _OTHER_POOL),
    Rule("enable_page_major_kv_layout", _set, _OTHER_POOL),
    Rule("enable_kv_cache_sharding", _set, _OTHER_POOL),
    Rule("enable_hisparse", _set, _OTHER_POOL),
    Rule("prefill_only_disable_kv_cache", _set, "there is no KV cache to compress"),
    Rule(
        "kv_cache_dtype",
        lambda value: value not in (None, "auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"),
        "its keys cannot be scored",
        "use --kv-cache-dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2",
    ),
    Rule(
        "hicache_host_memory_mode",
        lambda value: value == "buffer_only",
        "the copies that it stages for a storage are not tested with rounds",
        "use --hicache-host-memory-mode cache",
    ),
    Rule("enable_lmcache", _set, _OWN_KV),
    Rule("enable_flexkv", _set, _OWN_KV),
    Rule("enable_unified_cache_external_linker", _set, _OWN_KV),
    Rule("radix_cache_backend", _set, "only SGLang's own radix tree is known to keep frozen prefixes separate"),
    Rule("enable_streaming_session", _set, _OWN_KV),
    Rule("enable_session_radix_cache", _set, "a session's reference to the tree assumes uncompacted requests"),
    Rule("kv_canary", lambda value: value not in (None, "none"), _OWN_KV),
    Rule("enable_return_routed_experts", _set, _OWN_KV),
    Rule("enable_return_indexer_topk", _set, _OWN_KV),
    Rule("device", lambda value: value not in ("cuda", "cpu"), "its streams and KV layouts are not known to fit"),
    Rule("encoder_only", _set, "an encoder does not decode"),
    Rule("language_only", _set, "images that another server has encoded are not tested with rounds"),
    Rule("use_ray", _set, _NO_PLUGIN),
    Rule("smg_grpc_mode", _set, _NO_PLUGIN),
    Rule("grpc_mode", _set, _NO_PLUGIN),
    Rule("is_embedding", _set, "an embedding model does not decode"),
    Rule("enable_nvidia_megakernel", _set, _OWN_STEP),
    Rule("enable_amd_monokernel", _set, _OWN_STEP),
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


def _only(
    rules: tuple[Rule, ...], when: Callable[[Server], bool], other: str = "", *, names_model: bool = False
) -> tuple[Rule, ...]:
    return tuple(replace(rule, when=when, other=other, names_model=names_model) for rule in rules)


_STAGES = _only(
    (
        Rule("attn_dp_size", many, "groups of ranks with batches of their own are not tested in stages"),
        Rule("speculative_algorithm", _set, "drafted tokens are not tested in stages"),
    ),
    lambda server: server.is_above_one("pp_size"),
)

_NOT_ON_DECODE_SERVERS = "it is not tested on a decode server"


def _is_decode_server(server: Server) -> bool:
    return server.settings.get("disaggregation_mode") == "decode"


_DECODE_SERVERS = (
    *_only(
        (
            Rule("disaggregation_decode_enable_offload_kvcache", _set, _OWN_KV),
            Rule("enable_pd_role_switch", _set, "a prefill server does not decode"),
            Rule(
                "disaggregation_decode_host_receive_threshold",
                lambda value: value is not None and value < 1,
                _NOT_ON_DECODE_SERVERS,
            ),
            Rule(
                "disaggregation_decode_allocation_policy",
                lambda value: value == "prefill_complete",
                _NOT_ON_DECODE_SERVERS,
            ),
            Rule(
                "pp_size",
                many,
                "of two stages under pressure, one request ended early for a reason that is not known",
                "use --pp-size 1",
            ),
            Rule(
                "speculative_algorithm",
                lambda value: value is not None and str(value).upper() in ("NGRAM", "STANDALONE"),
                "SGLang hands the first drafts over for EAGLE, EAGLE3 and NEXTN alone, and its decode server ends at "
                "the first request with others",
                "use one of these, or leave --speculative-algorithm out",
            ),
        ),
        _is_decode_server,
        "disaggregation_mode",
    ),
    Rule(
        "disaggregation_decode_enable_radix_cache",
        _set,
        "prefixes that a decode server shares are not tested with drafted tokens",
        "",
        lambda server: _is_decode_server(server) and server.drafts is not None,
        "speculative_algorithm",
    ),
    Rule(
        "disaggregation_decode_enable_radix_cache",
        _set,
        "prefixes that a decode server shares are not tested with a window's K/V or states",
        "",
        lambda server: _is_decode_server(server) and (server.traits.window_pool or server.traits.linear_states),
        "disaggregation_mode",
        names_model=True,
    ),
    Rule(
        "speculative_algorithm",
        _set,
        "states of drafted tokens are not tested on a decode server",
        "",
        lambda server: _is_decode_server(server) and server.drafts_with_states,
        "disaggregation_mode",
        names_model=True,
    ),
    Rule(
        "dp_size",
        many,
        _NOT_ON_DECODE_SERVERS,
        "use --dp-size 1",
        lambda server: _is_decode_server(server) and not server.is_above_one("attn_dp_size"),
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

_LINEAR_STATES = _only(
    (
        Rule("enable_int8_mamba_checkpoint", _set, "the states that it gives to the tree are not tested with rounds"),
        Rule("enable_linear_replayssm", _set, "it counts a state's tokens by the row's length, which a round changes"),
    ),
    lambda server: server.traits.linear_states,
)

_NOT_TOGETHER = "its ranks take an update of the weights in different steps, and cannot measure together"
_MEASURING = _only(
    (
        Rule("pp_size", many, _NOT_TOGETHER, "use --triattention-stats-after-update keep"),
        Rule("attn_dp_size", many, _NOT_TOGETHER, "use --triattention-stats-after-update keep"),
    ),
    lambda server: server.config.stats_after_update == "measure",
    "triattention_stats_after_update",
)

_LEVEL = _only(
    (
        Rule(
            "enable_deterministic_inference",
            _set,
            "a first round that comes early makes what a request keeps depend on the requests that run with it",
            "use --triattention-rounds-per-step auto, which then leaves rounds where they are due",
        ),
    ),
    lambda server: server.config.rounds_per_step not in (AUTO, 0),
    "triattention_rounds_per_step",
)

_WITHOUT_CONVERSATIONS = "use --triattention-conversations off"
_AUTO_CONVERSATIONS = _only(
    (
        Rule("pp_size", many, "rows that stages find by tokens are not tested", _WITHOUT_CONVERSATIONS),
        Rule(
            "disaggregation_mode",
            lambda value: value == "decode",
            "another server sends it whole prompts, and not what follows a row",
            _WITHOUT_CONVERSATIONS,
        ),
    ),
    lambda server: server.config.conversations == "auto",
    "triattention_conversations",
)

CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
"""A draft that does not branch, by SGLang's settings."""

_USE_CHAIN = "use " + " ".join(f"{flag(field)} {number}" for field, number in CHAIN.items())


# The attention that SGLang lets branches have in pages too, and the CPU's.
_FOR_BRANCHES = ("flashinfer", "fa3", "triton", "torch_reference")


def _has_draft_model(server: Server) -> bool:
    return server.drafts in DRAFT_MODELS


def _drafts_fit_windows(server: Server) -> bool:
    """Whether rounds leave the draft model of a model with windows whole."""
    if server.drafts == "EAGLE3":
        # It has no window, and K/V for the slots of the other pool.
        return server.traits.window_pool
    return server.drafts_in_layers


_DRAFTS = (
    *_only(
        (
            Rule(
                "enable_deterministic_inference",
                _set,
                "the numbers that a seed draws follow from the row's length there, which a round changes",
            ),
        ),
        lambda server: server.drafts is not None,
        "speculative_algorithm",
    ),
    *_only(
        (
            Rule("speculative_draft_window_size", _set, "draft models with a window are not tested with rounds"),
            *(
                Rule(
                    f"{kind}attention_backend",
                    lambda value: value == "aiter",
                    "it takes the positions of drafted tokens for the lengths of rows, which rounds shorten",
                    "use triton",
                )
                for kind in ("", "decode_", "speculative_draft_")
            ),
        ),
        _has_draft_model,
        "speculative_algorithm",
    ),
    *_only(
        (
            Rule(
                "speculative_eagle_topk",
                many,
                "drafts that branch are not tested with a model that drafts by itself",
                _USE_CHAIN,
            ),
        ),
        lambda server: server.drafts == "STANDALONE",
        "speculative_algorithm",
    ),
    *(
        Rule(
            field,
            applies,
            f"drafts {which} are not tested {where}",
            remedy,
            lambda server, also=when: _has_draft_model(server) and also(server),
            other,
            names_model=not other,
        )
        for field, applies, which, remedy in (
            ("speculative_eagle_topk", many, "that branch", _USE_CHAIN),
            ("speculative_adaptive", _set, "whose length changes", ""),
        )
        for where, other, when in (
            ("on a decode server", "disaggregation_mode", _is_decode_server),
            (
                "with windows, latents, states or images",
                "",
                lambda server: (
                    server.traits.has_windows
                    or server.traits.latent
                    or server.traits.linear_states
                    or server.traits.images
                ),
            ),
        )
    ),
    *_only(
        (
            Rule("attn_dp_size", many, "drafts that branch are not tested in groups of ranks"),
            *(
                Rule(
                    f"{kind}attention_backend",
                    lambda value: value not in (None, *_FOR_BRANCHES),
                    "it is not known to read each branch of a draft by the lengths of rows",
                    f"use flashinfer, fa3 or triton, or {_USE_CHAIN}",
                )
                for kind in ("", "prefill_", "decode_", "speculative_draft_")
            ),
        ),
        lambda server: _has_draft_model(server) and server.is_above_one("speculative_eagle_topk"),
        "speculative_eagle_topk",
    ),
    *_only(
        (Rule("enable_multi_layer_eagle", _set, "draft models of several layers are not tested with rounds"),),
        lambda server: _has_draft_model(server) and not server.traits.layered_drafts,
        "speculative_algorithm",
    ),
    # Of drafts that read no hidden states, SGLang turns it off by itself.
    *_only(
        (
            Rule(
                "enable_mixed_chunk",
                _set,
                "what decodes in a step with a prefill takes its logical length for its row's there",
            ),
        ),
        lambda server: _has_draft_model(server) and server.drafts != "STANDALONE",
        "speculative_algorithm",
    ),
    *(
        Rule(
            f"{kind}attention_backend",
            lambda value: value == "flashinfer",
            "where tokens are drafted or verified, a sliding window shows a row's first tokens in place of the newest",
            "use triton",
            when,
            "speculative_algorithm",
            names_model=True,
        )
        for kinds, when in (
            (("", "prefill_", "decode_"), lambda server: server.drafts is not None and server.traits.has_windows),
            (("speculative_draft_",), lambda server: server.drafts_in_layers),
        )
        for kind in kinds
    ),
    *_only(
        (
            Rule("attn_dp_size", many, "its draft model is not tested in groups of ranks"),
            Rule(
                "disaggregation_mode", lambda mode: mode == "decode", "its draft model is not tested on such a server"
            ),
            Rule("enable_hierarchical_cache", _set, "copies of K/V of its draft model are not tested"),
        ),
        lambda server: (
            server.drafts_in_layers
            or (server.traits.images and _has_draft_model(server) and not server.drafts_with_states)
        ),
        "speculative_algorithm",
        names_model=True,
    ),
    *_only(
        (Rule("enable_hierarchical_cache", _set, "copies of states are not tested with drafted tokens"),),
        lambda server: server.drafts_with_states,
        "speculative_algorithm",
        names_model=True,
    ),
    Rule(
        "speculative_algorithm",
        _set,
        "queued steps move the states of its layers beyond the rows that wait for a next turn",
        _WITHOUT_CONVERSATIONS,
        lambda server: server.config.conversations == "auto" and server.drafts_with_states,
        "triattention_conversations",
        names_model=True,
    ),
    *(
        Rule("speculative_algorithm", _set, reason, f"{other}leave --speculative-algorithm out", when, names_model=True)
        for reason, other, when in (
            (
                "its layers with a sliding window are not tested with such a draft model",
                "use --speculative-algorithm NGRAM, or ",
                lambda server: (
                    server.traits.has_windows and _has_draft_model(server) and not _drafts_fit_windows(server)
                ),
            ),
            (
                "its layers that keep a state instead of KV are not tested with such drafts",
                "",
                lambda server: server.drafts_with_states and server.drafts not in server.traits.state_drafts,
            ),
            (
                "such a draft model is not tested with images",
                "use --speculative-algorithm NGRAM, or ",
                lambda server: (
                    server.traits.images
                    and _has_draft_model(server)
                    and server.drafts not in server.traits.image_drafts
                ),
            ),
            (
                "drafted tokens are not tested with a model of which compression covers text alone",
                "",
                lambda server: server.traits.images and server.drafts == "NGRAM" and not server.traits.image_prompts,
            ),
            (
                "drafted tokens may lie beyond the context in which LongRoPE keeps its frequencies",
                "",
                lambda server: server.traits.rope_limit is not None,
            ),
        )
    ),
)

FIRST_RULES = _ALWAYS
"""Those for every model and server, which need no traits."""
RULES = (
    *(*_STAGES, *_DECODE_SERVERS, *_LINEAR_STATES),
    *(*_MEASURING, *_LEVEL, *_AUTO_CONVERSATIONS, *_DRAFTS),
)
"""Those for some, in the order in which they are applied."""

_NOT_REFUSED = ("context_length", "disable_overlap_schedule", "enable_multimodal", "max_total_tokens", "page_size")
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


def check_draft_numbers(algorithm: object, given: Mapping[str, Any]) -> None:
    """Raises TriAttentionError for numbers of a draft model's drafts that lack one which SGLang then demands.

    Args:
        given: settings that the user gave, by field; others are absent or None.
    """
    numbers = {field: given[field] for field in CHAIN if given.get(field) is not None}
    missing = [field for field in ("speculative_num_steps", "speculative_eagle_topk") if field not in numbers]
    if str(algorithm).upper() not in DRAFT_MODELS or not numbers or not missing:
        return
    name, lacking = flag(next(iter(numbers))), flag(missing[0])
    raise TriAttentionError(
        f"{name} {next(iter(numbers.values()))} does not work without {lacking}, because SGLang takes the numbers of a "
        f"draft together: {_USE_CHAIN}."
    )
