"""Which models are refused, and why: one table."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_triattn.errors import TriAttentionError

UNCOVERED = {
    "family": "{}",
    "does_not_generate": "it does not generate text",
    "encoder_decoder": "it is an encoder-decoder model",
    "other_media": "it takes images or sound, and is none of the models whose images are covered",
    "indexed": "its layers attend to the tokens that an indexer selects (DeepSeek sparse attention)",
    "linear_states": "it is a state-space model, or has state-space or linear-attention layers",
    "latent": "it has multi-head latent attention (MLA), and is none of the models for which that is covered",
    "unknown_layers": "some of its layers are of the type {}",
    "window_pool": "some of its layers attend to a sliding window, and have a KV pool of their own",
    "windows_alone": "it attends to a sliding window of {} tokens",
    "no_full_attention": "none of its layers attends to all tokens",
    "chunks": "its attention is local to chunks",
    "blocks": "its layers attend to selected blocks of tokens",
    "unequal_layers": "its layers differ from one another",
    "shared_kv": "its layers share KV with one another",
    "bidirectional": "its tokens attend to later ones",
    "scaled_by_length": "it scales its attention by length",
    "row_length": "its embeddings look up the tokens before by the length of the row, which a round changes",
    "widths": "its keys and values have different widths",
    "alibi": "it has ALiBi in place of rotation",
    "no_rope": "its attention has no rotary embedding",
    "unequal_rope": "its layers rotate in different ways",
    "axes": "its rotary embedding has several position axes",
    "rope_kind": "its rotary embedding is of the kind {}, which cannot be scored yet",
    "unknown": "SGLang's code of its architecture is not known here",
}
"""Why a model is not compressed, by the names of `Traits.uncovered`, to complete "because ..."."""

LONG_ROPE = "SGLang turns all requests of a batch by other frequencies (LongRoPE) while one of them is longer"


def why_uncovered(uncovered: Mapping[str, str]) -> str | None:
    """The first of the reasons, to complete "because ..."; None if there is none."""
    return next((UNCOVERED[mark].format(detail) for mark, detail in uncovered.items()), None)


def refused_model(name: str, reason: str) -> TriAttentionError:
    return TriAttentionError(
        f"The model {name} does not work with --enable-triattention, because {reason}: serve a decoder-only model with "
        "ordinary multi-head or grouped-query attention, or start without --enable-triattention."
    )
