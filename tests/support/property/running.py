"""A request of the simulation, with an independent account of what its row holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.managers.schedule_batch import Req

from content import same_for_all
from sglang_triattn.config import Config
from sglang_triattn.patches.request import compressed as requests_patch


@dataclass(eq=False)
class Running:
    """A request and the independent account of it: the logical position of every KV entry in its row.

    Attributes:
        positions: [LAYERS, KV_HEADS, physical length]; heads differ only where each has its own kept set.
        prompt_length: that of its first turn, if it resumed another request's row.
        inputs: logical positions of the tokens that resumed turns brought and that must stay.
        neighbours: generated tokens, at most so many, may have to stay with them at page sizes above 1.
        thinks: whether its answer begins with reasoning.
        barred: whether SGLang itself keeps its row out of the tree.
    """

    req: Req
    positions: torch.Tensor = field(default_factory=lambda: same_for_all([]))
    first_tainted: int | None = None
    prompt_length: int = 0
    inputs: frozenset[int] = frozenset()
    neighbours: int = 0
    thinks: bool = False
    barred: bool = False

    @property
    def settings(self) -> Config | None:
        return requests_patch.settings_of(self.req)

    @property
    def tokens(self) -> list[int]:
        return list(self.req.origin_input_ids + self.req.output_ids)

    @property
    def evicted(self) -> int:
        return requests_patch.evicted_of(self.req)
