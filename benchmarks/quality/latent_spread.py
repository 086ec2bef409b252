"""Does the spread of the queries that meet a latent say which tokens they will attend to? Synthetic statistics.

With latent KV (MLA), a score's position-independent part is m . c: the mean absorbed query times the latent. Over
queries of covariance S, what a token can expect is E exp(q . c) = exp(m . c + c^T S c / 2), if they are Gaussian. So
S, cut to its r largest directions, could be added to a score. It costs r columns for each query head in the kernel's
product, in addition to one for the mean.

No trained model with latent KV is small enough for the machines of this project. Queries are drawn with spreads of
different sizes and shapes, latents normalised as by the models' norm. A figure is the share of the queries' attention
that falls on the quarter of the tokens with the best scores.

    python -m benchmarks.quality.latent_spread --json benchmarks/results/latent_spread.json
"""

from __future__ import annotations

import argparse
import itertools

import torch

from benchmarks.common import report

RANK, TOKENS, QUERIES, KEPT = 512, 1024, 512, 256
RANKS = (0, 4, 8, RANK)
DECAYS = (0.0, 0.5, 1.0, 2.0)
"""Exponents of the spread's spectrum, i ** -decay: from equal in all directions to nearly all of it in a few."""
SPREADS = (0.5, 1.0, 2.0)
"""Deviation of a logit over queries, for each deviation over tokens that the mean query makes."""
MEAN_LOGITS = 2.0
"""Deviation over tokens of the mean query's logits."""


def attended(mean: torch.Tensor, directions: torch.Tensor, latents: torch.Tensor, generator: torch.Generator):
    """[TOKENS]: the attention of QUERIES queries, 1 in all; the columns of `directions` are scaled by the spread."""
    queries = mean + torch.randn(QUERIES, RANK, generator=generator, dtype=mean.dtype) @ directions.T
    return (queries @ latents.T).softmax(-1).mean(0)


def measure(decay: float, spread: float, heads: int) -> dict:
    """Means over heads, each with statistics and latents of its own."""
    generator = torch.Generator().manual_seed(0)
    kept: dict[str, list[float]] = {}
    for _ in range(heads):
        draw = torch.randn(3, RANK, RANK, generator=generator, dtype=torch.float64)
        basis, other = torch.linalg.qr(draw[0])[0], torch.linalg.qr(draw[1])[0]
        # Latents have directions of their own, of unequal sizes too.
        sizes = torch.arange(1, RANK + 1, dtype=torch.float64)
        latents = torch.randn(TOKENS, RANK, generator=generator, dtype=torch.float64) * sizes**-0.5 @ other.T
        latents = latents / latents.square().mean(-1, keepdim=True).sqrt()
        mean = draw[2, 0]
        mean *= MEAN_LOGITS / (latents @ mean).std()
        directions = basis * sizes ** (-decay / 2)
        directions *= spread * MEAN_LOGITS / (latents @ directions).square().sum(-1).mean().sqrt()
        truth = attended(mean, directions, latents, generator)
        scores = {
            f"rank {rank}": latents @ mean + (latents @ directions[:, :rank]).square().sum(-1) / 2 for rank in RANKS
        }
        for name, score in {**scores, "best": truth}.items():
            kept.setdefault(name, []).append(truth[score.topk(KEPT).indices].sum().item())
    means = {name: sum(shares) / heads for name, shares in kept.items()}
    return {"shape": f"spread {spread}, decay {decay}", "spread": spread, "decay": decay, **means}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a term for the spread of absorbed queries would add to scores.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--heads", type=int, default=16, help="heads for each row (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two heads for each row")
    arguments = parser.parse_args(argv)
    heads = 2 if arguments.quick else arguments.heads
    rows = [measure(decay, spread, heads) for spread, decay in itertools.product(SPREADS, DECAYS)]
    report(rows, arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
