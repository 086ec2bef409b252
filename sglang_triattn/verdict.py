"""Whether a model and a server's flags will be compressed, from config.json alone: the judgement of `check`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.select import SELECTIONS, SHARED
from sglang_triattn.latents import for_latents
from sglang_triattn.launch_settings import (
    BESIDE_IMAGES,
    BESIDE_LATENTS,
    BESIDE_MEASURING,
    BESIDE_PREFILL_ELSEWHERE,
    BESIDE_STAGES,
    BESIDE_STATES,
    BESIDE_WINDOW_POOL,
    CHAIN,
    IMAGES_UNTRIED,
    MEASURE,
    SETTINGS,
    STATES_UNTRIED,
    WINDOWS_UNTRIED,
    Refusal,
    beside_drafts,
    branches_by_itself,
    check_draft_numbers,
    refused_decode_server,
    refused_drafts,
)
from sglang_triattn.model.fields import Fields, architecture, text_fields
from sglang_triattn.model.kinds import CHUNK, FULL, LATENT, LINEAR, NONE, WINDOW
from sglang_triattn.model.layout import AttentionLayout, read_layout
from sglang_triattn.model.sizes import context_limit, element_bytes, kv_dtype_of
from sglang_triattn.model.support import refused_model, unsupported
from sglang_triattn.model.vision import covers_images, is_covered
from sglang_triattn.rounds.plan import check_reach, in_whole_pages


@dataclass(frozen=True)
class Server:
    """The flags of a server that matter.

    Attributes:
        given: SGLang's settings that were given, by field; a switch is True.
    """

    config: Config
    page_size: int = 1
    ranks: int = 1
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The answer for one model and server.

    Attributes:
        layout: None if the file does not say enough about a model that is refused anyway.
        config: the settings of rounds, as a server would complete them for the model.
        kv_dtype: of the KV cache.
        refusal: one sentence; None if the model is compressed.
        reason: why the model itself is refused, to complete "because ..."; None if it is not.
    """

    name: str
    layout: AttentionLayout | None
    config: Config
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
            "settings": dataclasses.asdict(self.config),
        }


