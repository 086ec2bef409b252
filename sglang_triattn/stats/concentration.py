"""How concentrated a model's queries are, and what that predicts about scores.

`benchmarks/quality/predict_attention.py` measured it on Qwen2.5-Coder-0.5B and SmolLM2-135M, on prose and code: the
attention that a quarter of the older tokens gets when scores choose it, as a fraction of what the best quarter gets. On
SmolLM2 it was 0.91 to 0.95 at every concentration; on Qwen it fell with concentration, as in `MEASURED`.
No head below 0.6 was seen.
"""

import torch

from sglang_triattn.stats.file import QueryStats

MEASURED = ((0.6, 0.63), (0.7, 0.73), (0.8, 0.86), (0.9, 0.87))
"""(least concentration, fraction of the best choice's attention), for the model where the fraction was lower."""
SPREAD = 0.6
"""Scores have not been measured below this mean concentration: a poor outlook."""
GOOD = 0.8
"""From this mean concentration on, the outlook is good; between the two, fair."""


def concentration(stats: QueryStats) -> torch.Tensor:
    """[L, H_q] float64 between 0 and 1: how concentrated the pre-RoPE queries of each head are.

    It is the sum over frequencies of |mean q| divided by that of mean |q|, so frequencies are weighted by size. At 1
    all queries are equal, and the score of a key is exact. It always is in dims of frequency 0, which do not count.
    """
    turns = torch.ones(stats.mean.shape[-1]) if stats.rope is None else (stats.rope.inv_freq > 0).cpu()
    absolute = (stats.abs_mean.double() * turns).sum(-1)
    size = (stats.mean.to(torch.complex128).abs() * turns).sum(-1)
    return size / absolute.clamp_min(torch.finfo(torch.float64).tiny)


def outlook(stats: QueryStats) -> str:
    """What the mean concentration predicts: good, fair or poor, and what that rests on, without a full stop."""
    mean = concentration(stats).mean().item()
    if mean < SPREAD:
        return (
            f"poor (mean concentration {mean:.2f}, below {SPREAD}): the queries of this model are spread, and how well "
            "scores predict attention there has not been measured: compare --triattention-value-share 1, which does "
            "without scores, by benchmarks/quality"
        )
    part = max(part for least, part in MEASURED if mean >= least)
    return (
        f"{'good' if mean >= GOOD else 'fair'} (mean concentration {mean:.2f}): scores found at least {part} of the "
        "attention that the best choice of a quarter of the tokens finds, on the two small models measured"
    )


def layer_lines(stats: QueryStats) -> list[str]:
    """The mean of each layer, ten per line."""
    means = [f"{value:.2f}" for value in concentration(stats).mean(1).tolist()]
    return [
        f"  {f'layers {stats.layers[first]}-{stats.layers[first + len(some) - 1]}':<13} {' '.join(some)}"
        for first in range(0, len(means), 10)
        for some in [means[first : first + 10]]
    ]
