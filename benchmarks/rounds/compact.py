"""What does a round's compaction move, how long does it take, and how much memory comes back?

Two tables. The first: bytes and time of remap, slide and fill for 8 requests that each drop 128 of 2,176 tokens and
keep the newest `recent`. `minimum_bytes` counts the fewest copies that empty the stretch before the newest tokens: each
kept token in it is read once and written once. `ratio_to_own_minimum` compares a strategy's bytes, its lists of moves
included, with the rows that it moves; `ratio_to_keys` compares them with the keys that the round's scoring reads. The
second: slots that come back when 90 % of 16,384 tokens are evicted, by page size, with compaction and without
("none": a page is free when all its tokens are evicted). Which tokens stay is random.

    python -m benchmarks.rounds.compact --json compact.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence

import torch

from benchmarks.common import MODELS, Model, report
from sglang_triattn.kernels.compact.reference import list_moves, remap
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.rounds.plan import ceil_align

SELECTIONS = ("shared-mean", "per-head", "per-layer-head")
RECENT = (128, 512)
"""One interval, and a quarter of the budget."""
LIST_BYTES = 8
"""Bytes of one move: source and target slot, 4 bytes each, read by every program that makes the move."""


def kept_sets(shape: tuple[int, ...], private: int, keep: int, recent: int, device: str) -> torch.Tensor:
    """[*shape, keep] int64, ascending: the newest `recent` of `private` tokens and random others."""
    older = torch.rand(*shape, private - recent, generator=torch.Generator().manual_seed(0)).argsort(-1)
    kept = torch.cat([older[..., : keep - recent], torch.arange(private - recent, private).expand(*shape, -1)], -1)
    return kept.sort(-1).values.to(device)


def shape_of_sets(selection: str, requests: int, model: Model) -> tuple[int, ...]:
    return {
        "shared-mean": (requests,),
        "per-head": (requests, model.kv_heads),
        "per-layer-head": (requests, model.layers, model.kv_heads),
    }[selection]


def count_bytes(model: Model, kept: torch.Tensor, strategy: str, private: int, recent: int) -> tuple[int, int, int]:
    """Bytes of a round over all layers: moved, of the strategy's own rows alone, and of the fewest copies."""
    row = 2 * model.head_dim  # bytes of one head's K or V in bf16
    # Each kept set applies to K and V of every layer and head that it serves.
    uses = 2 * model.layers * model.kv_heads * kept.shape[0] // kept[..., 0].numel()
    cut = kept.shape[-1] - recent
    fewest = int(((kept >= cut) & (kept < private - recent)).sum()) * uses * 2 * row
    if strategy == "remap":
        return 0, 0, fewest
    indices = torch.arange(private).expand(kept.shape[0], -1)
    sources, targets = list_moves(indices, kept.cpu(), strategy, cut=cut)
    own = int((sources != targets).sum()) * uses * 2 * row
    return own + sources.numel() * uses * LIST_BYTES, own, fewest


def milliseconds(model: Model, selection: str, strategy: str, requests: int, private: int, keep: int, recent: int,
                 device: str, layers: int, repeats: int) -> float:  # fmt: skip
    """Median time of one round's compaction of the first `layers` layers.

    Raises:
        SystemExit: the first run, which is not timed, does not bring the kept tokens of every head to the slots that
            stay.
    """
    count = requests * private
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    slots = order.to(device, torch.int32).view(requests, private)
    part = Model(model.name, layers, model.q_heads, model.kv_heads, model.head_dim)
    kept = kept_sets(shape_of_sets(selection, requests, part), private, keep, recent, device)
    shape = (count, model.kv_heads, model.head_dim)
    pools = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2 * layers)]
    for pool in pools:
        pool[..., 0] = torch.rand(shape[:2], device=device)
    expected = [held(pool, slots, kept_of(kept, layer % layers, model)) for layer, pool in enumerate(pools)]
    mover = None if strategy == "remap" else Mover(pools[:layers], pools[layers:])
    cut = keep - recent if strategy == "fill" else keep
    # Columns of the slots that stay.
    stays = torch.cat([torch.arange(cut), torch.arange(private - (keep - cut), private)]).to(device)
    stays = stays.expand(requests, model.kv_heads, -1)
    times = []
    for run in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        moved = remap(slots, kept) if mover is None else mover.move(slots, kept, strategy, cut=cut)
        wait(device)
        times.append(1e3 * (time.perf_counter() - start))
        if run == 0:
            row = slots if moved is None else moved
            if not all(torch.equal(a, held(pool, row, stays)) for a, pool in zip(expected, pools, strict=True)):
                raise SystemExit(f"{model.name}: {strategy} with {selection} loses kept tokens")
    return statistics.median(times[1:])


