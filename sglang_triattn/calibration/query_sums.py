"""Sums of pre-RoPE queries over tokens: all that calibration keeps of the texts it runs.

Each layer's queries are added as they pass and then dropped, so memory does not grow with the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sglang_triattn.calibration.job import CalibrationError
from sglang_triattn.model.rope import Rope, to_complex, unrotate


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over `count` tokens, on the CPU. Of a layer whose KV others read too, each is their mean over all readers.

    Attributes:
        total: [L, H_q, F] complex128, of the complex components.
        abs_total: [L, H_q, F] float64, of their absolute values.
        unrotated: [L, H_q, head_dim - 2F] float64, of the dims that RoPE does not turn.
    """

    total: torch.Tensor
    abs_total: torch.Tensor
    unrotated: torch.Tensor
    count: int
    head_dim: int

    def plus(self, other: "Sums | None") -> "Sums":
        """The sums over the tokens of both; None stands for no tokens."""
        if other is None:
            return self
        return Sums(
            self.total + other.total,
            self.abs_total + other.abs_total,
            self.unrotated + other.unrotated,
            self.count + other.count,
            self.head_dim,
        )

    def means(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`mean`, `abs_mean` and `unrotated_mean` of a `QueryStats`.

        Raises:
            CalibrationError: they are not finite.
        """
        mean, abs_mean, unrotated = (part / self.count for part in (self.total, self.abs_total, self.unrotated))
        if not (torch.isfinite(abs_mean).all() and torch.isfinite(unrotated).all()):
            raise CalibrationError("The model computes NaN or infinite queries: choose another --dtype.")
        return mean.to(torch.complex64), abs_mean.float(), unrotated.float()


def join_runs(now: Sums | None, before: Sums | None) -> Sums:
    """The sums over the tokens of a run and of the one it resumes. Raises ValueError if neither has any."""
    if now is not None:
        return now.plus(before)
    if before is None:
        raise ValueError("neither run has measured a token")
    return before


def join_heads(parts: Sequence[Sums]) -> Sums:
    """The sums of a model whose query heads are split over ranks; parts come in the order of the ranks."""
    return _joined(parts, 1)


def join_layers(parts: Sequence[Sums]) -> Sums:
    """The sums of a model whose layers are split over pipeline stages; parts come in the order of the stages."""
    return _joined(parts, 0)


def _joined(parts: Sequence[Sums], dim: int) -> Sums:
    return Sums(
        torch.cat([part.total for part in parts], dim=dim),
        torch.cat([part.abs_total for part in parts], dim=dim),
        torch.cat([part.unrotated for part in parts], dim=dim),
        parts[0].count,
        parts[0].head_dim,
    )


class QuerySums:
    """Running sums of one process, kept on the model's device.

    Args:
        rope: how the layers that have RoPE turn their queries.
        rotates: for each scored layer, whether it has RoPE.
        reads: for each layer of the model that reads the KV of a scored one, the place of that one among the scored;
            by default each scored layer reads its own, and no other does.
        absorb: with latent KV, turns a sum of queries [H_q, D] float64 of a scored layer, by its place, into the sum
            of what meets the latent, [H_q, C] (`latent_queries.absorbed`).
    """

    def __init__(
        self,
        rope: Rope,
        rotates: Sequence[bool],
        reads: Sequence[int] = (),
        absorb: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._rope, self._rotates = rope, tuple(rotates)
        self._reads = sorted(reads or range(len(self._rotates)))
        # Of each scored layer: [H_q, F] complex128, [H_q, F] float64 and [H_q, head_dim - 2F] float64, as in `Sums`.
        self._parts: list[tuple[torch.Tensor, ...] | None] = [None] * len(self._rotates)
        self._absorb = absorb
        # Of each layer, the part of its third sum that has yet to be absorbed.
        self._expanded: dict[int, torch.Tensor] = {}
        self._seen: list[tuple[int, int]] = []  # (index, tokens) since the last end_pass
        self._count = 0

    def add(self, index: int, query: torch.Tensor, positions: torch.Tensor) -> None:
        """Adds the queries of one layer in one forward pass.

        Args:
            index: the place among the scored layers of the one whose KV the layer reads.
            query: [H_q, S, head_dim], any float dtype, as it meets the cached keys.
            positions: [S], the positions of its tokens.
        """
        width = self._rope.rotary_dim
        self._add(index, query[..., :width], positions, query[..., width:].sum(1, dtype=torch.float64))

    def add_latent(
        self, index: int, turning: torch.Tensor, positions: torch.Tensor, still: torch.Tensor, *, absorbed: bool
    ) -> None:
        """Adds the queries of one layer with latent KV in one forward pass.

        Args:
            index, positions: as for `add`.
            turning: [H_q, S, 2F], what meets the rotated keys.
            still: [H_q, S, C], what meets the latents; or [H_q, S, D], what meets keys that are made of them.
            absorbed: which of the two `still` is.
        """
        summed = still.sum(1, dtype=torch.float64)
        if not absorbed:
            self._expanded[index] = summed + self._expanded[index] if index in self._expanded else summed
            summed = summed.new_zeros(0)
        self._add(index, turning, positions, summed)

    def _add(self, index: int, turning: torch.Tensor, positions: torch.Tensor, still: torch.Tensor) -> None:
        query = turning.float()
        if self._rotates[index]:
            query = unrotate(query, positions, self._rope)
        z = to_complex(query, self._rope)  # [H_q, S, F]
        parts = (z.sum(1, dtype=torch.complex128), z.abs().sum(1, dtype=torch.float64), still)
        parts = tuple(part / self._reads.count(index) for part in parts)
        before = self._parts[index]
        self._parts[index] = parts if before is None else tuple(map(_plus, before, parts))
        self._seen.append((index, query.shape[1]))

    def end_pass(self, tokens: int) -> None:
        """Ends a forward pass.

        Raises:
            CalibrationError: unless each layer that reads the KV of a scored one was added exactly once, with `tokens`
                tokens, since the last call.
        """
        if sorted(self._seen) != [(layer, tokens) for layer in self._reads]:
            layers = len(self._parts)
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
        layers = cast("list[tuple[torch.Tensor, ...]]", self._parts)
        absorb = cast("Callable[[int, torch.Tensor], torch.Tensor]", self._absorb)
        whole = [
            (total, sizes, _plus(still, absorb(index, self._expanded[index])) if index in self._expanded else still)
            for index, (total, sizes, still) in enumerate(layers)
        ]
        total, abs_total, unrotated = (torch.stack(parts).cpu() for parts in zip(*whole, strict=True))
        return Sums(total, abs_total, unrotated, self._count, self._rope.rotary_dim + unrotated.shape[-1])


def _plus(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two sums, of which one may still be empty."""
    return one + other if one.numel() and other.numel() else other if other.numel() else one
