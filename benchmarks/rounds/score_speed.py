"""How fast does the scorer run, against copying the same keys and against a straightforward version?

The rival does what is usual elsewhere: for each request and layer it gathers the keys, repeats them for every query
head and goes over the 17 offsets one by one. Both score the same keys, and no figure is printed unless they agree. Runs
alternate, so that a machine that slows down slows both; figures are from the fastest, least disturbed run of each.

The scorer is the one that serves. `milliseconds` is scoring alone, as a round does it piece by piece before it selects;
`keep_milliseconds` is all of `Scorer.keep`, selection `union` included. `share_of_copy_bandwidth` relates the key bytes
per second of scoring to the bytes per second that a plain copy of as many bytes reads and writes on the same device in
the same run.

    python -m benchmarks.rounds.score_speed --json speed.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.common import MODELS, Model, report
from sglang_triattn.kernels.score.tables import OFFSETS, ScoreTables, build_tables
from sglang_triattn.kernels.scorer import Scorer

RECENT = 128
TOLERANCE = 2e-3
"""Largest difference from the rival, relative to the largest score; the rival's phases are float32, computed from a
float64 angle."""


def rival(pools, slots, lengths, next_positions, raw: dict, kv_heads: int) -> list[torch.Tensor]:
    """Per request [L, H_q, n] float32, computed one layer and one offset at a time."""
    answers = []
    for r, length in enumerate(lengths.tolist()):
        layers = []
        for layer, pool in enumerate(pools):
            keys = pool[slots[r, :length].long()].float()  # [n, H_kv, d]
            keys = keys.repeat_interleave(raw["mean"].shape[1] // kv_heads, dim=1).transpose(0, 1)  # [H_q, n, d]
            real, imag = keys.chunk(2, dim=-1)
            mean, size = raw["mean"][layer][:, None], torch.sqrt(real * real + imag * imag)
            total = torch.zeros(keys.shape[:2], device=keys.device)
            for offset in OFFSETS:
                angle = (next_positions[r].double() + offset) * raw["inv_freq"]
                cos, sin = angle.cos().float(), angle.sin().float()
                turned_re = mean.real * cos - mean.imag * sin
                turned_im = mean.real * sin + mean.imag * cos
                total += (turned_re * real + turned_im * imag).sum(-1)
            extra = ((raw["abs_mean"][layer] - raw["mean"][layer].abs())[:, None] * size).sum(-1)
            layers.append(total / len(OFFSETS) + extra)
        answers.append(torch.stack(layers))
    return answers


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_bandwidth(count: int, device: str) -> Callable[[], float]:
    """Returns a function that measures the bytes per second that a copy of `count` bytes reads and writes."""
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: 2 * count / seconds(lambda: target.copy_(source), device)


def measure(model: Model, layers: int, requests: int, tokens: int, device: str, repeats: int) -> dict:
    """One row of the report, for the first `layers` layers of `model`."""
    generator = torch.Generator().manual_seed(0)
    frequencies, dtype = model.head_dim // 2, torch.bfloat16
    shape = (layers, model.q_heads, frequencies)
    mean = torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    abs_mean = mean.abs() * 1.3
    inv_freq = 1e6 ** (-torch.arange(frequencies, dtype=torch.float64) / frequencies)
    tables: ScoreTables = build_tables(mean, abs_mean, inv_freq, 1.0, "half", model.kv_heads, device)
    raw = {"mean": mean.to(device), "abs_mean": abs_mean.to(device), "inv_freq": inv_freq.to(device)}
    count = requests * tokens
    pools = [
        torch.randn(count, model.kv_heads, model.head_dim, generator=generator).to(device, dtype) for _ in range(layers)
    ]
    slots = torch.randperm(count, generator=generator).to(device, torch.int32).view(requests, tokens)
    lengths = torch.full((requests,), tokens, device=device)
    positions = torch.full((requests,), 20_000, device=device)

    scorer = Scorer(pools, tables, num_tokens=tokens, longest=tokens)
    row, recent = (slots, lengths, positions), min(RECENT, tokens // 8)

    def ours():
        # The rival does not know of newest tokens, whose keys need not be read.
        for _ in scorer.pieces(*row, recent=0):
            pass

    def keep():
        scorer.keep(*row, tokens - tokens // 16, recent)

    def theirs():
        return rival(pools, slots, lengths, positions, raw, model.kv_heads)

    # The first runs compile and warm up; they also serve as the check.
    scores, expected = scorer.scores(*row), torch.stack(theirs())
    error = ((scores - expected).abs().max() / expected.abs().max()).item()
    if not error < TOLERANCE:
        raise SystemExit(f"{model.name}: the scorer and the rival differ by {error:.1e} of the largest score")
    key_bytes = count * layers * model.kv_heads * model.head_dim * dtype.itemsize
    del scores, expected
    bandwidth = copy_bandwidth(key_bytes, device)
    bandwidth()
    keep()
    fast, slow, whole, copies = [], [], [], []
    for _ in range(repeats):
        copies.append(bandwidth())
        fast.append(seconds(ours, device))
        whole.append(seconds(keep, device))
        slow.append(seconds(theirs, device))
    ours_best, rival_best = min(fast), min(slow)
    return {
        "shape": f"{model.name} {requests}x{tokens}, {layers} layers, {device}",
        "milliseconds": ours_best * 1e3,
        "keep_milliseconds": min(whole) * 1e3,
        "rival_milliseconds": rival_best * 1e3,
        "speedup_over_rival": rival_best / ours_best,
        "share_of_copy_bandwidth": key_bytes / ours_best / max(copies),
        "relative_error": error,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of the scorer against a copy and against a plain version.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="layers to score (all on a GPU, 1 elsewhere: layers cost the same)")
    parser.add_argument("--repeats", type=int, default=5, help="alternated runs (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="1 layer, 3 runs, rows an eighth as long; less than a minute"
    )
    arguments = parser.parse_args(argv)
    rows = []
    for model in MODELS:
        layers = arguments.layers or (model.layers if arguments.device == "cuda" else 1)
        for requests, tokens in ((8, 2176), (1, 16384)):
            if arguments.quick:
                row = measure(model, 1, requests, tokens // 8, arguments.device, 3)
            else:
                row = measure(model, layers, requests, tokens, arguments.device, arguments.repeats)
            rows.append(row)
    report(rows, arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
