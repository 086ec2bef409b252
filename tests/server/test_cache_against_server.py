"""The cache for transformers keeps what the server keeps: the same tokens, the same positions, round by round."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import harness
import kept_probe
from harness import BUDGET, INTERVAL, RECENT, compression, prompt
from sets import wide
from sglang_triattn.config import Config
from sglang_triattn.kernels.score.value_size import value_count, value_size_torch
from sglang_triattn.kernels.select.reference import importance_torch
from sglang_triattn.rounds.rules import RoundRules, complete
from sglang_triattn.rounds.scoring import build_scorer
from sglang_triattn.stats.file import load_stats, save_stats
from sglang_triattn.transformers_cache.cache import CompactedCache
from sglang_triattn.transformers_cache.feed import feed
from sglang_triattn.transformers_cache.policy import Setting

MARGIN = 2e-5
"""Between the last token that stays and the first that goes, in standard deviations. Below it, sums that run in another
order may decide, and the case needs another prompt."""


@pytest.fixture(scope="module")
def watched(serve, tmp_path_factory):
    """`watched(*args)` returns a Client and a function that returns what the probe wrote since its last call."""
    folder = tmp_path_factory.mktemp("kept")
    harness.install_plugin(folder, "kept_probe", Path(kept_probe.__file__).read_text())
    file = folder / "held.jsonl"

    def start(*args: str):
        client = serve(*args, env={"PYTHONPATH": harness.python_path(folder), "PROBE_FILE": str(file)})
        file.write_text("")
        return client, lambda: harness.read_lines(file)

    return start


def kept_by_server(batches: list[dict], rid: str) -> list[torch.Tensor]:
    """Positions [L, H_kv, kept] that each head holds after each round of a request."""
    held = [torch.tensor(batch[rid]) for batch in batches if rid in batch]
    known: list[list[dict[int, int]]] = [[{} for _ in heads] for heads in held[0]]
    seen, kept = 0, []
    for before, now in pairwise([held[0][..., :0], *held]):
        stayed = torch.zeros_like(now, dtype=torch.bool)
        for layer, heads in enumerate(known):
            for head, positions in enumerate(heads):
                numbers = now[layer, head].tolist()
                stayed[layer, head] = torch.tensor([number in positions for number in numbers])
                # New entries come last, in order.
                new = [number for number in numbers if number not in positions]
                assert numbers[len(numbers) - len(new) :] == new
                assert len(set(numbers)) == len(numbers)
                positions.update({number: seen + place for place, number in enumerate(new)})
        staying = int(stayed[0, 0].sum())
        assert bool((stayed.sum(-1) == staying).all())
        seen += now.shape[-1] - staying
        if staying < before.shape[-1]:
            places = [
                [sorted(positions[number] for number in numbers[:staying]) for numbers, positions in pairs]
                for pairs in (zip(heads.tolist(), known[layer], strict=True) for layer, heads in enumerate(now))
            ]
            kept.append(torch.tensor(places))
    return kept


class Watched:
    """The server's scorer, which also records how clear its decisions were."""

    def __init__(self, config: RoundRules, stats, pools) -> None:
        self.config, self.kv_heads, self.pools, self.margins = config, stats.num_kv_heads, pools, []
        self.scorer = build_scorer(config, stats, pools.k_buffers, pools.v_buffers, context=len(pools.k_buffers[0]))

    def keep(self, slots, lengths, next_positions, keep, recent):
        sizes = value_size_torch(self.pools.v_buffers, slots, lengths, recent, self.scorer.lookups, self.config.recency)
        sizes = sizes.sqrt() if self.scorer.lookups is None else sizes
        importance = torch.zeros_like(sizes)
        if self.config.value_share != 1:
            scores = self.scorer.scores(slots, lengths, next_positions, recent)
            importance = importance_torch(
                scores, lengths, recent, selection=self.config.selection, num_kv_heads=self.kv_heads
            )
        margins = []
        if large := value_count(keep, recent, self.config.value_share):
            sizes = sizes[..., : importance.shape[-1] - recent]
            margins.append(margin(sizes, large))
            importance.scatter_(-1, sizes.topk(large).indices, float("inf"))
        self.margins.append(min([*margins, margin(importance, keep - recent)]))
        return self.scorer.keep(slots, lengths, next_positions, keep, recent)


