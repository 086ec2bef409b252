"""Settings and a model in, the rules of rounds out, or a refusal: the one judgement of a launch and of `check`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_triattn.compatibility.draft_rules import CHAIN
from sglang_triattn.compatibility.rule import ASSISTANT, BLOCKS, Server
from sglang_triattn.compatibility.rules import FIRST_RULES, RULES, refusals
from sglang_triattn.compatibility.served_code import SERVED_CODE
from sglang_triattn.compatibility.traits import Traits
from sglang_triattn.compatibility.uncovered import LONG_ROPE, refused_model, why_uncovered
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.fields import architecture, text_fields
from sglang_triattn.model.sizes import load_config
from sglang_triattn.rounds.plan import check_reach
from sglang_triattn.rounds.rules import RoundRules, complete

# SGLang's `speculative_eagle_topk` by default for models whose drafts branch.
_BRANCHES = 4


def resolve(config: Config, settings: Mapping[str, Any], traits: Traits, *, weighed: bool = False) -> RoundRules:
    """The rules of rounds for a model on a server.

    Args:
        config: what the user set.
        settings: SGLang's settings by field: of a command line, those that were given; of a launch, those of
            `rules.SETTING_FIELDS`.
        weighed: whether the statistics hold look-up weights.

    Raises:
        TriAttentionError: the model, or a setting with such a model, does not work with compression.
    """
    server = Server(config, settings, traits)
    for error in refusals(FIRST_RULES, server):
        raise error
    reason = why_uncovered(traits.uncovered)
    if reason is not None:
        raise refused_model(traits.name, reason)
    _check_heads(traits, settings.get("tp_size", 1) // settings.get("attn_dp_size", 1))
    for error in refusals((*RULES, *SERVED_CODE), server):
        raise error
    rules = complete(
        config,
        window=traits.window,
        latent=traits.latent,
        images=traits.image_prompts,
        page_size=settings.get("page_size", 1),
        whole_pages=server.drafts is not None and not settings.get("disable_overlap_schedule"),
        level=not settings.get("enable_deterministic_inference"),
        # A state that a queued step has moved on cannot be cut to its row.
        keeps_rows=not server.drafts_with_states,
        weighed=weighed,
    )
    context = settings.get("context_length") or traits.context
    _check_rope(traits, context)
    for most, what in ((context, "the context limit is"), (settings.get("max_total_tokens"), "the KV pool holds")):
        if most is not None:
            check_reach(rules, most, what)
    return rules


def with_draft_defaults(settings: Mapping[str, Any], traits: Traits) -> dict[str, Any]:
    """Settings of a command line with what SGLang would choose for drafts by itself, as far as it matters."""
    algorithm = settings.get("speculative_algorithm")
    if traits.assistants and str(algorithm).upper() in ("EAGLE", "NEXTN") and _names_assistant(settings):
        return {**settings, "speculative_algorithm": ASSISTANT}
    if str(algorithm).upper() == BLOCKS:
        # SGLang overrules any other number.
        return {**settings, "speculative_eagle_topk": 1}
    if algorithm is None or any(field in settings for field in CHAIN):
        return dict(settings)
    branches = traits.branching_drafts and str(algorithm).upper() != "STANDALONE"
    return {**settings, "speculative_eagle_topk": _BRANCHES if branches else 1}


def _names_assistant(settings: Mapping[str, Any]) -> bool:
    """Whether the draft model of a model with assistants is one of them, as far as its file, if it can be read here,
    shows."""
    path = settings.get("speculative_draft_model_path")
    # A flag without its value is True.
    if not path or not isinstance(path, str):
        return False
    try:
        return "Assistant" in architecture(text_fields(load_config(path)))
    except TriAttentionError:
        return True


def _check_rope(traits: Traits, context: int | None) -> None:
    """Raises TriAttentionError if RoPE may take other frequencies within the context."""
    if traits.changes_frequencies(context):
        raise TriAttentionError(
            f"{traits.name} does not work with --enable-triattention in a context of more than {traits.rope_limit:,} "
            f"tokens, because {LONG_ROPE}: use --context-length {traits.rope_limit}, or start without "
            "--enable-triattention."
        )


def _check_heads(traits: Traits, ranks: int) -> None:
    """Raises TriAttentionError unless the heads split evenly over the ranks that share a batch."""
    if traits.heads is None:
        return
    q_heads, kv_heads = traits.heads
    if q_heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise TriAttentionError(
            f"The {q_heads} query heads and {kv_heads} KV heads of {traits.name} do not split evenly over --tp-size "
            f"{ranks}: use a number that divides them."
        )
