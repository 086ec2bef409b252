"""How many bytes does a round move, compared with the fewest possible?

Counted from the kernels' launch parameters, not measured: what each program loads and stores. A program that reads a
line repeatedly is counted once, because its row of importance (64 KiB for 16,384 tokens) stays in the cache.

The scorer's own minimum is to read every key once and write every score once. A whole round must also read every score
once more: whether a token stays depends on the mean and deviation of whole rows, so no score can be used before all are
there. `ratio_to_minimum` compares with these; `ratio_to_keys_and_writes` leaves out the second read.

Rows of the default settings cover a whole round with its moves, all of which are counted as if they were made: the
newest tokens' keys are not read, the values of the others are, and what each head of each layer keeps is moved.
`ratio_to_keys` compares with reading every key once.

    python -m benchmarks.rounds.score_traffic --json traffic.json
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from benchmarks.common import MODELS, PARTIAL, Model, report
from sglang_triattn.config import Config
from sglang_triattn.kernels.compact.reference import moves_of
from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.score.value_size import NEWEST, value_count
from sglang_triattn.kernels.select import SELECTIONS, selection_named
from sglang_triattn.kernels.select.importance_kernel import SCALE_ROWS, TOKENS
from sglang_triattn.rounds.rules import complete

KEY_BYTES = {"bf16": 2, "fp8": 1}
BUDGET = 2048


def round_bytes(model: Model, requests: int, tokens: int, key_bytes: int, selection: str) -> dict[str, int]:
    """Bytes of each part of one round for `requests` rows of `tokens` private tokens, "mean" aggregation."""
    rows = requests * model.layers * model.q_heads
    turned = model.rotary_dim or model.head_dim
    chunks, frequencies, others = -(-tokens // CHUNK), turned // 2, model.head_dim - turned
    group = model.q_heads // model.kv_heads
    programs = requests * model.layers * model.kv_heads * chunks
    sets = requests * selection_named(selection).sets(model.layers, model.kv_heads)
    keys = requests * tokens * model.layers * model.kv_heads
    blocks = -(-tokens // TOKENS)
    # A program of a grouped selection needs only its group's sums, over one layer or over all.
    scale_reads = blocks * rows * 8
    return {
        "keys": keys * model.head_dim * key_bytes,
        "scores written": rows * tokens * 4,
        "scores read": rows * tokens * 4,
        "slots": keys * 4,
        "query columns": programs * group * (3 * frequencies + others) * 4,
        "phases": programs * 2 * frequencies * 4,
        "sums written": rows * chunks * 8,
        "sums read": rows * chunks * 8 + -(-rows // SCALE_ROWS) * 8,
        "scales": rows * 8 + scale_reads,
        "importance": sets * tokens * 4 * 2,
        "kept": sets * min(BUDGET, tokens) * 8,
    }


def default_bytes(model: Model, requests: int, tokens: int, key_bytes: int) -> dict[str, int]:
    """Bytes of each part of one round with the default settings, K/V moves included."""
    config = complete(Config(budget=BUDGET))
    candidates = tokens - config.recent
    sets = requests * selection_named(config.selection).sets(model.layers, model.kv_heads)
    large = sets * value_count(BUDGET, config.recent, config.value_share)
    moves = sets * moves_of("fill", BUDGET - config.recent, candidates)
    vector = model.head_dim * key_bytes
    # Scored like rows without their newest tokens; marks are written, read back and set in the importance.
    return round_bytes(model, requests, candidates, key_bytes, config.selection) | {
        "values": sets * candidates * vector,
        # Read from memory once: all programs of a row read the same values.
        "center": sets * min(config.recent, NEWEST) * (vector + 4),
        "value slots": sets * candidates * 4,
        "value sizes": sets * candidates * 4 * 2,
        "marks": large * (8 * 2 + 4),
        # As int64, read again when the moves are listed.
        "kept": sets * BUDGET * 8 * 2,
        "moves listed": moves * 2 * 4 * 2,
        "moves": moves * 2 * vector * 2,
    }


SCORER = ("keys", "scores written", "slots", "query columns", "phases", "sums written")


def rows_of(requests: int, lengths: tuple[int, ...], selections: Sequence[str]) -> list[dict]:
    rows = []
    for model, tokens, (name, key_bytes) in itertools.product((*MODELS, PARTIAL), lengths, KEY_BYTES.items()):
        shape = f"{model.name} {requests}x{tokens} {name}"
        parts = round_bytes(model, requests, tokens, key_bytes, "union")
        keys = parts["keys"]
        least = keys + parts["scores written"]
        total = sum(parts[part] for part in SCORER)
        rows.append(row_of(shape, "scores only", total, keys) | ratios(total, least, least))
        for selection in selections:
            total = sum(round_bytes(model, requests, tokens, key_bytes, selection).values())
            rows.append(row_of(shape, selection, total, keys) | ratios(total, least + parts["scores read"], least))
        rows.append(row_of(shape, "default", sum(default_bytes(model, requests, tokens, key_bytes).values()), keys))
    return rows


def row_of(shape: str, selection: str, total: int, keys: int) -> dict:
    return {"shape": shape, "selection": selection, "bytes": total, "ratio_to_keys": total / keys}


def ratios(total: int, least: int, least_without_reading: int) -> dict[str, float]:
    return {"ratio_to_minimum": total / least, "ratio_to_keys_and_writes": total / least_without_reading}


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes moved by a round, against the fewest possible.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--requests", type=int, default=8, help="requests due at once (%(default)s)")
    # Not per-layer-head: one importance per head of each layer is a large part of so few bytes.
    parser.add_argument("--selections", nargs="+", choices=SELECTIONS, default=SELECTIONS[:3])
    parser.add_argument("--quick", action="store_true", help="the same: nothing here takes time")
    arguments = parser.parse_args()
    report(rows_of(arguments.requests, (2176, 16384), arguments.selections), arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
