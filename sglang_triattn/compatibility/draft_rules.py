"""What is refused where tokens are drafted: a table of SGLang's settings, and how its numbers go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_triattn.compatibility.rule import (
    ASSISTANT,
    BLOCKS,
    DRAFT_MODELS,
    WITHOUT_CONVERSATIONS,
    Rule,
    Server,
    flag,
    is_set,
    many,
    only,
)
from sglang_triattn.errors import TriAttentionError

CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
"""A draft that does not branch, by SGLang's settings."""

_USE_CHAIN = "use " + " ".join(f"{flag(field)} {number}" for field, number in CHAIN.items())
# The attention that SGLang lets branches have in pages too, and the CPU's.
_FOR_BRANCHES = ("flashinfer", "fa3", "triton", "torch_reference")
# The served model's attention, by the beginnings of SGLang's fields.
_TARGETS = ("", "prefill_", "decode_")
_NO_WINDOW_POOL = "SGLang then keeps no pool of window layers, which rounds would leave whole for its draft layers"


def _drafts_fit_windows(server: Server) -> bool:
    """Whether rounds leave the draft model of a model with windows whole."""
    if server.drafts in ("EAGLE3", BLOCKS):
        # Its K/V lie in a plain pool, in slots of the numbers of the other pool.
        return server.traits.window_pool
    if server.drafts == ASSISTANT:
        # Its layers with a window read the served model's.
        return server.traits.assistants and server.traits.window_pool
    return server.drafts_in_layers


def _drafts_untested_in_groups(server: Server) -> bool:
    """Whether a draft model other than the layer of a model with states may read images, or reads the model's KV."""
    after_images = server.traits.images and server.has_draft_model and not server.drafts_with_states
    return server.drafts != BLOCKS and (after_images or server.drafts == ASSISTANT)


def _drafts_in_a_window(server: Server) -> bool:
    """Whether the layers of the draft model see a window that SGLang's settings give them."""
    return server.drafts == "EAGLE3" and is_set(server.settings.get("speculative_draft_window_size"))


def _is_step_3_5(server: Server) -> bool:
    """Whether Step-3.5's own layers draft."""
    return server.drafts_in_layers and server.traits.architecture == "Step3p5ForCausalLM"


