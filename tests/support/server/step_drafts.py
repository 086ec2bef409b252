"""A random Step-3.5 that repeats itself, with its layers that draft, one token each, and the account of them.

In contrast to those of MiMo-V2 (`layered_drafts`), each layer after the first reads what the one before has made of a
token, and has a norm and a head of its own. SGLang builds each as layer 45, so the model has the published number of
layers, in the published order, and is small otherwise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm
from transformers import Step3p7TextConfig, Step3p7TextModel

import step_family
from harness import STEPS
from layered_drafts import through
from repeating_model import repeat
from step_family import EXPERTS, Step, published, random_step, write_step

CHAINED = "step-3.5-mtp"
LAYERS = 45
ALL = LAYERS + STEPS
OTHERS = 0.08
"""As in `repeating_model`, for so many layers."""
NOISE = 3.0
"""Factor of what the layers add to the token that they pass on, so that some of their drafts fail."""
_FULL = [number % 4 == 0 for number in range(ALL)]
FIELDS = {
    **step_family.FIELDS,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "layer_types": ["full_attention" if full else "sliding_attention" for full in _FULL],
    "rope_theta": [5e6 if full else 1e4 for full in _FULL],
    "partial_rotary_factors": [0.5 if full else 1.0 for full in _FULL],
    "num_nextn_predict_layers": STEPS,
    # Every token takes every expert, so that no rounding decides which.
    "moe_layers_enum": "3,44",
    "moe_top_k": EXPERTS,
    "swiglu_limits": [0.0] * 44 + [0.5] + [0.0] * STEPS,
    "swiglu_limits_shared": [0.0] * 44 + [0.5] + [0.0] * STEPS,
}


def build_chained(folder: Path) -> Step:
    """Writes the model with its draft layers. Nothing has written its statistics yet."""
    torch.manual_seed(0)
    deeper, head = random_step({**FIELDS, "num_hidden_layers": ALL, "num_nextn_predict_layers": 0})
    size = deeper.config.hidden_size
    repeat(deeper.layers[:LAYERS], deeper.embed_tokens.weight, head, OTHERS)
    with torch.no_grad():
        for name, weight in deeper.layers[LAYERS:].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight *= NOISE
    model = Step3p7TextModel._from_config(Step3p7TextConfig(**FIELDS), dtype=torch.float32)
    model.load_state_dict(deeper.state_dict(), strict=False)
    added = {name: each for name, each in published(deeper).items() if _number(name) >= LAYERS}
    for number in range(LAYERS, ALL):
        mix = torch.cat((torch.eye(size), 0.12 * NOISE * torch.randn(size, size)), -1)
        norms = ("enorm", "hnorm", "transformer.shared_head.norm")
        parts = {"eh_proj": mix, "transformer.shared_head.output": head + 0.02 * torch.randn_like(head)}
        parts |= {name: 0.1 * torch.randn(size) for name in norms}
        added |= {f"model.layers.{number}.{name}.weight": each for name, each in parts.items()}
    path = folder / CHAINED
    deeper.save_pretrained(path / "drafts")
    return write_step(path, FIELDS, model, head, added)


def _number(name: str) -> int:
    """Of the layer that a weight belongs to; -1 for others."""
    part = name.removeprefix("model.layers.").partition(".")[0]
    return int(part) if part.isdigit() else -1


class ChainedLayers:
    """The draft layers, with SGLang's order of their parts (sglang/srt/models/step3p5_mtp.py)."""

    chained = True

    def __init__(self, path: Path) -> None:
        model = Step3p7TextModel.from_pretrained(
            path / "drafts", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.decoders, self.rotary = model.layers[LAYERS:], model.rotary_emb
        self.weights = load_file(path / "model.safetensors")

    def run(self, number: int, embeds: torch.Tensor, hidden: torch.Tensor, first: int) -> torch.Tensor:
        parts = self._normed(number, "enorm", embeds), self._normed(number, "hnorm", hidden)
        stream = linear(torch.cat(parts, -1), self._weight(number, "eh_proj"))[None]
        return through(self.decoders[number], self.rotary, stream, first)

    def logits(self, number: int, made: torch.Tensor) -> torch.Tensor:
        normed = self._normed(number, "transformer.shared_head.norm", made)
        return linear(normed, self._weight(number, "transformer.shared_head.output"))

    def _weight(self, number: int, name: str) -> torch.Tensor:
        return self.weights[f"model.layers.{LAYERS + number}.{name}.weight"]

    def _normed(self, number: int, name: str, hidden: torch.Tensor) -> torch.Tensor:
        weight = self._weight(number, name)
        return rms_norm(hidden, weight.shape, 1 + weight, FIELDS["rms_norm_eps"])
