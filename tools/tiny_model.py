"""A random model that a CPU decodes fast, with random statistics, for server tests and benchmarks of serving."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_triattn.model.rope import Rope

# Small, because a third of a decode step is spent on the logits of a vocabulary of 32,768. Not smaller: if a token
# occurs twice, its values in the first layer are equal, and the last bits of sums decide which of them is larger.
VOCABULARY = 4096
END = 2


@dataclass(frozen=True)
class TinyModel:
    """A random model: small enough to decode over 100 tokens/s on a CPU, sharp enough that every token matters."""

    path: Path
    stats: Path
    num_layers: int = 3
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    interleaved: bool = False

    def load(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval()


ROPE_KINDS = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "other-theta": {"rope_type": "default", "rope_theta": 500000.0},
    "partial-interleaved": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "partial-interleaved-yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
    },
}


def build_tiny_model(
    folder: Path, rope: str = "plain", vocabulary: int = VOCABULARY, architecture: str = "Llama", head_dim: int = 32
) -> TinyModel:
    """Writes the model and random statistics for it.

    Args:
        architecture: transformers' configuration without `Config`; for interleaved RoPE it is Glm4.
    """
    import transformers

    from sglang_triattn.model.rope import rope_of_transformers

    stats = folder / f"{rope}.safetensors"
    tiny = TinyModel(folder / rope, stats, head_dim=head_dim, interleaved="interleaved" in rope)
    torch.manual_seed(0)
    config = getattr(transformers, f"{'Glm4' if tiny.interleaved else architecture}Config")(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_q_heads,
        num_key_value_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        max_position_embeddings=8192,
        rope_parameters=ROPE_KINDS[rope],
        tie_word_embeddings=False,
        initializer_range=0.12,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tiny.path)
    save_random_stats(tiny, rope_of_transformers(model.model, config))
    return tiny


def save_random_stats(
    tiny: TinyModel, rope: Rope, layers: tuple[int, ...] = (), rotates: tuple[bool, ...] = (), rotary_start: int = 0
) -> None:
    """Writes random statistics of a model, by default of all its layers, all turned by `rope`."""
    from sglang_triattn.model.fingerprint import model_fingerprint
    from sglang_triattn.stats.file import QueryStats, save_stats

    heads = len(layers) or tiny.num_layers, tiny.num_q_heads
    mean = torch.randn(*heads, rope.inv_freq.numel(), dtype=torch.complex64)
    spread = torch.rand(mean.shape)
    save_stats(
        QueryStats(
            mean=mean,
            abs_mean=mean.abs() + spread,
            num_kv_heads=tiny.num_kv_heads,
            head_dim=tiny.head_dim,
            rope=rope,
            fingerprint=model_fingerprint(str(tiny.path)),
            token_count=1,
            source="random",
            layers=layers,
            rotates=rotates,
            unrotated_mean=torch.randn(*heads, tiny.head_dim - rope.rotary_dim),
            rotary_start=rotary_start,
        ),
        tiny.stats,
    )
