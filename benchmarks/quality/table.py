"""Rows and tables of the quality benchmark, and how sure its differences are.

Intervals come from a paired bootstrap in two stages: streams are drawn with replacement, then, in each drawn stream,
its questions (for scored text, blocks of 64 tokens), and both policies are compared on the same draw; 2.5 % of the
draws lie below `low` and 2.5 % above `high`. Streams are drawn because answers within a stream are not independent.
With two or three streams per task, the spread between streams is underestimated; if all differences are equal, an
interval has no width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from benchmarks.common import print_table
from benchmarks.quality.cells import Found, Unit
from benchmarks.quality.choices import DEFAULT, DENSE

DRAWS = 2000
_LEVELS = torch.tensor([0.025, 0.975], dtype=torch.float64)


def rows_of(found: Sequence[Found], base: str = DEFAULT) -> list[dict]:
    """One row per task, share and policy, from the streams' units; `base` is one of the policies.

    Keys: task, share, policy; questions: answers, or tokens of scored text; right: the share of them that is right, or
    that agrees with dense; logprob: mean log-probability of an answer's token; low, high: 95 % interval of
    right(policy) - right(base).
    """
    tasks = dict.fromkeys(task for stream in found for units in stream.values() for task in units)
    cells = list(dict.fromkeys(cell for stream in found for cell in stream))
    bases = {cell.share: cell for cell in cells if cell.choice.name == base}
    rows = []
    for task in tasks:
        streams = [stream for stream in found if any(task in units for units in stream.values())]
        for cell in cells:
            own = [stream[cell][task] for stream in streams]
            others = [stream[bases[cell.share]][task] for stream in streams]
            answers = sum(unit.count for units in own for unit in units)
            low, high = difference(own, others, task)
            rows.append(
                {
                    "task": task,
                    "share": cell.share,
                    "policy": cell.choice.name,
                    "questions": answers,
                    "right": sum(unit.right for units in own for unit in units) / answers,
                    "logprob": sum(unit.logprob for units in own for unit in units) / answers,
                    "low": low,
                    "high": high,
                }
            )
    return rows


def difference(own: Sequence[Sequence[Unit]], base: Sequence[Sequence[Unit]], seed: str = "") -> tuple[float, float]:
    """Bounds of the difference in the share of right answers; both [stream][unit] for the same answers."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    sizes = torch.tensor([len(units) for units in own])
    gains = torch.zeros(len(own), int(sizes.max()), dtype=torch.float64)
    counts = torch.zeros_like(gains)
    for number, (mine, theirs) in enumerate(zip(own, base, strict=True)):
        pairs = list(zip(mine, theirs, strict=True))
        gains[number, : len(pairs)] = torch.tensor([a.right - b.right for a, b in pairs], dtype=torch.float64)
        counts[number, : len(pairs)] = torch.tensor([float(a.count) for a, _ in pairs], dtype=torch.float64)
    streams = torch.randint(len(own), (DRAWS, len(own)), generator=generator)
    drawn = torch.rand(*streams.shape, gains.shape[1], dtype=torch.float64, generator=generator)
    units = (drawn * sizes[streams][..., None]).long()
    # As many units as the stream has.
    there = torch.arange(gains.shape[1]) < sizes[streams][..., None]
    gain = (gains[streams[..., None], units] * there).sum((1, 2))
    count = (counts[streams[..., None], units] * there).sum((1, 2))
    low, high = (gain / count).quantile(_LEVELS).tolist()
    return low, high


def print_rows(rows: Sequence[dict], base: str = DEFAULT) -> None:
    """Prints a table per share: right answers by policy and task, and where they surely differ from the base's."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for share in dict.fromkeys(row["share"] for row in rows):
        own = {(row["policy"], row["task"]): row for row in rows if row["share"] == share}
        lines = [[policy, *(_cell(own[policy, task]) for task in tasks)] for policy in policies]
        print(f"keeping {share:.4g} of the private tokens; + and - mark what is surely above or below {base}")
        counted = [f"{task} ({own[DENSE, task]['questions']})" for task in tasks]
        print_table(["policy", *counted], lines)


def _cell(row: dict) -> str:
    mark = "+" if row["low"] > 0 else "-" if row["high"] < 0 else " "
    return f"{row['right']:.2f}{mark}"