def margin(ranks: torch.Tensor, kept: int) -> float:
    """Smallest lead of the last of `kept` over the next token; ranks: [..., N]."""
    ranked = ranks.sort(dim=-1, descending=True).values
    return float((ranked[..., kept - 1] - ranked[..., kept]).min())


# Flags of the server, what they change in the settings, its page size, and a prompt without rounds too close to call.
CASES = {
    "default": ((), {}, 1, prompt(15, 50)),
    "union-remapped": ((), {"selection": "union"}, 1, prompt(7, 50)),
    "shared-mean-pages": ((), {"selection": "shared-mean"}, 16, prompt(8, 50)),
    "per-head": ((), {"selection": "per-head"}, 1, prompt(9, 50)),
    "scores-pages": ((), {"value_share": 0.0}, 16, prompt(10, 50)),
    "compacted-prompt": (
        ("--chunked-prefill-size", "64"),
        {"selection": "shared-mean", "prompt": "compact", "budget_scope": "total"}, 1, prompt(11, 300),
    ),
    # Statistics with weights, which choose alone by default, or with scores.
    "look-ups": ((), {}, 1, prompt(18, 50)),
    "look-ups-half": ((), {"value_share": 0.5}, 1, prompt(16, 50)),
    "look-ups-recency": ((), {"recency": 0.5}, 1, prompt(18, 50)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["default", *map(wide, list(CASES)[1:-1]), "look-ups-recency"])
def test_a_live_server_keeps_the_same_positions(watched, tiny, tmp_path, name):
    """Prevents a benchmark of the cache from measuring decisions other than the server's."""
    more, changes, page_size, ids = CASES[name]
    stats = load_stats(tiny.stats)
    if name.startswith("look-ups"):
        shape = (stats.mean.shape[0], stats.num_kv_heads, stats.mean.shape[-1] + stats.head_dim)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        stats = replace(stats, lookups=drawn)
        save_stats(stats, tmp_path / "lookups.safetensors")
        more = ("--triattention-stats", str(tmp_path / "lookups.safetensors"))
    flags = [word for name in changes for word in ("--triattention-" + name.replace("_", "-"), str(changes[name]))]
    client, batches = watched("--page-size", str(page_size), *flags, *more)
    response = client.generate(ids, 260)
    served = kept_by_server(batches(), response["meta_info"]["id"])
    report = compression(response)
    assert len(served) == report["rounds"] >= 5

    config = Config(budget=BUDGET, interval=INTERVAL, recent=RECENT, **changes)
    policies, kept = [], []

    def make_policy(pools):
        policies.append(Watched(complete(config, weighed=stats.lookups is not None), stats, pools))
        return policies[-1]

    model, everything = tiny.load(), ids + response["output_ids"][:-1]
    settings = [Setting(config, make_policy), config]
    cache = CompactedCache.for_model(
        model, settings, stats,
        capacity=len(everything), prompt_length=len(ids), page_size=page_size,
    )  # fmt: skip
    cache.rows.after_round = lambda row, _: kept.append(cache.rows.positions_of(row)) if row == 0 else None
    feed(model, cache, everything, chunk=64 if name == "compacted-prompt" else 512)
    assert cache.rows.report(0).to_dict() == report
    assert cache.rows.report(1) == cache.rows.report(0)
    assert torch.equal(cache.rows.positions_of(1), cache.rows.positions_of(0))
    assert len(kept) == len(served)
    for number, (mine, theirs) in enumerate(zip(kept, served, strict=True)):
        assert policies[0].margins[number] > MARGIN, f"round {number} is too close to call"
        assert torch.equal(mine, theirs), f"round {number}, margin {policies[0].margins[number]}"
