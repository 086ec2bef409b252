"""Sums of pre-RoPE queries over tokens: all that calibration keeps of the texts it runs.

Each layer's queries are added as they pass and then dropped, so memory does not grow with the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sglang_triattn.calibration.job import CalibrationError
from sglang_triattn.model.rope import Rope, to_complex, unrotate


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over `count` tokens, on the CPU.

    Attributes:
        total: [L, H_q, F] complex128, of the complex components.
        abs_total: [L, H_q, F] float64, of their absolute values.
    """

    total: torch.Tensor
    abs_total: torch.Tensor
    count: int
    head_dim: int

    def plus(self, other: "Sums | None") -> "Sums":
        """The sums over the tokens of both; None stands for no tokens."""
        if other is None:
            return self
        count = self.count + other.count
        return Sums(self.total + other.total, self.abs_total + other.abs_total, count, self.head_dim)

    def means(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Means of the components, [L, H_q, F] complex64, and of their absolute values, float32.

        Raises:
            CalibrationError: they are not finite.
        """
        mean, abs_mean = self.total / self.count, self.abs_total / self.count
        if not torch.isfinite(abs_mean).all():
            raise CalibrationError("The model computes NaN or infinite queries: choose another --dtype.")
        return mean.to(torch.complex64), abs_mean.float()


def join_runs(now: Sums | None, before: Sums | None) -> Sums:
    """The sums over the tokens of a run and of the one it resumes. Raises ValueError if neither has any."""
    if now is not None:
        return now.plus(before)
    if before is None:
        raise ValueError("neither run has measured a token")
    return before


def join_heads(parts: Sequence[Sums]) -> Sums:
    """The sums of a model whose query heads are split over ranks; parts come in the order of the ranks."""
    return Sums(
        torch.cat([part.total for part in parts], dim=1),
        torch.cat([part.abs_total for part in parts], dim=1),
        parts[0].count,
        parts[0].head_dim,
    )


class QuerySums:
    """Running sums of one process, kept on the model's device."""

    def __init__(self, num_layers: int, rope: Rope) -> None:
        self._rope = rope
        self._total: list[torch.Tensor | None] = [None] * num_layers  # each [H_q, F] complex128
        self._abs_total: list[torch.Tensor | None] = [None] * num_layers  # each [H_q, F] float64
        self._seen: list[tuple[int, int]] = []  # (layer, tokens) since the last end_pass
        self._count = 0
        self._head_dim = 0

    def add(self, layer: int, query: torch.Tensor, positions: torch.Tensor) -> None:
        """Adds the queries of one layer in one forward pass.

        Args:
            query: [H_q, S, head_dim], any float dtype, post-RoPE.
            positions: [S], the positions that they were rotated to.
        """
        z = to_complex(unrotate(query.float(), positions, self._rope), self._rope)  # [H_q, S, F]
        total = z.sum(1, dtype=torch.complex128)
        abs_total = z.abs().sum(1, dtype=torch.float64)
        before, abs_before = self._total[layer], self._abs_total[layer]
        self._total[layer] = total if before is None else total + before
        self._abs_total[layer] = abs_total if abs_before is None else abs_total + abs_before
        self._seen.append((layer, query.shape[1]))
        self._head_dim = query.shape[-1]

    def end_pass(self, tokens: int) -> None:
        """Ends a forward pass.

        Raises:
            CalibrationError: unless each layer was added exactly once, with `tokens` tokens, since the last call.
        """
        layers = len(self._total)
        if sorted(self._seen) != [(layer, tokens) for layer in range(layers)]:
            raise CalibrationError(
                f"Only {len({layer for layer, _ in self._seen})} of {layers} layers could be observed "
                f"({len(self._seen)} times), but TriAttention needs the queries of all, each once: use another model."
            )
        self._seen.clear()
        self._count += tokens

    def read(self) -> Sums | None:
        """The sums so far, or None before the first pass."""
        if self._count == 0:
            return None
        # A pass has ended, so every layer has sums.
        total, abs_total = (cast("list[torch.Tensor]", parts) for parts in (self._total, self._abs_total))
        return Sums(torch.stack(total).cpu(), torch.stack(abs_total).cpu(), self._count, self._head_dim)
