"""The loaded model's attention layers, and those among them whose keys are scored.

SGLang part: `RadixAttention` (sglang/srt/layers/radix_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_triattn.config import flag
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.rope import ropes_of_buffers
from sglang_triattn.patches.model.latent import LatentAttention, Parts, latent_attentions

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Arguments of RadixAttention that show that the backend has yet to scale, join, norm or rotate the query
# (sglang/srt/layers/attention/graph_utils.py).
_UNFINISHED = ("q_descale", "q_rope", "cos_sin_cache", "mxfp8_norm_rope_positions")


class UnsupportedModel(TriAttentionError):
    """The loaded model cannot be compressed; `reason` completes "because ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The served model does not work with --enable-triattention, because {reason}: start without "
            "--enable-triattention."
        )
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an attention layer.

    Attributes:
        query: [tokens, H_q * D] or [tokens, H_q, D]; with padding, which follows the tokens.
        key, value: of the same tokens, in any shape; None where the layer reads the KV of another.
        options: keywords of the call.
        latent: the layer with latent KV that the attention belongs to, if it does.
    """

    attention: RadixAttention
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    batch: ForwardBatch
    options: Mapping[str, object]
    latent: LatentAttention | None = None

    def unfinished(self) -> str | None:
        """In which form the query arrives if it is not yet what meets the cached keys; None if it is."""
        if self.query.dtype.itemsize == 1:
            return f"as {str(self.query.dtype).removeprefix('torch.')}"
        # Absorbed queries of two parts are final, unless the backend has yet to turn one of them.
        final = ("q_rope",) if self.latent is not None else ()
        pending = (name for name in _UNFINISHED if name not in final and self.options.get(name) is not None)
        return next((f"with {name}" for name in pending), None)

    def heads(self, tokens: int) -> torch.Tensor:
        """[H_q, tokens, D]: the queries of the first tokens."""
        attention = self.attention
        return self.query[:tokens].reshape(tokens, attention.tp_q_head_num, attention.qk_head_dim).transpose(0, 1)

    def kv(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The keys [H_kv, tokens, D] and values [H_kv, tokens, v_head_dim] of the first tokens, if the call has any."""
        if self.key is None or self.value is None:
            return None
        attention = self.attention
        # As RadixAttention reads them, whose callers may have joined tokens and heads.
        key = self.key.reshape(-1, attention.tp_k_head_num, attention.qk_head_dim)[:tokens]
        value = self.value.reshape(-1, attention.tp_v_head_num, attention.v_head_dim)[:tokens]
        return key.transpose(0, 1), value.transpose(0, 1)

    def parts(self, tokens: int) -> Parts:
        """The queries of a layer with latent KV."""
        assert self.latent is not None
        return self.latent.parts(self.attention, self.query, self.options, tokens)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer of a loaded model.

    Attributes:
        attention: what meets the cached keys.
        latent: the layer itself if its KV is latent.
    """

    attention: RadixAttention
    latent: LatentAttention | None = None

    @property
    def number(self) -> int:
        return self.attention.layer_id

    @property
    def window(self) -> int:
        """Tokens that a query sees, its own included; 0 if it sees all."""
        before = self.attention.sliding_window_size
        return before + 1 if before > 0 else 0

    @property
    def called(self) -> list[RadixAttention]:
        """What of the layer is called in a forward pass: one of these, once."""
        return [self.attention] if self.latent is None else self.latent.called

    @property
    def rotary_width(self) -> int:
        """Most dims of a query that RoPE may turn."""
        return self.attention.head_dim if self.latent is None else self.latent.rotary_width

    @property
    def heads(self) -> tuple[int, int]:
        """Query and KV heads on this rank."""
        return self.attention.tp_q_head_num, self.attention.tp_k_head_num

    def check(self) -> None:
        """Raises UnsupportedModel if the layer's logits depend on more than a query and a key."""
        attention = self.attention
        reasons = (
            (self.latent is not None and self.latent.selects, "attends to the tokens that an indexer selects"),
            (attention.is_cross_attention, "is cross attention"),
            (attention.use_irope, "is local to chunks"),
            (attention.pos_encoding_mode != "NONE", "adds a bias by position"),
            (attention.xai_temperature_len > 0, "scales its logits by length"),
        )
        for applies, reason in reasons:
            if applies:
                raise UnsupportedModel(f"its attention layer {self.number} {reason}")


