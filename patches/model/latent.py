"""Attention with latent KV (multi-head latent attention, MLA): one layer, two ways to compute it.

SGLang part: `DeepseekV2AttentionMLA` (sglang/srt/models/deepseek_v2.py). Such a layer holds two `RadixAttention` of one
number. `attn_mqa` meets the latents as they are cached, with absorbed queries; `attn_mha` meets keys and values that
are expanded from latents, as with most backends where a prompt is prefilled. SGLang chooses for each step, so both are
watched. `MiniCPM3AttentionMLA` (sglang/srt/models/minicpm3.py) has the first alone, as `attn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_triattn.calibration.latent_queries import absorbed, key_weights

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class Parts(NamedTuple):
    """Queries of one call.

    Attributes:
        still: [H_q, tokens, C], what meets the latents; or, unless `absorbed`, [H_q, tokens, D], what meets expanded
            keys.
        turning: [H_q, tokens, 2F], what meets the rotated keys.
    """

    still: torch.Tensor
    turning: torch.Tensor
    absorbed: bool


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """One layer with latent KV.

    Attributes:
        module: SGLang's. Its class is not imported: that would import all that the class's module does.
    """

    module: Any

    @property
    def attention(self) -> RadixAttention:
        """The one that meets the cached latents."""
        return getattr(self.module, "attn_mqa", None) or self.module.attn

    @property
    def called(self) -> list[RadixAttention]:
        """What of the layer is called in a forward pass: one of these, once."""
        expanded = getattr(self.module, "attn_mha", None)
        return [self.attention] if expanded is None else [self.attention, expanded]

    @property
    def rotary_width(self) -> int:
        """Dims of a rotated key."""
        return self.module.qk_rope_head_dim

    @property
    def selects(self) -> bool:
        """Whether an indexer selects the tokens that a query sees (DeepSeek sparse attention)."""
        return bool(getattr(self.module, "use_dsa", False))

    def parts(self, attention: RadixAttention, query: torch.Tensor, options: Mapping[str, Any], tokens: int) -> Parts:
        """The queries of a call's first tokens.

        Args:
            attention: which of `called` is called.
            query, options: its query, and its keywords; some backends are given the rotated part among these.
        """
        is_absorbed = attention is self.attention
        rows = query[:tokens].reshape(tokens, attention.tp_q_head_num, -1).transpose(0, 1)
        if options.get("q_rope") is not None:
            turning = options["q_rope"][:tokens].reshape(tokens, attention.tp_q_head_num, -1).transpose(0, 1)
            return Parts(rows, turning, is_absorbed)
        width = self.module.kv_lora_rank if is_absorbed else self.module.qk_nope_head_dim
        return Parts(rows[..., :width], rows[..., width:], is_absorbed)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """[H_q, C] float64: what of a query [H_q, D] float64, or of a sum of them, meets the latent."""
        module = self.module
        weights = key_weights(
            lambda latents: module.kv_b_proj(latents)[0],
            module.kv_lora_rank,
            len(query),
            module.qk_nope_head_dim,
            like=module.kv_a_layernorm.weight,
        )
        return absorbed(query, weights)


def latent_attentions(model: torch.nn.Module) -> Iterator[LatentAttention]:
    """The layers of a model that have latent KV."""
    for module in model.modules():
        absorbs_always = hasattr(module, "w_kc") and hasattr(module, "attn")
        if absorbs_always or (hasattr(module, "attn_mqa") and hasattr(module, "attn_mha")):
            yield LatentAttention(module)
