"""The answer of `check`: whether a model is compressed with the flags of a server, and how, from config.json alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_triattn.compatibility.draft_rules import check_draft_numbers
from sglang_triattn.compatibility.resolve import resolve, with_draft_defaults
from sglang_triattn.compatibility.traits import Traits, traits_of_file, uncovered_in_file
from sglang_triattn.compatibility.uncovered import why_uncovered
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.select import SELECTIONS, selection_named
from sglang_triattn.model.fields import Fields, architecture, text_fields
from sglang_triattn.model.kinds import CHUNK, FULL, LATENT, LINEAR, NONE, WINDOW
from sglang_triattn.model.layout import AttentionLayout, read_layout
from sglang_triattn.model.sizes import element_bytes, kv_dtype_of
from sglang_triattn.rounds.rules import RoundRules, complete


@dataclass(frozen=True)
class Verdict:
    """The answer for one model and server.

    Attributes:
        layout: None if the file does not say enough about a model that is refused anyway.
        rules: as a server would complete its settings for the model; by themselves if it is refused.
        kv_dtype: of the KV cache.
        refusal: one sentence; None if the model is compressed.
        reason: why the model itself is refused, to complete "because ..."; None if it is not.
    """

    name: str
    layout: AttentionLayout | None
    rules: RoundRules
    page_size: int
    ranks: int
    kv_dtype: str
    refusal: str | None
    reason: str | None

    @property
    def held_bytes(self) -> int:
        """KV bytes of one token on one GPU, which an eviction gives back; not those in a pool of window layers."""
        return 0 if self.layout is None else self.layout.elements(self.ranks) * element_bytes(self.kv_dtype)

    @property
    def window_bytes(self) -> int:
        """KV bytes of one token in the pool of window layers on one GPU; SGLang gives them back by itself."""
        if self.layout is None:
            return 0
        return self.layout.elements(self.ranks, windows=True) * element_bytes(self.kv_dtype)

    def to_dict(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "compressed": self.refusal is None,
            "refusal": self.refusal,
            "model": self.name,
            "layers": None if layout is None else _numbers_by_kind(layout),
            "scored": None if layout is None else _scored(layout),
            "window": None if layout is None else layout.window,
            "page_size": self.page_size,
            "selections": list(SELECTIONS),
            "kv": {
                "dtype": self.kv_dtype,
                "gpus": self.ranks,
                "bytes_per_token": self.held_bytes,
                "bytes_per_token_in_window": self.window_bytes,
                "bytes_freed_per_evicted_token": self.held_bytes,
            },
            "settings": dataclasses.asdict(self.rules),
        }


def judge(content: Fields, name: str, config: Config, settings: Mapping[str, Any], *, weighed: bool = False) -> Verdict:
    """The verdict on a model.

    Args:
        content: of its config.json.
        name: of the model, for messages.
        config: what the user set.
        settings: SGLang's settings that were given, by field; a switch is True.
        weighed: whether the statistics hold look-up weights.

    Raises:
        TriAttentionError: the file is not that of a language model.
    """
    fields = text_fields(content)
    if not architecture(fields):
        raise TriAttentionError(
            f"{name} names no architecture, but SGLang chooses its implementation by that: give the config.json of a "
            "Hugging Face model."
        )
    label = f"{name} ({', '.join(content['architectures'])})"
    uncovered = uncovered_in_file(content)
    try:
        layout = read_layout(content)
        traits = traits_of_file(content, label, layout, multimodal=bool(settings.get("enable_multimodal")))
    except TriAttentionError:
        if not uncovered:
            raise
        layout, traits = None, Traits(label, uncovered)
    rules, refusal = complete(config), None
    try:
        rules = resolve(config, with_draft_defaults(settings, traits), traits, weighed=weighed)
        check_draft_numbers(settings.get("speculative_algorithm"), settings)
    except TriAttentionError as error:
        refusal = str(error)
    dtype = settings.get("kv_cache_dtype", "auto")
    return Verdict(
        name=label,
        layout=layout,
        rules=rules,
        page_size=settings.get("page_size", 1),
        ranks=settings.get("tp_size", 1) // settings.get("attn_dp_size", 1),
        kv_dtype=kv_dtype_of(fields) if dtype == "auto" else str(dtype),
        refusal=refusal,
        reason=why_uncovered(traits.uncovered),
    )


def attention_words(layout: AttentionLayout) -> str:
    """The layers by kind."""
    words = {
        FULL: "full",
        WINDOW: f"with a window of {layout.window:,}{' in a pool of its own' if layout.window_pool else ''}",
        CHUNK: "local to chunks",
        LATENT: "with latent KV",
        LINEAR: "with a state instead of KV",
        NONE: "without attention",
    }
    each = ", each with a state" if layout.state_in_every_layer else ""
    return ", ".join(f"{number} {words.get(kind, kind)}" for kind, number in layout.kinds.items()) + each


def scored_words(layout: AttentionLayout) -> str:
    """What is scored of each head, by groups of layers with equal rotation."""
    groups = Counter((layout.layers[number].head_dim, layout.layers[number].rotary_dim) for number in layout.scored)
    return "; ".join(
        f"{layers} {'layer' if layers == 1 else 'layers'}, {_dims(width, turned)}"
        for (width, turned), layers in groups.items()
    )


def strategy_words(rules: RoundRules, page_size: int) -> str:
    """How rounds close up what they keep."""
    if page_size == 1 and selection_named(rules.selection).shared:
        return "remap"
    if rules.recency:
        return "slide"
    return "fill" if rules.window else "fill or slide"


def _dims(width: int, turned: int) -> str:
    if turned == width:
        return f"all {width} dims of a head"
    return f"all {width} dims of a head, of which RoPE turns {turned or 'none'}"


def _numbers_by_kind(layout: AttentionLayout) -> dict[str, list[int]]:
    return {kind: [number for number, layer in enumerate(layout.layers) if layer.kind == kind] for kind in layout.kinds}


def _scored(layout: AttentionLayout) -> list[dict[str, Any]]:
    found: dict[tuple[int, int, int], list[int]] = {}
    for number in layout.scored:
        layer = layout.layers[number]
        found.setdefault((layer.head_dim, layer.rotary_dim, layer.kv_heads), []).append(number)
    return [
        {
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": width,
            "rotated_dims": turned,
            "unrotated_dims": width - turned,
        }
        for (width, turned, kv_heads), layers in found.items()
    ]
