"""A model that repeats itself, so that drafts from its own text hold, and whose log-probabilities still show every
token that it attends to.

A few tokens follow one another in a circle, after any text: the tiny model's logits get one term more for
the successor. All others keep their logits, which move by several units when a token is evicted or misplaced.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tiny_model import TinyModel, build_tiny_model, save_random_stats

FIRST, LENGTH = 10, 24
"""The circle's first token and how many it has."""

LOUDNESS, OTHERS = 6.0, 0.3
"""How much more its tokens, and how much less attention and MLPs, contribute than in the tiny model: the successor
then leads by at least 2 in the logits."""

OUTPUTS = "o_proj", "down_proj", "out_proj", "output_linear"
"""What attention, MLPs and layers that keep a state end with, in the names of transformers."""


def build_repeating_model(folder: Path) -> TinyModel:
    """Writes the model and random statistics for it."""
    from sglang_triattn.model.rope import rope_of_transformers

    tiny = build_tiny_model(folder)
    make_repeating(tiny)
    model = tiny.load()
    torch.manual_seed(0)
    save_random_stats(tiny, rope_of_transformers(model.model, model.config))
    return tiny


def make_repeating(tiny: TinyModel, others: float = OTHERS) -> None:
    """Rewrites the weights of a model so that it repeats itself.

    Args:
        others: see OTHERS.
    """
    model, file = tiny.load(), tiny.path / "config.json"
    # transformers would write other fields than those that SGLang reads of some models.
    settings = file.read_text()
    repeat(model.model.layers, model.get_input_embeddings().weight, model.lm_head.weight, others)
    model.save_pretrained(tiny.path)
    file.write_text(settings)


@torch.no_grad()
def repeat(layers: torch.nn.Module, embedding: torch.Tensor, head: torch.Tensor, others: float) -> None:
    """Changes these weights of a model so that it repeats itself."""
    circle = torch.arange(LENGTH)
    for name, weight in layers.named_parameters():
        if any(output in name for output in OUTPUTS):
            weight *= others
    embedding[FIRST + circle] *= LOUDNESS
    head[FIRST + (circle + 1) % LENGTH] += embedding[FIRST + circle]


def in_circle(length: int, start: int = 0) -> list[int]:
    """`length` tokens of the circle."""
    return [FIRST + (start + place) % LENGTH for place in range(length)]


def outside_circle() -> dict[str, float]:
    """A bias that keeps an answer out of the circle, where the model does not repeat itself."""
    return {str(token): -1000.0 for token in in_circle(LENGTH)}
