"""What of a model decides whether compression works with it, read from its config.json before any weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.families import Family, family_in, is_unknown
from sglang_triattn.model.fields import Fields, architecture, count, text_fields
from sglang_triattn.model.kinds import (
    CHUNK,
    FULL,
    KINDS,
    LINEAR,
    WINDOW,
    block_attention,
    has_window_pool,
    layer_kinds,
)
from sglang_triattn.model.layout import AttentionLayout
from sglang_triattn.model.sizes import CONTEXT_FIELDS, context_limit

_STATE_SPACE = (
    *("ssm_", "mamba_", "linear_num_", "linear_attn", "lru_width", "conv_L_cache"),
    *("hybrid_override_pattern", "layers_block_type", "mamba2_"),
)
_LONG_ROPE = "longrope"
# SGLang stretches "dynamic" once, when the model is loaded, by the longest context.
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "mrope", "dynamic", _LONG_ROPE)
_MEDIA = ("vision_config", "audio_config", "sound_config", "thinker_config")
# Value of a mark that says all by its name.
PLAIN = ""


@dataclass(frozen=True)
class Traits:
    """One model.

    Attributes:
        name: for messages: what the user called it, and its architectures.
        uncovered: reasons of `rules.UNCOVERED` that hold, each with the detail that its sentence shows.
        window: most tokens that a query of a window layer sees; 0 without such layers.
        window_pool: window layers have a KV pool of their own.
        latent: the layers that attend to all tokens have latent KV (MLA).
        linear_states: some layers keep a state instead of KV, or with it.
        state_drafts: see `Family.state_drafts`.
        layered_drafts: see `Family.layered_drafts`.
        assistants: see `Family.assistants`.
        images: it takes images, or its rotary embedding has the several axes of a model that does.
        image_prompts: requests with images may be compressed.
        image_drafts: see `Family.image_drafts`.
        context: most tokens of a request; None if the file does not say.
        rope_limit: longest context in which RoPE turns tokens by the same frequencies all the time; None for any.
        branching_drafts: SGLang's default drafts for it branch.
        heads: query and KV heads of a scored layer; None where SGLang has checked them.
        architecture: the first that the file names; empty if unknown.
    """

    name: str
    uncovered: Mapping[str, str] = field(default_factory=dict)
    window: int = 0
    window_pool: bool = False
    latent: bool = False
    linear_states: bool = False
    state_drafts: tuple[str, ...] = ()
    layered_drafts: bool = False
    assistants: bool = False
    images: bool = False
    image_prompts: bool = True
    image_drafts: tuple[str, ...] = ()
    context: int | None = None
    rope_limit: int | None = None
    branching_drafts: bool = False
    heads: tuple[int, int] | None = None
    architecture: str = ""

    @property
    def has_windows(self) -> bool:
        """Whether some layers attend to a sliding window."""
        return bool(self.window or self.window_pool)

    def changes_frequencies(self, context: int | None) -> bool:
        """Whether RoPE may turn tokens by other frequencies in a context of so many tokens, or of unknown length."""
        return self.rope_limit is not None and (context is None or context > self.rope_limit)


def traits_of_file(config: Fields, name: str, layout: AttentionLayout, *, multimodal: bool) -> Traits:
    """The traits in the content of a config.json.

    Args:
        name: of the model.
        layout: of the same file.
        multimodal: whether `--enable-multimodal` is given.

    Raises:
        TriAttentionError: a field has a type that it cannot have.
    """
    fields = text_fields(config)
    family = family_in(fields)
    first = layout.layers[layout.scored[0]] if layout.scored else None
    known = any(fields.get(name) is not None for name in CONTEXT_FIELDS)
    media = any(fields.get(each) for each in _MEDIA) and (multimodal or not family.images_on_request)
    return Traits(
        name=name,
        architecture=architecture(fields),
        uncovered=uncovered_in_file(config) or ({} if first else {"no_full_attention": PLAIN}),
        window=layout.window,
        window_pool=layout.window_pool,
        latent=layout.latent,
        linear_states=layout.linear_states,
        state_drafts=family.state_drafts,
        layered_drafts=family.layered_drafts,
        assistants=family.assistants,
        images=media or _has_axes(_scored_rope(fields)),
        image_prompts=family.images != "text",
        image_drafts=family.image_drafts,
        context=context_limit(fields) if known else None,
        rope_limit=rope_limit(fields),
        branching_drafts=family.branching_drafts,
        heads=(first.q_heads, first.kv_heads) if first else None,
    )


def rope_limit(fields: Fields) -> int | None:
    """Longest context, in tokens, in which RoPE turns the scored layers by the same frequencies all the time.

    With LongRoPE, SGLang takes other ones for a whole batch as soon as a token of it is farther than the context that
    the model was first trained for: `Phi3LongRoPEScaledRotaryEmbedding` in sglang/srt/layers/rotary_embedding.

    Args:
        fields: from `text_fields`.

    Returns:
        None if there is no such limit.
    """
    rope = _scored_rope(fields)
    if _kind_of(rope) != _LONG_ROPE:
        return None
    name = "original_max_position_embeddings"
    return count({**rope, **fields} if fields.get(name) else {**fields, **rope}, name, "max_position_embeddings")


def uncovered_in_file(config: Fields) -> dict[str, str]:
    """The reasons in a config.json why compression does not cover a model, as `Traits.uncovered`.

    Args:
        config: content of the file; fields in `text_config` take precedence over those outside it.

    Raises:
        TriAttentionError: a field has a type that it cannot have.
    """
    fields = text_fields(config)
    family = family_in(fields)
    try:
        kinds = layer_kinds(fields)
    except TriAttentionError:
        kinds = []
    by_attention, by_position = _by_attention(fields, family, kinds), _by_position(fields, family, kinds)
    # Last, because any other reason says more.
    unknown = [("unknown", PLAIN)] if is_unknown(fields["architectures"]) else []
    return dict([*_by_family(fields, family), *by_attention, *by_position, *unknown])


def _by_family(fields: Fields, family: Family) -> Iterator[tuple[str, str]]:
    if family.refused is not None and family.refused.when(fields):
        yield "family", family.refused.reason


def _by_attention(fields: Fields, family: Family, kinds: list[str]) -> Iterator[tuple[str, str]]:
    others = [kind for kind in kinds if kind not in KINDS]
    windows = WINDOW in kinds or fields.get("sliding_window")
    widths = fields.get("v_head_dim") not in (None, 0, fields.get("head_dim")) and not fields.get("kv_lora_rank")
    marks = {
        "encoder_decoder": fields.get("is_encoder_decoder"),
        "other_media": any(fields.get(each) for each in _MEDIA) and family.images is None,
        "indexed": fields.get("index_topk"),
        "linear_states": _has_linear_states(fields, kinds) and not family.linear_states,
        "latent": fields.get("kv_lora_rank") and not family.latent,
        "unknown_layers": others,
        # SGLang takes the pool for the architecture, even if the file gives the window to no layer.
        "window_pool": windows and has_window_pool(fields) and not family.pool_covered,
        "windows_alone": WINDOW in kinds and FULL not in kinds,
        "chunks": CHUNK in kinds or fields.get("attention_chunk_size") or fields.get("dual_chunk_attention_config"),
        "blocks": fields.get("sparse_config") and "minicpm4" in (fields.get("mixer_types") or ()),
        "unequal_layers": len(_group_sizes(fields, family, kinds)) > 1,
        "shared_kv": fields.get("use_cla") or (fields.get("num_kv_shared_layers") and not family.shares_kv),
        "bidirectional": fields.get("use_bidirectional_attention") == "all",
        "scaled_by_length": (fields.get("attn_temperature_len") or 0) > 0 or fields.get("attn_temperature_tuning"),
        "row_length": fields.get("use_ngram_embedding") or fields.get("ngram_vocab_size_ratio"),
        "widths": widths and not family.asymmetric,
    }
    details = {"unknown_layers": min(others, default=""), "windows_alone": str(fields.get("sliding_window"))}
    return ((mark, details.get(mark, PLAIN)) for mark, holds in marks.items() if holds)


def _by_position(fields: Fields, family: Family, kinds: list[str]) -> Iterator[tuple[str, str]]:
    embedding = fields.get("position_embedding_type")
    rope = _scored_rope(fields)
    kind = _kind_of(rope)
    known = _ROPE_KINDS + (("proportional",) if family.proportional_rope else ())
    learned = embedding in ("absolute", "learned_absolute") and not family.learned_positions
    missing = learned or fields.get("attn_use_rope") is False
    marks = {
        "alibi": fields.get("alibi") or fields.get("use_alibi") or embedding == "alibi",
        "no_rope": missing or (embedding in ("nope", "none") and not family.may_lack_rope),
        "unequal_rope": _rotates_unequally(fields, rope, kinds),
        "axes": _has_axes(rope) and family.images is None,
        "rope_kind": kind not in known or rope.get("use_fope"),
    }
    detail = "fope" if rope.get("use_fope") else kind
    return ((mark, detail if mark == "rope_kind" else PLAIN) for mark, holds in marks.items() if holds)


def _has_linear_states(fields: Fields, kinds: list[str]) -> bool:
    named = any(key.startswith(_STATE_SPACE) and value for key, value in fields.items())
    named &= not fields.get("layer_types") or bool(set(kinds) > {FULL})
    return named or LINEAR in kinds or any(word in str(fields.get("model_type")) for word in ("mamba", "rwkv"))


def _group_sizes(fields: Fields, family: Family, kinds: list[str]) -> set[str]:
    """Different numbers of query heads, or of those per KV head, of layers that the file describes one by one."""
    blocks: Iterable[Fields] = fields.get("block_configs") or ()
    attending = (block for block, kind in zip(blocks, kinds, strict=False) if kind == FULL)
    listed = zip(fields.get(family.heads_by_layer) or (), kinds, strict=False)
    return {
        *(str(block_attention(block).get("n_heads_in_group")) for block in attending),
        *(str(heads) for heads, kind in listed if kind == FULL),
    }


def _scored_rope(fields: Fields) -> dict[str, Any]:
    """What the file says of the rotation of layers with full attention: only these are scored."""
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    own = rope.get("full_attention")
    return dict(own) if isinstance(own, Mapping) else rope


def _kind_of(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _has_axes(rope: Mapping[str, Any]) -> bool:
    return "mrope_section" in rope or _kind_of(rope) == "mrope"


def _rotates_unequally(fields: Fields, rope: Mapping[str, Any], kinds: list[str]) -> bool:
    unlike = any(isinstance(value, Mapping) for value in rope.values())
    for name in ("rope_theta", "layer_rope_theta", "partial_rotary_factors"):
        values = fields.get(name)
        if isinstance(values, list):
            # A base of 0 stands for a layer without RoPE.
            unlike |= len({value for value, kind in zip(values, kinds, strict=False) if kind == FULL and value}) > 1
    return unlike
