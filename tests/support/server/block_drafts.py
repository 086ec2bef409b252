"""DFlash: a model that drafts a block of tokens at once, and an independent account of its drafts.

It attends to K/V that it makes of the target's hidden states, those of a token in the token's own slot, and to the
block: the last token that is known and as many masks as it drafts, each of which sees all of these. Here a mask looks
one token before where the circle was at its place one turn ago, so which drafts hold depends on every token that it
attends to. Nothing here uses the project's code, see `oracle`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from draft_account import Watched
from draft_heads import AUXILIARY
from families import COMMON, PLAIN_ROPE
from harness import STEPS
from repeating_model import FIRST, LENGTH
from tiny_model import TinyModel

LAYERS = 2
# A token that no prompt and no answer has.
MASK = 3
# Pairs of dims by which a mask finds the token one turn ago, how sharply, and the bias by which keys show positions.
PAIRS, SHARPNESS, BIAS = 6, 2.0, 4.0


class BlockLayer(nn.Module):
    """One layer: attention in both directions over the block and what is known before it."""

    def __init__(self, config: transformers.Qwen3Config) -> None:
        super().__init__()
        size, width = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, width
        self.self_attn = nn.Module()
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            setattr(self.self_attn, f"{name}_proj", nn.Linear(size, heads * width))
        self.self_attn.o_proj = nn.Linear(self.heads * width, size)
        self.self_attn.q_norm, self.self_attn.k_norm = (Qwen3RMSNorm(width, config.rms_norm_eps) for _ in range(2))
        self.mlp = Qwen3MLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            Qwen3RMSNorm(size, config.rms_norm_eps) for _ in range(2)
        )

    def kv(self, hidden: torch.Tensor, turns: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, turned, and values of tokens [n, size], both [H_kv, n, D]."""
        key = self._heads(self.self_attn.k_proj(hidden), self.kv_heads)
        key = apply_rotary_pos_emb(*[self.self_attn.k_norm(key)[None]] * 2, *turns)[0][0]
        return key, self._heads(self.self_attn.v_proj(hidden), self.kv_heads)

    def forward(
        self,
        hidden: torch.Tensor,
        turns: tuple[torch.Tensor, ...],
        before: tuple[torch.Tensor, torch.Tensor],
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """What the layer makes of a block [n, size].

        Args:
            before: keys and values of the tokens before it.
            seen: [H, 1 or n, tokens before it and n] bool.
        """
        own = self.input_layernorm(hidden)
        query = self.self_attn.q_norm(self._heads(self.self_attn.q_proj(own), self.heads))
        query = apply_rotary_pos_emb(query[None], query[None], *turns)[0][0]
        key, value = (
            torch.cat(parts, 1).repeat_interleave(self.heads // self.kv_heads, 0)
            for parts in zip(before, self.kv(own, turns), strict=True)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, seen)
        hidden = hidden + self.self_attn.o_proj(attended.transpose(0, 1).flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _heads(self, flat: torch.Tensor, heads: int) -> torch.Tensor:
        return flat.unflatten(-1, (heads, self.width)).transpose(0, 1)


class BlockModel(nn.Module):
    """The draft model, as published: without an embedding and a head of its own."""

    def __init__(self, config: transformers.Qwen3Config) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(size * len(AUXILIARY), size, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(LAYERS))
        self.rotary = Qwen3RotaryEmbedding(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.12) if parameter.ndim > 1 else None

    def turns(self, first: int, tokens: int) -> tuple[torch.Tensor, ...]:
        """Cosines and sines of `tokens` places from `first` on."""
        return self.rotary(self.fc.weight, torch.arange(first, first + tokens)[None])


@torch.no_grad()
def build_block_model(folder: Path, target: TinyModel, window: int = 0) -> Path:
    """Writes a draft model for a target that repeats itself, and returns where.

    Args:
        window: tokens that a query of its last layer sees, its own included; 0 for all.
    """
    torch.manual_seed(4)
    model = target.load()
    config = transformers.Qwen3Config(**{**COMMON, "num_hidden_layers": LAYERS, "rope_parameters": PLAIN_ROPE})
    draft = BlockModel(config)
    size = config.hidden_size
    _look_one_turn_back(draft.layers[0], model.get_input_embeddings().weight[FIRST : FIRST + LENGTH])
    draft.fc.weight *= 0.5
    draft.fc.weight[:, :size] += torch.eye(size)
    for layer in draft.layers:
        layer.mlp.down_proj.weight *= 0.3
        layer.self_attn.o_proj.bias.zero_()
    draft.layers[1].self_attn.o_proj.weight *= 0.5
    path = folder / "dflash"
    path.mkdir()
    weights = {name: value.contiguous() for name, value in draft.state_dict().items() if not name.startswith("rotary")}
    save_file(weights, path / "model.safetensors")
    blocks = {"mask_token_id": MASK, "target_layer_ids": list(AUXILIARY)}
    fields = json.loads(config.to_json_string()) | {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": True,
        "layer_types": [*["full_attention"] * (LAYERS - 1), "sliding_attention"] if window else None,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "num_target_layers": model.config.get_text_config().num_hidden_layers,
        "block_size": STEPS + 1,
        "dflash_config": blocks,
    }
    (path / "config.json").write_text(json.dumps(fields))
    return path


def _look_one_turn_back(layer: BlockLayer, circle: torch.Tensor) -> None:
    """Makes a query find the token before the one that was at its place in the circle one turn ago, and pass it on.

    Args:
        circle: [LENGTH, size], the circle's embeddings.
    """
    attention, half = layer.self_attn, layer.width // 2
    query = torch.zeros(layer.width)
    query[:PAIRS] = BIAS
    angle = (LENGTH + 1) * 10000.0 ** (-torch.arange(half) / half)
    key = torch.cat([query[:half] * angle.cos(), query[:half] * angle.sin()])
    attention.q_proj.bias.copy_(query.repeat(layer.heads))
    attention.k_proj.bias.copy_(key.repeat(layer.kv_heads))
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(SHARPNESS)
    # Values are the circle's part of what a token is.
    axes = torch.linalg.svd(circle, full_matrices=True).Vh[: layer.kv_heads * layer.width]
    attention.v_proj.weight.copy_(axes)
    attention.v_proj.bias.zero_()
    parts = axes.unflatten(0, (layer.kv_heads, -1)).repeat_interleave(layer.heads // layer.kv_heads, 0)
    attention.o_proj.weight.copy_(parts.flatten(0, 1).T * layer.kv_heads / layer.heads)


def load_block_model(path: Path) -> tuple[BlockModel, int]:
    """What `build_block_model` has written, and the window."""
    fields = json.loads((path / "config.json").read_text())
    model = BlockModel(transformers.Qwen3Config(**{**fields, "layer_types": None}))
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    return model.eval(), fields["sliding_window"] or 0


@torch.no_grad()
def holding_of_blocks(
    path: Path, account: Watched, ids: list[int], starts: list[int], margin: float, newest: int = 0
) -> list[int | None]:
    """As `draft_account.holding_of_head`, for a model that drafts blocks.

    Args:
        path: of that model.
        account: of the ids, which has run.
        newest: tokens that all of its layers see before the block, the row's newest; 0 for all.
    """
    (draft, window), model = load_block_model(path), account.model
    context = draft.hidden_norm(draft.fc(torch.cat([account.inputs[layer + 1] for layer in AUXILIARY], -1)))
    known = [layer.kv(context, draft.turns(0, len(context))) for layer in draft.layers]
    found: list[int | None] = []
    for start in starts:
        hidden = model.get_input_embeddings()(torch.tensor([ids[start], *[MASK] * STEPS]))
        turns, seen = draft.turns(start, STEPS + 1), seen_by_blocks(account, start, draft.layers[0].heads)
        if newest or window:
            row = account.row(-1, 0, start)
            left_out = max(len(row) - newest, 0) if newest else 0
            # A page stays whole.
            seen[..., row[: left_out - left_out % account.page_size]] = False
        for layer, (keys, values), own in zip(draft.layers, known, seen, strict=True):
            if window and layer is draft.layers[-1]:
                own = own & seen_in_window(row, start, window)
            hidden = layer(hidden, turns, (keys[:, :start], values[:, :start]), own)
        best = model.lm_head(draft.norm(hidden)).log_softmax(-1).topk(2)
        held: int | None = 0
        for place in range(1, min(STEPS + 1, len(ids) - start)):
            if best.values[place, 0] - best.values[place, 1] < margin:
                held = None
                break
            if int(best.indices[place, 0]) != ids[start + place]:
                break
            held = place
        found.append(held)
    return found


def seen_by_blocks(account: Watched, start: int, heads: int) -> torch.Tensor:
    """[LAYERS, heads, 1, start + block] bool: what is kept of the tokens before a block at `start`, and the block."""
    # Each head follows its own where the model scores as many layers, else all the last layer's first.
    sets = account.shown if len(account.shown) == LAYERS else account.shown[-1:, :1].expand(LAYERS, -1, -1, -1)
    kept = sets[:, :, start, :start].repeat_interleave(heads // sets.shape[1], 1)
    return torch.cat([kept, torch.ones(LAYERS, heads, STEPS + 1, dtype=torch.bool)], -1)[:, :, None]


def seen_in_window(row: list[int], start: int, window: int) -> torch.Tensor:
    """[block, start + block] bool: what a window layer sees of the tokens of a row and, up to each, of the block."""
    query, seen = torch.arange(STEPS + 1)[:, None], torch.zeros(STEPS + 1, start + STEPS + 1, dtype=torch.bool)
    # Windows are counted along the row.
    seen[:, row] = torch.arange(len(row)) > query + len(row) - window
    own = torch.arange(STEPS + 1)
    seen[:, start:] = (own <= query) & (own > query - window)
    return seen