def judge(content: Fields, name: str, server: Server) -> Verdict:
    """The verdict on a model.

    Args:
        content: of its config.json.
        name: of the model, for messages.

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
    reason = unsupported(content)
    dtype = server.given.get("kv_cache_dtype", "auto")
    dtype = kv_dtype_of(fields) if dtype == "auto" else str(dtype)
    config = dataclasses.replace(server.config, images=covers_images(content["architectures"]))
    server = dataclasses.replace(server, config=config)
    layout, refusal = None, None
    try:
        layout = read_layout(content)
    except TriAttentionError:
        if reason is None:
            raise
    if reason is not None:
        refusal = str(refused_model(label, reason))
    else:
        try:
            _check_server(server, SETTINGS)
            if server.given.get("pp_size", 1) > 1:
                _check_server(server, BESIDE_STAGES)
            if server.given.get("disaggregation_mode") == "decode":
                _check_server(server, BESIDE_PREFILL_ELSEWHERE)
            if is_covered(content.get("architectures")):
                _check_server(server, BESIDE_IMAGES)
            config = _check_layout(layout, label, server)
            _check_reach(config, fields, server)
            if server.given.get("disaggregation_mode") == "decode" and _is_untried_decoding(layout, content):
                raise refused_decode_server(label)
            if config.stats_after_update == "measure":
                _check_server(server, BESIDE_MEASURING, MEASURE)
            if "speculative_algorithm" in server.given:
                _check_speculation(server, content, label, layout)
        except TriAttentionError as error:
            refusal = str(error)
    return Verdict(label, layout, config, server.page_size, server.ranks, dtype, refusal, reason)


def _is_untried_decoding(layout: AttentionLayout | None, content: Fields) -> bool:
    """Whether a model is not tested on a decode server."""
    return layout is not None and bool(layout.window_pool or layout.states or content.get("vision_config"))


def _check_server(server: Server, refusals: Sequence[Refusal], beside: str = "") -> None:
    """Raises TriAttentionError for the first setting that compression cannot work with, if `beside` is given."""
    for refusal in refusals:
        if refusal.field in server.given and refusal.applies(server.given[refusal.field]):
            raise TriAttentionError(refusal.message(server.given[refusal.field], beside))


def _check_layout(layout: AttentionLayout | None, label: str, server: Server) -> Config:
    """The settings of rounds for the model. Raises TriAttentionError if these, or its heads, do not fit the server."""
    if layout is None or not layout.scored:
        raise refused_model(label, "none of its layers attends to all tokens")
    layer, config, window = layout.layers[layout.scored[0]], server.config, layout.window
    if layer.q_heads % server.ranks or (layer.kv_heads % server.ranks and server.ranks % layer.kv_heads):
        raise TriAttentionError(
            f"The {layer.q_heads} query heads and {layer.kv_heads} KV heads of {label} do not split evenly over "
            f"--tp-size {server.ranks}: use a number that divides them."
        )
    if layout.window_pool:
        _check_server(server, BESIDE_WINDOW_POOL)
    if layout.latent:
        _check_server(server, BESIDE_LATENTS)
        config = for_latents(config)
    if layout.states:
        _check_server(server, BESIDE_STATES)
    if window:
        config = config.for_windows(window, server.page_size)
    return in_whole_pages(config, server.page_size) if _queues_drafts(server) else config


def _check_reach(config: Config, fields: Fields, server: Server) -> None:
    """Raises TriAttentionError if no request can get as long as its first round needs, as far as is known."""
    context = server.given.get("context_length")
    if context is None and fields.get("max_position_embeddings") is not None:
        context = context_limit(fields)
    for most, what in ((context, "the context limit is"), (server.given.get("max_total_tokens"), "the KV pool holds")):
        if most is not None:
            check_reach(config, most, what)


def _queues_drafts(server: Server) -> bool:
    """Whether the server uses speculative decoding, and overlap scheduling, which is SGLang's default."""
    return bool(server.given.get("speculative_algorithm")) and not server.given.get("disable_overlap_schedule")


def _check_speculation(server: Server, content: Fields, label: str, layout: AttentionLayout | None) -> None:
    """Raises TriAttentionError for a setting, or a model, that does not go with speculative decoding."""
    algorithm, named = server.given["speculative_algorithm"], content["architectures"][0]
    given = server.given
    if not any(field in given for field in CHAIN):
        given = {**given, "speculative_eagle_topk": branches_by_itself(algorithm, named)}
    for refusal in beside_drafts(algorithm):
        value = given.get(refusal.field, False)
        if refusal.applies(value):
            raise TriAttentionError(refusal.message(value, f"--speculative-algorithm {algorithm}"))
    check_draft_numbers(algorithm, server.given)
    for untried, reason in (
        (layout and layout.window, WINDOWS_UNTRIED),
        (layout and layout.states, STATES_UNTRIED),
        (content.get("vision_config"), IMAGES_UNTRIED),
    ):
        if untried:
            raise refused_drafts(algorithm, label, reason)


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
    beside = ", each beside a state" if layout.beside_state else ""
    return ", ".join(f"{number} {words.get(kind, kind)}" for kind, number in layout.kinds.items()) + beside


def scored_words(layout: AttentionLayout) -> str:
    """What is scored of each head, by layers that rotate alike."""
    groups = Counter((layout.layers[number].head_dim, layout.layers[number].rotary_dim) for number in layout.scored)
    return "; ".join(
        f"{layers} {'layer' if layers == 1 else 'layers'}, {_dims(width, turned)}"
        for (width, turned), layers in groups.items()
    )


def strategy_words(config: Config, page_size: int) -> str:
    """How rounds close up what they keep."""
    if page_size == 1 and config.selection in SHARED:
        return "remap"
    return "fill" if config.window else "fill or slide"


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