def kept_of(kept: torch.Tensor, layer: int, model: Model) -> torch.Tensor:
    """[R, H_kv, keep]: the kept sets of one layer."""
    kept = kept[:, layer] if kept.ndim == 4 else kept
    return kept if kept.ndim == 3 else kept[:, None].expand(-1, model.kv_heads, -1)


def held(pool: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[R, H_kv, keep]: the marks that `pool` holds for `tokens` of a row, sorted because order does not matter."""
    at = slots.long()[:, None].expand(-1, tokens.shape[1], -1).gather(2, tokens)
    return pool[..., 0].T.gather(1, at.transpose(0, 1).flatten(1)).unflatten(1, (len(slots), -1)).sort(-1).values


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(arguments: argparse.Namespace, requests: int, private: int, keep: int) -> list[dict]:
    rows = []
    for model, selection, recent in itertools.product(MODELS, SELECTIONS, RECENT):
        layers = min(model.layers, arguments.layers or (model.layers if arguments.device == "cuda" else 1))
        kept = kept_sets(shape_of_sets(selection, requests, model), private, keep, recent, "cpu")
        keys = requests * private * model.layers * model.kv_heads * model.head_dim * 2
        for strategy in ("remap", "slide", "fill") if selection == "shared-mean" else ("slide", "fill"):
            page_size = 1 if strategy == "remap" else 16
            moved, own, fewest = count_bytes(model, kept, strategy, private, recent)
            rows.append(
                {
                    "shape": f"{model.name} {requests}x{private} to {keep}",
                    "strategy": strategy,
                    "selection": selection,
                    "recent": recent,
                    "page_size": page_size,
                    "bytes_moved": moved,
                    "minimum_bytes": 0 if strategy == "remap" else fewest,
                    "ratio_to_minimum": moved / fewest,
                    "ratio_to_own_minimum": moved / own if own else 1.0,
                    "ratio_to_keys": moved / keys,
                    "evicted_tokens": requests * (private - keep),
                    "freed_slots": requests * freed_slots(private, keep, page_size),
                    "milliseconds": milliseconds(
                        model, selection, strategy, requests, private, keep, recent, arguments.device, layers,
                        arguments.repeats,
                    ),
                    "timed_layers": layers,
                }
            )  # fmt: skip
    return rows


def freed_slots(private: int, keep: int, page_size: int) -> int:
    """Slots that come back once the kept tokens are at the front."""
    return ceil_align(private, page_size) - ceil_align(keep, page_size)


def freed_without_compaction(kept: torch.Tensor, private: int, page_size: int) -> int:
    """Slots of the pages whose tokens were all evicted."""
    stays = torch.zeros(ceil_align(private, page_size), dtype=torch.bool)
    stays[kept] = True
    return int((~stays.view(-1, page_size).any(1)).sum()) * page_size


def measure_pages(private: int, keep: int) -> list[dict]:
    kept = kept_sets((1,), private, keep, RECENT[0], "cpu")[0]
    rows = []
    for page_size in (1, 16, 32, 64, 128):
        strategies = {
            "none": freed_without_compaction(kept, private, page_size),
            "remap" if page_size == 1 else "fill": freed_slots(private, keep, page_size),
        }
        for strategy, freed in strategies.items():
            rows.append(
                {
                    "shape": f"1x{private} to {keep}",
                    "strategy": strategy,
                    "selection": "shared-mean",
                    "page_size": page_size,
                    "evicted_tokens": private - keep,
                    "freed_slots": freed,
                    "freed_share": freed / (private - keep),
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bytes, time and freed memory of a round's compaction.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, help="layers to time (all on a GPU, 1 elsewhere: layers cost the same)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 requests and 2 runs; less than a minute")
    arguments = parser.parse_args(argv)
    requests, arguments.repeats = (2, 2) if arguments.quick else (8, arguments.repeats)
    report(measure(arguments, requests, 2176, 2048) + measure_pages(16384, 1638), arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
