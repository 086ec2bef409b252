"""An independent account of what a compressed request computes, by `transformers` and the paper's formulas.

Nothing here uses the project's code. The same tokens go through the model with evicted positions masked out: no row,
no slot, no page, no compaction, just "this query may see these positions". Keys are rotated back and scored by the
definition (phases between the next position and each key's own position, 17 offsets, float64), which is another
formula than the one that serves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from harness import BUDGET, INTERVAL, RECENT, TinyModel

OFFSETS = [2**power for power in range(17)]


@dataclass
class Oracle:
    """Runs one request.

    Args:
        model: transformers model in float32.
        mean, abs_mean: the statistics, [L, H_q, F].
        inv_freq: [F] float64, of the first 2F dims of each head.
        num_kv_heads: KV heads.
        budget, interval, recent: the server's settings, in tokens.
        selection: "shared-mean" or "union".
        aggregation: "mean" or "max".
        interleaved: whether dims 2f and 2f + 1 turn together, not f and f + F.
        total: whether the frozen tokens count in the budget.
    """

    model: torch.nn.Module
    mean: torch.Tensor
    abs_mean: torch.Tensor
    inv_freq: torch.Tensor
    num_kv_heads: int
    budget: int
    interval: int
    recent: int
    selection: str = "shared-mean"
    aggregation: str = "mean"
    interleaved: bool = False
    total: bool = False

    @torch.no_grad()
    def logprobs(self, ids: list[int], prompt_length: int, frozen: int) -> tuple[torch.Tensor, list[list[int]]]:
        """Log-probabilities after each token from the last prompt token on, and the kept positions of each round.

        Args:
            ids: prompt and output.
            prompt_length: tokens of the prompt, computed in one pass.
            frozen: first position that may be evicted.

        Returns:
            [len(ids) - prompt_length + 1, vocabulary] float32, and per round the visible positions after it.
        """
        keep = max(self.budget - frozen, self.recent, 1) if self.total else self.budget
        cache = DynamicCache()
        visible = torch.zeros(len(ids), dtype=torch.bool)
        rounds, outputs = [], []
        done, size = 0, prompt_length
        while True:
            visible[done : done + size] = True
            logits = self._forward(ids[done : done + size], done, visible, cache)
            outputs.append(logits[-1:] if done == 0 else logits)
            done += size
            if done == len(ids):
                return torch.cat(outputs).log_softmax(-1), rounds
            private = visible[:done].nonzero().flatten()
            private = private[private >= frozen]
            if len(private) >= keep + self.interval:
                dropped = private[~self._kept(cache, private, done, keep)]
                visible[dropped] = False
                rounds.append(visible[:done].nonzero().flatten().tolist())
                private = private[visible[private]]
            # Up to the next round every query sees what it sees now, and the tokens since.
            size = min(keep + self.interval - len(private), len(ids) - done)

    def _forward(self, ids: list[int], start: int, visible: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        total = start + len(ids)
        query = torch.arange(start, total)[:, None]
        seen = (torch.arange(total)[None] <= query) & visible[None, :total]
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        output = self.model(
            input_ids=torch.tensor([ids]),
            attention_mask=mask,
            position_ids=torch.arange(start, total)[None],
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[0].float()

    def _kept(self, cache: DynamicCache, private: torch.Tensor, next_position: int, keep: int) -> torch.Tensor:
        """Which of the private positions stay: the newest, and the best others by their merged z-scores."""
        candidates = private[: len(private) - self.recent] if self.recent else private
        rows = []
        for layer in range(self.mean.shape[0]):
            keys = cache.layers[layer].keys[0].double()[:, candidates]
            for head in range(self.mean.shape[1]):
                group = head // (self.mean.shape[1] // self.num_kv_heads)
                score = self._score(keys[group], candidates, layer, head, next_position)
                rows.append((score - score.mean()) / score.std(unbiased=False).clamp_min(1e-6))
        best = torch.stack(rows).mean(0) if self.selection == "shared-mean" else torch.stack(rows).amax(0)
        order = sorted(range(len(candidates)), key=lambda index: (-best[index].item(), index))
        kept = torch.zeros(len(private), dtype=torch.bool)
        kept[order[: keep - self.recent]] = True
        kept[len(candidates) :] = True
        return kept

    def _score(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int, head: int, next_position: int
    ) -> torch.Tensor:
        pairs = len(self.inv_freq)
        turning = keys[:, : 2 * pairs]
        parts = (turning[:, 0::2], turning[:, 1::2]) if self.interleaved else turning.chunk(2, dim=1)
        turned = torch.complex(*parts)
        plain = turned * torch.polar(torch.ones(()).double(), -positions[:, None] * self.inv_freq)
        mean = self.mean[layer, head].to(torch.complex128)
        phase = (mean * plain.conj()).angle()
        size = mean.abs() * plain.abs()
        spread = ((self.abs_mean[layer, head].double() - mean.abs()) * plain.abs()).sum(-1)
        distance = next_position - positions[:, None]
        terms = [(size * torch.cos(self.inv_freq * (distance + offset) + phase)).sum(-1) for offset in OFFSETS]
        future = torch.stack(terms)
        return (future.mean(0) if self.aggregation == "mean" else future.amax(0)) + spread


def oracle_of(tiny: TinyModel) -> Oracle:
    """The oracle of a test model under the settings that the tests' servers run with."""
    stats, model = load_file(tiny.stats), tiny.load()
    return Oracle(
        model=model,
        mean=torch.complex(stats["mean_re"], stats["mean_im"]),
        abs_mean=stats["abs_mean"],
        inv_freq=model.model.rotary_emb.inv_freq.double(),
        num_kv_heads=tiny.num_kv_heads,
        budget=BUDGET,
        interval=INTERVAL,
        recent=RECENT,
        interleaved=tiny.interleaved,
    )
