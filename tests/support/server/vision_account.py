"""The account of what a model answers that takes images, see `vision_families`.

It is that of `oracle`, with positions from transformers: an image's tokens have one on each axis, and the tokens after
it go on from the largest.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from harness import INTERVAL
from latent_family import LatentOracle
from oracle import Oracle
from sglang_triattn.stats.file import load_stats
from transformers_parts import full_frequencies
from vision_families import VISION_FAMILIES, VisionModel


def encoded(image: Image.Image) -> str:
    """The image as requests carry it."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass
class VisionOracle(Oracle):
    """Runs one request of a model that takes images.

    Args:
        positions: [axes, prompt tokens] int64, rotary positions of the prompt.
        media: what the model is given of the prompt's image, if there is one.
    """

    positions: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.int64))
    media: dict[str, torch.Tensor] = field(default_factory=dict)

    def _layers(self) -> torch.nn.ModuleList:
        return self.model.model.language_model.layers

    @property
    def _shift(self) -> int:
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    def _turn(self, place):
        return place + self._shift

    def _places(self, start: int, total: int) -> dict[str, torch.Tensor]:
        after = self._turn(torch.arange(self.positions.shape[1], max(total, self.positions.shape[1])))
        positions = torch.cat([self.positions, after.expand(len(self.positions), -1)], dim=1)[:, start:total]
        # One axis: [1, tokens], several: [axes, 1, tokens].
        ids = positions if len(positions) == 1 else positions[:, None]
        return {"position_ids": ids, **(self.media if start == 0 else {})}


class LatentVisionOracle(VisionOracle, LatentOracle):
    """The same of a model with latent KV."""


@dataclass(frozen=True)
class Accounts:
    """Oracles of one vision model's requests."""

    tiny: VisionModel
    model: Any
    processor: Any

    @classmethod
    def of(cls, tiny: VisionModel) -> Accounts:
        return cls(tiny, tiny.load(), tiny.processor())

    def of_prompt(self, text: str, image: Image.Image | None = None) -> tuple[list[int], VisionOracle]:
        """Token ids of a prompt, and the oracle of the request."""
        given = self.processor(text=[text], images=None if image is None else [image], return_tensors="pt")
        ids = given.pop("input_ids")
        given.pop("attention_mask", None)
        positions = torch.arange(ids.shape[1])[None]
        kinds = given.get("mm_token_type_ids")
        if image is not None and kinds is not None and "image_grid_thw" in given:
            positions, _ = self.model.model.get_rope_index(
                ids, mm_token_type_ids=kinds, image_grid_thw=given["image_grid_thw"]
            )
            positions = positions[:, 0]
        stats = load_file(self.tiny.stats)
        family = VISION_FAMILIES[self.tiny.family]
        oracle = (LatentVisionOracle if family.latent else VisionOracle)(
            model=self.model,
            mean=torch.complex(stats["mean_re"], stats["mean_im"]),
            abs_mean=stats["abs_mean"],
            inv_freq=full_frequencies(self.model.model.language_model),
            num_kv_heads=self.tiny.num_kv_heads,
            budget=self.tiny.budget,
            interval=INTERVAL,
            recent=self.tiny.recent,
            unrotated=stats["unrotated_mean"],
            # Of rotated keys, transformers separates the halves of pairs.
            interleaved=self.tiny.interleaved and not family.latent,
            value_share=0.0,
            positions=positions,
            media=dict(given) if image is not None else {},
            scored=load_stats(self.tiny.stats).layers,
            window=family.window,
        )
        return ids[0].tolist(), oracle


def by_token_counts(oracle: VisionOracle) -> VisionOracle:
    """The same with token counts for rotary positions."""
    length = oracle.positions.shape[1]
    return replace(oracle, positions=torch.arange(length).expand(len(oracle.positions), -1))


class ScoredByTokenCounts(VisionOracle):
    """With the right positions, but scores as seen from the number of tokens before the next one."""

    def _kept(self, cache, visible, frozen: int, next_position: int, keep: int, stays) -> torch.Tensor:
        return super()._kept(cache, visible, frozen, next_position - self._shift, keep, stays)
