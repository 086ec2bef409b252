"""Random models in classes that take images, as their language model alone answers text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tiny_model import TinyModel
from vision_families import VisionModel, build_vision_model


class Account(torch.nn.Module):
    """What the oracle needs of a model: its layers in `model`, and a call that returns logits; and what a change of its
    weights does (`repeating_model`)."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.model, self.lm_head = whole.model.language_model, whole.lm_head
        self.config = self.model.config
        self.get_input_embeddings, self.save_pretrained = self.model.get_input_embeddings, whole.save_pretrained

    def forward(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(**options).last_hidden_state))


class WholeQwen(VisionModel):
    def load(self) -> Account:
        return Account(super().load())


def build_whole_qwen(folder: Path, family: str = "qwen3.5") -> TinyModel:
    """Writes the model, its processor, and random statistics for it."""
    return WholeQwen(**vars(build_vision_model(folder, family)))