def attention_layers(model: torch.nn.Module) -> list[AttentionLayer]:
    """All attention layers, by layer number.

    Raises:
        UnsupportedModel: there are none.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    mla_layers = [AttentionLayer(latent.attention, latent) for latent in latent_attentions(model)]
    held = {id(attention) for layer in mla_layers for attention in layer.called}
    found = [module for module in model.modules() if isinstance(module, RadixAttention) and id(module) not in held]
    # SGLang's `TransformersBase` (sglang/srt/models/transformers.py) keeps them outside the modules of transformers.
    found += getattr(model, "attention_instances", {}).values()
    layers = [*map(AttentionLayer, found), *mla_layers]
    if not layers:
        raise UnsupportedModel("it has no attention layers that SGLang keeps KV for")
    return sorted(layers, key=lambda layer: layer.number)


@contextmanager
def watching_queries(layers: Sequence[AttentionLayer], see: Callable[[int, Call], None]) -> Iterator[None]:
    """While open, `see` gets each call of `layers`, with the layer's place among them, before it runs."""

    def watched(place: int, attention: RadixAttention, latent: LatentAttention | None) -> Callable:
        forward = attention.forward

        def wrapper(*args: Any, **kwargs: Any) -> object:
            given = dict(zip(("q", "k", "v", "forward_batch"), args, strict=False)) | kwargs
            query, batch = given["q"], given["forward_batch"]
            see(place, Call(attention, query, given.get("k"), given.get("v"), batch, kwargs, latent))
            return forward(*args, **kwargs)

        return wrapper

    # Not hooks of torch: some models call `forward` themselves.
    for place, layer in enumerate(layers):
        for attention in layer.called:
            attention.forward = watched(place, attention, layer.latent)
    try:
        yield
    finally:
        for layer in layers:
            for attention in layer.called:
                del attention.forward


def scored_layers(layers: Sequence[AttentionLayer]) -> list[AttentionLayer]:
    """The layers that attend to all tokens: what they need decides what stays.

    Where some read the KV of another (Gemma-4), all of these have its number, and it is scored once: by the queries of
    all that read it.

    Raises:
        UnsupportedModel: there are none.
    """
    scored = [layer for layer in layers if not layer.window]
    if not scored:
        raise UnsupportedModel("all of its layers attend to a sliding window, so old tokens cost it nothing")
    return scored


def check_stage(model: torch.nn.Module) -> None:
    """Raises UnsupportedModel unless a pipeline stage has a layer that can be scored."""
    try:
        scored_layers(attention_layers(model))
    except UnsupportedModel as error:
        raise UnsupportedModel(
            "one of its pipeline stages has no layer that attends to all tokens, which a smaller --pp-size or another "
            "SGLANG_PP_LAYER_PARTITION may give it"
        ) from error


def numbers_of(layers: Sequence[AttentionLayer]) -> tuple[int, ...]:
    """The numbers of the layers whose KV `layers` read, ascending, each once."""
    return tuple(sorted({layer.number for layer in layers}))


def is_rotary(module: torch.nn.Module) -> bool:
    """Whether a module is one of SGLang's rotary embeddings."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

    return isinstance(module, (RotaryEmbedding, Phi3LongRoPEScaledRotaryEmbedding))


@contextmanager
def watching_positions(model: torch.nn.Module, see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While open, `see` gets the positions that a rotary embedding of `model` is called with, before it runs."""

    def watch(_: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        see(args[0] if args else kwargs["positions"])

    def watch_other(_: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # As in transformers: what it finds the dtype by comes first.
        see(args[1] if len(args) > 1 else kwargs["position_ids"])

    handles = [
        module.register_forward_pre_hook(watch if own else watch_other, with_kwargs=True)
        for module in model.modules()
        if (own := is_rotary(module)) or ropes_of_buffers(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_scales(layers: Sequence[AttentionLayer]) -> None:
    """Raises TriAttentionError if keys or values may be stored divided by scales, which look-up weights do not know.

    All scales that a layer has count, whether or not the dtype of the pool (float8) makes use of them.
    """
    for layer in layers:
        if {layer.attention.k_scale_float, layer.attention.v_scale_float} - {None, 1.0}:
            raise TriAttentionError(
                f"The statistics hold look-up weights, but attention layer {layer.number} stores keys and values "
                "divided by scales, which the weights do not know: calibrate without --look-ups, or set "
                f"{flag('value_share')} to 0."
            )


def check_windows(layers: Sequence[AttentionLayer], window: int) -> None:
    """Raises UnsupportedModel if a layer has a window wider than `window` tokens, the newest that rounds keep."""
    widest = max(layers, key=lambda layer: layer.window)
    if widest.window > window:
        raise UnsupportedModel(
            f"its attention layer {widest.number} attends to a sliding window of {widest.window} tokens, of which its "
            "config.json says nothing"
        )
