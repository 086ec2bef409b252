"""The picture of `sglang-triattn plan`: bytes of a decode step over the length of the requests."""

from __future__ import annotations

from pathlib import Path

from sglang_triattn.cli.plan_text import Findings
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.traffic import decode

_MOST_POINTS = 2000


def curves(found: Findings) -> tuple[list[int], list[float], list[float]]:
    """(tokens of each request, GB of a step dense, GB compressed without rounds), one point for each step or fewer.

    Raises:
        TriAttentionError: no request fits, and the number of requests is not given; or the answer is empty.
    """
    if found.traffic is None or found.workload.length == found.workload.prompt:
        raise TriAttentionError(
            "--plot has no step to draw, because no request fits or the answer is empty: add --batch, or raise "
            "--length."
        )
    model, page_size = found.model, found.model.gpus.page_size
    group, reads = model.gpus.group(found.traffic.requests), model.reads
    weights = found.traffic.dense_mean.weights
    dense, rows = decode(None, found.workload, page_size).rows, decode(found.rules, found.workload, page_size).rows
    stride = max(len(dense) // _MOST_POINTS, 1)
    lengths = list(dense[::stride])
    compressed = [(weights + group * reads.of(row)) / 1e9 for row in rows[::stride]]
    return lengths, [(weights + group * reads.of(length)) / 1e9 for length in lengths], compressed


def draw(found: Findings, path: Path) -> None:
    """Writes the picture to a .png or .svg file.

    Raises:
        TriAttentionError: there is nothing to draw, matplotlib is missing, or the file cannot be written.
    """
    lengths, dense, compressed = curves(found)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TriAttentionError(
            "--plot needs matplotlib, which is not installed: run `pip install matplotlib`, or leave --plot out."
        ) from error
    assert found.traffic is not None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(lengths, dense, label="dense", color="tab:gray")
    axes.plot(lengths, compressed, label=f"compressed, budget {found.rules.budget:,}", color="tab:blue")
    limit = found.dense_fits or 0
    if limit < found.workload.length:
        axes.axvspan(max(limit, lengths[0]), lengths[-1], color="tab:red", alpha=0.1, label="dense does not fit")
    axes.set_xlabel("tokens of each request, prompt included")
    axes.set_ylabel("GB that one GPU reads per decode step")
    axes.set_title(f"{found.model.sizes.model_type}, {found.traffic.requests:,} requests: arithmetic, no measurement")
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise TriAttentionError(f"Cannot write {path} ({error.strerror}): choose another --plot.") from error
