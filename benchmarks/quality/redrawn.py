"""Controls that draw anew at every round (VaSE, arXiv 2606.03928, as its authors' repository computes them).

    cur     |k G|^2 |v G|^2, G drawn at every round     (leverage scores of CUR, arXiv 2509.15038)
    vase    max(v) - min(v) for a share; the rest are   (the authors protect 200 tokens of 2,048 to 6,144; here the
            drawn by the attention of newest queries    share is PROTECTED)

VaSE also spares four sinks, which the frozen prompt holds here.
"""

from __future__ import annotations

import zlib

import torch

from benchmarks.quality.policies import Control, SnapKV

RANK = 20
"""Columns of G: kvpress's default."""
PROTECTED = 0.1
"""Share of the kept tokens that VaSE protects by the range of their values."""


def drawn_for(seed: str, next_position: int) -> torch.Generator:
    """The same whenever this row's round comes at this token."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {next_position}".encode()))


class Cur(Control):
    """Large keys with large values, seen from RANK directions that each round draws."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        keys, values = (self.vectors(pool, slots) for pool in (self.pools.k_buffers, self.pools.v_buffers))
        seen = torch.randn(keys.shape[-1], RANK, generator=drawn_for(self.row.seed, next_position)).to(keys.device)
        return ((keys @ seen).square().sum(-1) * (values @ seen).square().sum(-1)).clamp_min(1e-30).log()


class Vase(SnapKV):
    """Protects values of a large range; the rest are drawn, each as probably as it is attended to."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        attention = super().importance(slots, next_position, aged, keep)[..., :aged]
        noise = torch.rand(attention.shape, generator=drawn_for(self.row.seed, next_position)).to(attention.device)
        # The largest of these are a draw without replacement (Gumbel).
        found = attention.clamp_min(1e-12).log() - (-noise.clamp(1e-12, 1 - 1e-7).log()).log()
        values = self.vectors(self.pools.v_buffers, slots[:aged])
        spread = values.amax(-1) - values.amin(-1)
        protected = spread.topk(min(round(PROTECTED * keep), aged)).indices
        found = found.scatter(-1, protected, float("inf"))
        return torch.nn.functional.pad(found, (0, len(slots) - aged))


REDRAWN_CONTROLS: dict[str, type[Control]] = {"cur": Cur, "vase": Vase}
