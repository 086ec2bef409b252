"""What each layer of a model keeps per token and how RoPE turns it, read from config.json alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sglang_triattn.errors import TriAttentionError, quoted
from sglang_triattn.model.families import family_in
from sglang_triattn.model.fields import Fields, count, text_fields
from sglang_triattn.model.kinds import (
    FULL,
    KINDS,
    LATENT,
    LINEAR,
    NONE,
    WINDOW,
    attentions_per_layer,
    block_attention,
    count_layers,
    has_window_pool,
    layer_kinds,
    rotated_layers,
    window_of,
)

_HEADS = ("num_attention_heads", "n_head", "n_heads")


@dataclass(frozen=True)
class Layer:
    """One layer; heads are those of all tensor-parallel ranks.

    Attributes:
        kind: one of KINDS.
        rotary_dim: dims of a query and key that RoPE turns; 0 if it turns none.
        kv_heads: heads that the KV cache holds of each token; 0 if the layer has none. Latent KV is one head, of which
            every rank holds a copy.
        head_dim: dims of a key; of latent KV, the latent, which is key and value at once, and the rotated key.
        window: most tokens that a query sees, its own included; 0 unless the kind is "window".
        sinks: the softmax has one more, learned, logit per head.
        reads_other: it reads the KV of a layer before it. SGLang's pool has room for it all the same.
    """

    kind: str
    rotary_dim: int = 0
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    window: int = 0
    sinks: bool = False
    reads_other: bool = False

    def elements(self, ranks: int = 1) -> int:
        """Numbers that one of `ranks` GPUs caches per token; with more ranks than heads, each holds one head."""
        heads = max(self.kv_heads // ranks, 1) if self.kv_heads else 0
        return heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True)
class AttentionLayout:
    """The layers of a model, and where SGLang keeps their KV.

    Attributes:
        window_pool: window layers have a KV pool of their own, in which a request holds little more than its window.
        style: how RoPE pairs the dims of a head, "half" or "interleaved".
        state_in_every_layer: every layer has a state of fixed size and attention (Falcon-H1).
    """

    layers: tuple[Layer, ...]
    window_pool: bool
    style: str
    state_in_every_layer: bool

    @property
    def scored(self) -> tuple[int, ...]:
        """Numbers of the layers whose keys are scored: those that attend to all tokens, and have keys of their own."""
        full = (FULL, LATENT)
        return tuple(number for number, layer in enumerate(self.layers) if layer.kind in full and not layer.reads_other)

    @property
    def latent(self) -> bool:
        """Whether the scored layers have latent KV."""
        return any(layer.kind == LATENT for layer in self.layers)

    @property
    def linear_states(self) -> bool:
        """Whether some layers keep a state, instead of KV or in addition to it."""
        return self.state_in_every_layer or any(layer.kind == LINEAR for layer in self.layers)

    @property
    def kinds(self) -> dict[str, int]:
        """How many layers there are of each kind."""
        found = Counter(layer.kind for layer in self.layers)
        return {kind: found[kind] for kind in KINDS if found[kind]}

    @property
    def window(self) -> int:
        """Most tokens that a query of a window layer sees; 0 without such layers."""
        return max(layer.window for layer in self.layers)

    def elements(self, ranks: int = 1, *, windows: bool = False) -> int:
        """Numbers that a token takes on one GPU, in the pool of window layers or in that of all others."""
        return sum(
            layer.elements(ranks) for layer in self.layers if (layer.kind == WINDOW and self.window_pool) is windows
        )


def read_layout(config: Fields) -> AttentionLayout:
    """The layout in the content of a config.json.

    Raises:
        TriAttentionError: a size is missing or contradicts another.
    """
    fields = text_fields(config)
    kinds = layer_kinds(fields)
    family = family_in(fields)
    layers = count_layers(fields) * attentions_per_layer(fields)
    # Step-3.5 also lists the layers that only draft tokens.
    if len(kinds) < layers:
        raise TriAttentionError(
            f"The config.json lists the kinds of {len(kinds)} layers, but has {layers}: give the unchanged file of a "
            "Hugging Face model."
        )
    kinds = kinds[:layers]
    rotates = rotated_layers(fields, kinds)
    found = tuple(_layer(fields, number, kinds, rotates[number]) for number in range(layers))
    return AttentionLayout(
        layers=found,
        window_pool=WINDOW in kinds and has_window_pool(fields),
        style="interleaved" if _interleaved(fields) else "half",
        state_in_every_layer=family.state_in_every_layer,
    )


def _rotary_dim(fields: Fields, head_dim: int, number: int, kind: str) -> int:
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    own = rope.get("sliding_attention" if kind == WINDOW else "full_attention")
    rope = own if isinstance(own, dict) else rope
    shares = fields.get("partial_rotary_factors") or ()
    if number < len(shares):
        share = shares[number]
    elif fields.get("rotary_dim") is not None:
        return min(fields["rotary_dim"], head_dim)
    else:
        given = (rope.get("partial_rotary_factor"), fields.get("partial_rotary_factor"), fields.get("rotary_pct"))
        share = next((share for share in given if share is not None), family_in(fields).rotary_share)
    if not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise TriAttentionError(
            f"The config.json says that RoPE turns {quoted(share)} of each head, but a number from 0 to 1 was "
            "expected: give the unchanged file of a Hugging Face model."
        )
    return int(head_dim * share)


def _interleaved(fields: Fields) -> bool:
    if fields.get("kv_lora_rank"):
        return bool(fields.get("rope_interleave", not family_in(fields).latent_halves))
    style = fields.get("rope_is_neox_style")
    return family_in(fields).interleaved if style is None else not style


def _layer(fields: Fields, number: int, kinds: list[str], rotates: bool) -> Layer:
    kind, family = kinds[number], family_in(fields)
    if kind == NONE and fields.get("block_configs"):
        # SGLang's pool has as much room for these layers as for the others.
        attending = kinds.index(FULL) if FULL in kinds else number
        return Layer(kind, 0, 0, kv_heads(fields, attending), head_dim(fields), head_dim(fields))
    if kind in (LINEAR, NONE):
        return Layer(kind)
    q_heads = count(fields, *_HEADS)
    if kind == LATENT:
        rotated = count(fields, "qk_rope_head_dim")
        width = count(fields, "kv_lora_rank") + rotated
        return Layer(kind, rotated if rotates else 0, q_heads, 1, width)
    listed = fields.get(family.heads_by_layer) or ()
    if number < len(listed):
        q_heads = listed[number]
    heads = {"q_heads": q_heads, "kv_heads": kv_heads(fields, number), "head_dim": head_dim(fields)}
    heads["v_head_dim"] = fields.get("v_head_dim") or heads["head_dim"]
    heads = _sizes_by_kind(fields, kind, heads)
    own = (fields.get("per_layer_config") or {}).get(str(number))
    if isinstance(own, dict):
        # What transformers writes in place of the fields for layers with full attention.
        heads["kv_heads"] = _own(own, "num_key_value_heads") or heads["kv_heads"]
        heads["head_dim"] = heads["v_head_dim"] = _own(own, "head_dim") or heads["head_dim"]
    shared = fields.get("num_kv_shared_layers") or 0
    return Layer(
        kind,
        rotary_dim=_rotary_dim(fields, heads["head_dim"], number, kind) if rotates else 0,
        window=window_of(fields) if kind == WINDOW else 0,
        sinks=family.sinks or bool(kind == WINDOW and fields.get("add_swa_attention_sink_bias")),
        reads_other=bool(shared) and number >= count_layers(fields) - shared,
        **heads,
    )


def head_dim(fields: Fields) -> int:
    """Width of a query and key."""
    if fields.get("head_dim") is not None:
        return count(fields, "head_dim")
    width = count(fields, "hidden_size", "n_embd", "d_model") // count(fields, *_HEADS)
    return count({**fields, "head_dim": width}, "head_dim")


def kv_heads(fields: Fields, number: int = 0) -> int:
    """KV heads of a layer."""
    q_heads = count(fields, *_HEADS)
    blocks = fields.get("block_configs") or ()
    group = block_attention(blocks[number]).get("n_heads_in_group") if number < len(blocks) else None
    if group is not None:
        return q_heads // count({"n_heads_in_group": group}, "n_heads_in_group")
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    given = ("num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
    nested = _own(fields, "attn_config.kv_n_heads")
    if nested is not None:
        return nested
    return count(fields, *given) if any(fields.get(field) is not None for field in given) else q_heads


def _sizes_by_kind(fields: Fields, kind: str, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of a layer of this kind; `sizes` are those that the file has for every layer."""
    family = family_in(fields)
    others = {FULL: family.full_heads, WINDOW: family.window_heads}.get(kind, {})
    return {**sizes, **{size: found for size, path in others.items() if (found := _own(fields, path)) is not None}}


def _own(fields: Fields, path: str) -> int | None:
    *objects, name = path.split(".")
    for each in objects:
        fields = fields.get(each) or {}
    return None if fields.get(name) is None else count(fields, name)
