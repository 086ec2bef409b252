"""A random Gemma-3 in the class that takes images, served without `--enable-multimodal`, for text alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vision_families import VisionModel, build_vision_model


class Account(torch.nn.Module):
    """What the oracle needs of a model: its layers in `model`, and a call that returns logits."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.model, self.head = whole.model.language_model, whole.lm_head
        self.config = self.model.config

    def forward(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.model(**options).last_hidden_state))


class Gemma3(VisionModel):
    def load(self) -> Account:
        return Account(super().load())


def build_gemma3(folder: Path) -> Gemma3:
    """Writes the model and its processor."""
    return Gemma3(**vars(build_vision_model(folder, "gemma-3")))
