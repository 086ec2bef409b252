"""The loaded model's attention layers, and those among them whose keys are scored.

SGLang part: `RadixAttention` (sglang/srt/layers/radix_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_triattn.errors import TriAttentionError

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
        query: [tokens, H_q * D], or with the last two dims apart; with padding, which follows the tokens.
        options: keywords of the call.
    """

    attention: RadixAttention
    query: torch.Tensor
    batch: ForwardBatch
    options: Mapping[str, object]

    def unfinished(self) -> str | None:
        """In which form the query arrives if it is not yet what meets the cached keys; None if it is."""
        if self.query.dtype.itemsize == 1:
            return f"as {str(self.query.dtype).removeprefix('torch.')}"
        return next((f"with {name}" for name in _UNFINISHED if self.options.get(name) is not None), None)

    def heads(self, tokens: int) -> torch.Tensor:
        """[H_q, tokens, D]: the queries of the first tokens."""
        attention = self.attention
        return self.query[:tokens].reshape(tokens, attention.tp_q_head_num, attention.qk_head_dim).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer of a loaded model."""

    attention: RadixAttention

    @property
    def number(self) -> int:
        return self.attention.layer_id

    @property
    def window(self) -> int:
        """Tokens that a query sees, its own included; 0 if it sees all."""
        before = self.attention.sliding_window_size
        return before + 1 if before > 0 else 0

    @property
    def heads(self) -> tuple[int, int]:
        """Query and KV heads on this rank."""
        return self.attention.tp_q_head_num, self.attention.tp_k_head_num

    def check(self) -> None:
        """Raises UnsupportedModel if the layer's logits depend on more than a query and a key."""
        attention = self.attention
        reasons = (
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

    found = [module for module in model.modules() if isinstance(module, RadixAttention)]
    # SGLang's `TransformersBase` (sglang/srt/models/transformers.py) keeps them beside the modules of transformers.
    found += getattr(model, "attention_instances", {}).values()
    if not found:
        raise UnsupportedModel("it has no attention layers that SGLang keeps KV for")
    return sorted(map(AttentionLayer, found), key=lambda layer: layer.number)


@contextmanager
def watching_queries(layers: Sequence[AttentionLayer], see: Callable[[int, Call], None]) -> Iterator[None]:
    """While open, `see` gets each call of `layers`, with the layer's place among them, before it runs."""

    def watched(place: int, attention: RadixAttention) -> Callable:
        forward = attention.forward

        def wrapper(*args: Any, **kwargs: Any) -> object:
            query = args[0] if args else kwargs["q"]
            batch = args[3] if len(args) > 3 else kwargs["forward_batch"]
            see(place, Call(attention, query, batch, kwargs))
            return forward(*args, **kwargs)

        return wrapper

    # Not hooks of torch: some models call `forward` themselves.
    for place, layer in enumerate(layers):
        layer.attention.forward = watched(place, layer.attention)
    try:
        yield
    finally:
        for layer in layers:
            del layer.attention.forward


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


def numbers_of(layers: Sequence[AttentionLayer]) -> tuple[int, ...]:
    """The numbers of the layers whose KV `layers` read, ascending, each once."""
    return tuple(sorted({layer.number for layer in layers}))


@contextmanager
def watching_positions(model: torch.nn.Module, see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While open, `see` gets the positions that a rotary embedding of `model` is called with, before it runs."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    def watch(_: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        see(args[0] if args else kwargs["positions"])

    found = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    handles = [module.register_forward_pre_hook(watch, with_kwargs=True) for module in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_windows(layers: Sequence[AttentionLayer], window: int) -> None:
    """Raises UnsupportedModel if a layer has a window wider than `window` tokens, the newest that rounds keep."""
    widest = max(layers, key=lambda layer: layer.window)
    if widest.window > window:
        raise UnsupportedModel(
            f"its attention layer {widest.number} attends to a sliding window of {widest.window} tokens, of which its "
            "config.json says nothing"
        )
