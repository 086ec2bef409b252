"""Which criterion predicts attention, in which layers, and does the concentration of the queries predict it?

Texts (`benchmarks.quality.streams`, task `text`) go through a model once, with everything in sight. At several places
the older private tokens are ranked by what a round could go by, and a quarter of them is chosen for each layer and KV
head. What the queries of the next tokens then really attended to is known: a criterion's `attention` is the share of
their attention to older tokens that falls on the chosen ones. `output` is the same for attention times the size of the
value, which is what a token adds to the layer's output: much attention goes to tokens that add next to nothing.

    python -m benchmarks.quality.predict_attention --model FOLDER --stats FILE --json predict_attention.json
    python -m benchmarks.quality.predict_attention --model FOLDER --stats prose=A.safetensors code=B.safetensors

Criteria are `score`, for each statistics file; `value-size`; `newest`; `random`, which gets a quarter; and `best`, the
tokens with most attention. The tables: all criteria, over all layers and heads; the score by the concentration of the
heads; the score and the value size in each layer. `rank_correlation` is Spearman's, between a head's concentration and
the attention that its score captures relative to `best`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import print_table, write
from benchmarks.quality.model import load_model, load_tokenizer
from benchmarks.quality.queries import QueryLog, recording
from benchmarks.quality.streams.format import StreamError, read_streams
from benchmarks.quality.streams.make import FORMS, MIN_TOKENS, length_by_tokenizer, make_streams
from benchmarks.quality.tokens import Tokens, tokenized
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.score.value_size import value_size_torch
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.rounds.scoring import score_tables
from sglang_triattn.stats.concentration import concentration
from sglang_triattn.stats.file import QueryStats, check_stats, load_stats
from sglang_triattn.transformers_cache.cache import shape_of
from sglang_triattn.transformers_cache.feed import compute_dense

KEPT = 0.25
RECENT = 128
"""Newest tokens, which are not ranked: a round keeps them anyway."""
AHEAD = 256
"""Number of queries whose attention is predicted."""
TEXTS = 4
BOUNDS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01)
"""Bounds of the concentration bins."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    try:
        _run(options)
    except (StreamError, TriAttentionError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _run(options: argparse.Namespace) -> None:
    model = load_model(options.model, options.device, options.dtype)
    shape = shape_of(model)
    stats = {name: check_stats(load_stats(file), shape) for name, file in options.stats}
    streams = _streams(options, load_tokenizer(options.model))
    captures = Captures.of(model, streams, stats)
    name, first = next(iter(stats.items()))
    tables = [
        captures.criteria(stats),
        captures.by_concentration(score_name(name), first),
        captures.layers(score_name(name), first),
    ]
    for table in tables:
        print_table(list(table[0]), [list(row.values()) for row in table])
    setting = {"model": Path(options.model).name, "texts": [stream.id for stream in streams], "kept": KEPT}
    write({"setting": setting, "rows": [row for table in tables for row in table]}, options.json, options.quick)


@dataclass
class Captures:
    """Attention to older tokens, and the same times the size of their values, summed over places and texts.

    Attributes:
        on: criterion -> [2, L, H_kv] float64, what falls on the tokens that it chose.
        total: [2, L, H_kv] float64, what falls on all older tokens.
    """

    on: dict[str, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | float = 0.0

    @classmethod
    def of(cls, model: Any, streams: Sequence[Tokens], stats: Mapping[str, QueryStats]) -> Captures:
        """Runs `streams`; `stats` holds the model's statistics by name."""
        sums = cls()
        for stream in streams:
            print(f"  {stream.id}", file=sys.stderr, flush=True)
            for on, total in captured(model, stream, stats):
                sums.total = sums.total + total
                for name, value in on.items():
                    sums.on[name] = sums.on.get(name, 0) + value
        return sums

    def shares(self, name: str, *where: Any) -> list[float]:
        """Shares of attention and output that fall on a criterion's choice, in some layers and heads."""
        return [(self.on[name][(kind, *where)].sum() / self.total[(kind, *where)].sum()).item() for kind in (0, 1)]

    def criteria(self, stats: Mapping[str, QueryStats]) -> list[dict]:
        rows = []
        for name in self.on:
            own = next((one for label, one in stats.items() if score_name(label) == name), None)
            spread = None if own is None else self._spread(own)
            rows.append(
                {
                    "criterion": name,
                    **dict(zip(("attention", "output"), self.shares(name), strict=True)),
                    "concentration": None if own is None else spread.mean().item(),
                    "rank_correlation": None if own is None else _spearman(spread, self._of_best(name)),
                }
            )
        return rows

    def by_concentration(self, name: str, stats: QueryStats) -> list[dict]:
        """The score in heads whose concentration lies between two bounds, with the best and the newest."""
        spread, rows = self._spread(stats), []
        for low, high in itertools.pairwise(BOUNDS):
            where = (low <= spread) & (spread < high)
            if where.any():
                shares = {kind: self.shares(kind, where)[0] for kind in (name, "newest", "best")}
                rows.append({"from": low, "to": high, "heads": int(where.sum()), **shares})
        return rows

    def layers(self, name: str, stats: QueryStats) -> list[dict]:
        spread, part = self._spread(stats).mean(1), self.total[0].sum(1) / self.total[0].sum()
        return [
            {
                "layer": layer,
                "concentration": spread[layer].item(),
                "part_of_attention": part[layer].item(),
                **{kind: self.shares(kind, layer)[0] for kind in (name, "value-size", "newest", "best")},
                **{f"{kind} output": self.shares(kind, layer)[1] for kind in (name, "value-size")},
            }
            for layer in range(len(spread))
        ]

    def _spread(self, stats: QueryStats) -> torch.Tensor:
        """[L, H_kv]: mean concentration of each group of query heads."""
        return concentration(stats).unflatten(1, (self.total.shape[-1], -1)).mean(-1)

    def _of_best(self, name: str) -> torch.Tensor:
        """[L, H_kv]: attention that a criterion captures, relative to the best choice."""
        return self.on[name][0] / self.on["best"][0]


def captured(
    model: Any, stream: Tokens, stats: Mapping[str, QueryStats]
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Yields for each place of the text: criterion -> [2, L, H_kv] of what it chose, and [2, L, H_kv] of all older
    tokens.

    Index 0 is attention, index 1 attention times the size of the value, summed over the next AHEAD queries and the
    query heads of a group.
    """
    shape, prompt = shape_of(model), len(stream.prompt)
    ids = torch.tensor(stream.prompt + stream.private)
    log = QueryLog(shape.num_layers, shape.rope)
    with recording({0: log}):
        dense = compute_dense(model, ids)
    keys, values = ([getattr(layer, kind)[0].transpose(0, 1) for layer in dense.layers] for kind in ("keys", "values"))
    for place in range(prompt + 4 * AHEAD, len(ids) - AHEAD + 1, AHEAD):
        older = torch.arange(prompt, place - RECENT, device=model.device)
        attention = torch.stack([attended(log, keys[i], i, place, older) for i in range(shape.num_layers)])
        sizes = torch.stack([layer[older].norm(dim=-1).T.double() for layer in values])
        added = torch.stack([attention, attention * sizes])  # [2, L, H_kv, older]
        chosen = _chosen(keys, values, older, place, stats)
        chosen["best"] = attention.topk(_count(older), dim=-1).indices
        found = {name: added.gather(-1, kept.expand(2, *kept.shape)).sum(-1) for name, kept in chosen.items()}
        total = added.sum(-1)
        found["random"] = total * _count(older) / len(older)
        yield {name: value.cpu() for name, value in found.items()}, total.cpu()


def attended(log: QueryLog, keys: torch.Tensor, layer: int, place: int, older: torch.Tensor) -> torch.Tensor:
    """[H_kv, older] float64: attention of the queries from `place` on. keys: [n, H_kv, head_dim], post-RoPE."""
    until = place + AHEAD
    queries = log.after_rope(layer, place, until).unflatten(0, (keys.shape[1], -1))  # [H_kv, G, AHEAD, d]
    logits = torch.einsum("hgqd,nhd->hgqn", queries, keys[:until]) * keys.shape[-1] ** -0.5
    places = torch.arange(until, device=keys.device)
    later = places > places[place:, None]
    return logits.masked_fill_(later, float("-inf")).softmax(-1)[..., older].sum((1, 2), dtype=torch.float64)


def _chosen(
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    older: torch.Tensor,
    place: int,
    stats: Mapping[str, QueryStats],
) -> dict[str, torch.Tensor]:
    """Criterion -> [L, H_kv, kept] indices into `older`."""
    kv_heads, count = keys[0].shape[1], _count(older)
    lengths, slots = older.new_tensor([len(older)]), older[None]
    found = {}
    for name, one in stats.items():
        tables = score_tables(one, kv_heads, older.device)
        scorer = Scorer(keys, tables, num_tokens=len(older), longest=len(older), selection="per-layer-head")
        found[score_name(name)] = scorer.keep(slots, lengths, older.new_tensor([place]), count, 0)[0]
    # The center is taken over tokens that come after the ranked ones.
    row = torch.arange(int(older[0]), place, device=older.device)[None]
    sizes = value_size_torch(values, row, lengths + RECENT, RECENT)[0, ..., : len(older)]
    found["value-size"] = sizes.topk(count, dim=-1).indices
    newest = torch.arange(len(older) - count, len(older), device=older.device)
    found["newest"] = newest.expand(len(keys), kv_heads, -1)
    return found


def _spearman(one: torch.Tensor, other: torch.Tensor) -> float:
    ranks = torch.stack([x.flatten().argsort().argsort().double() for x in (one, other)])
    return torch.corrcoef(ranks)[0, 1].item()


def score_name(name: str) -> str:
    return f"score {name}".strip()


def _count(older: torch.Tensor) -> int:
    return round(KEPT * len(older))


def _streams(options: argparse.Namespace, tokenizer: Any) -> list[Tokens]:
    if options.streams:
        made = read_streams(options.streams)
    else:
        length = length_by_tokenizer(tokenizer, 2 * MIN_TOKENS)
        made = make_streams(options.form, 1, {"text": 1 if options.quick else TEXTS}, length)
    return [tokenized(stream, tokenizer) for stream in made]


def _named(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    return (name, file) if equals else ("", text)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--stats", required=True, nargs="+", type=_named, metavar="[NAME=]FILE", help="its statistics")
    parser.add_argument("--streams", metavar="FILE", help="of benchmarks.quality.streams; by default texts are made")
    parser.add_argument("--form", choices=FORMS, default=FORMS[1], help="of the texts that it makes")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one text")
    parser.add_argument("--device", help="by default cuda if there is one, else cpu")
    parser.add_argument("--dtype", help="by default float32 on the CPU, else the checkpoint's")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