DRAFT_RULES = (
    *only(
        (
            Rule(
                "enable_deterministic_inference",
                is_set,
                "the numbers that a seed draws follow from the row's length there, which a round changes",
            ),
        ),
        lambda server: server.drafts is not None,
        "speculative_algorithm",
    ),
    *only(
        (
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
        lambda server: server.has_draft_model,
        "speculative_algorithm",
    ),
    *only(
        (
            Rule(
                "speculative_eagle_topk",
                many,
                "drafts that branch are not tested with a layer for each drafted token",
                _USE_CHAIN,
            ),
        ),
        lambda server: server.drafts_in_layers,
        "speculative_algorithm",
        names_model=True,
    ),
    *only(
        (
            Rule(
                "speculative_eagle_topk",
                many,
                "SGLang gives branches of such a draft model the row's length for a position, which a round changes",
                _USE_CHAIN,
            ),
            Rule(
                "disable_overlap_schedule",
                is_set,
                "SGLang's worker for such a draft model ends at the first request without overlap scheduling",
            ),
        ),
        lambda server: server.drafts == ASSISTANT,
        "speculative_algorithm",
        names_model=True,
    ),
    *only(
        (Rule("attn_dp_size", many, "SGLang drafts so there on GPUs alone, on which it is not tested with rounds"),),
        lambda server: server.drafts == BLOCKS,
        "speculative_algorithm",
    ),
    *only(
        tuple(
            Rule(
                f"{kind}attention_backend",
                lambda value: value not in (None, *_FOR_BRANCHES),
                "it is not known to read each branch of a draft by the lengths of rows",
                f"use flashinfer, fa3 or triton, or {_USE_CHAIN}",
            )
            for kind in ("", "prefill_", "decode_", "speculative_draft_")
        ),
        lambda server: server.has_draft_model and server.is_above_one("speculative_eagle_topk"),
        "speculative_eagle_topk",
    ),
    *only(
        (Rule("enable_multi_layer_eagle", is_set, "draft models of several layers are not tested with rounds"),),
        lambda server: server.has_draft_model and not server.traits.layered_drafts,
        "speculative_algorithm",
    ),
    # Of drafts without K/V that follow hidden states, SGLang turns it off by itself.
    *only(
        (
            Rule(
                "enable_mixed_chunk",
                is_set,
                "what decodes in a step with a prefill takes its logical length for its row's there",
            ),
        ),
        lambda server: server.has_draft_model and server.drafts not in ("STANDALONE", ASSISTANT),
        "speculative_algorithm",
    ),
    *(
        Rule(
            f"{kind}attention_backend",
            lambda value: value == "flashinfer",
            "where tokens are drafted or verified, a sliding window shows a row's first tokens in place of the newest",
            "use triton",
            when,
            other,
            names_model=other == "speculative_algorithm",
        )
        for kinds, other, when in (
            (_TARGETS, "speculative_algorithm", lambda server: server.drafts is not None and server.traits.has_windows),
            (("speculative_draft_",), "speculative_algorithm", lambda server: server.drafts_in_layers),
            ((*_TARGETS, "speculative_draft_"), "speculative_draft_window_size", _drafts_in_a_window),
        )
        for kind in kinds
    ),
    *(
        Rule(field, applies, reason, when=when, other="speculative_algorithm", names_model=True)
        for field, applies, reason, when in (
            ("attn_dp_size", many, "its draft model is not tested in groups of ranks", _drafts_untested_in_groups),
            ("attn_dp_size", many, "its draft layers add up over all ranks, whose batches differ there", _is_step_3_5),
            (
                "disable_hybrid_swa_memory",
                is_set,
                _NO_WINDOW_POOL,
                lambda server: server.drafts_in_layers or server.drafts == ASSISTANT,
            ),
            # SGLang turns that on by itself for this model.
            ("enable_hierarchical_cache", is_set, _NO_WINDOW_POOL, _is_step_3_5),
        )
    ),
    Rule(
        "speculative_algorithm",
        is_set,
        "queued steps move the states of its layers beyond the rows that wait for a next turn",
        WITHOUT_CONVERSATIONS,
        lambda server: server.config.conversations == "auto" and server.drafts_with_states,
        "triattention_conversations",
        names_model=True,
    ),
    *(
        Rule(
            "speculative_algorithm", is_set, reason, f"{other}leave --speculative-algorithm out", when, names_model=True
        )
        for reason, other, when in (
            (
                "its layers with a sliding window are not tested with a draft model that is none of its assistants",
                "use one of these as --speculative-draft-model-path, or ",
                lambda server: server.traits.assistants and server.drafts in ("EAGLE", "NEXTN"),
            ),
            (
                "its layers with a sliding window are not tested with such a draft model",
                "use --speculative-algorithm NGRAM, or ",
                lambda server: server.traits.has_windows and server.has_draft_model and not _drafts_fit_windows(server),
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
                    server.traits.images and server.has_draft_model and server.drafts not in server.traits.image_drafts
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


def check_draft_numbers(algorithm: object, given: Mapping[str, Any]) -> None:
    """Raises TriAttentionError for numbers of a draft model's drafts that lack one which SGLang then demands.

    Args:
        given: settings that the user gave, by field; others are absent or None.
    """
    numbers = {field: given[field] for field in CHAIN if given.get(field) is not None}
    missing = [field for field in ("speculative_num_steps", "speculative_eagle_topk") if field not in numbers]
    # Of a block, SGLang takes its length alone.
    if str(algorithm).upper() not in DRAFT_MODELS or str(algorithm).upper() == BLOCKS or not numbers or not missing:
        return
    name, lacking = flag(next(iter(numbers))), flag(missing[0])
    raise TriAttentionError(
        f"{name} {next(iter(numbers.values()))} does not work without {lacking}, because SGLang takes the numbers of a "
        f"draft together: {_USE_CHAIN}."
    )
