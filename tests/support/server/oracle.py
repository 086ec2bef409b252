"""An independent account of what a compressed request computes, from `transformers` and the paper's formulas.

Nothing here uses the project's code. The same tokens go through the model with evicted positions masked out: no row,
no slot, no page, no compaction, just "this query may see these positions". Keys are rotated back and scored by the
definition (phases between the next position and each key's own position, 17 offsets, float64), a different formula
from the one that serves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import DynamicCache

from harness import BUDGET, INTERVAL, RECENT
from tiny_model import TinyModel
from transformers_parts import RoundedCache, attention_of

TOLERANCE = 2e-3
"""Between served and recomputed log-probabilities, whose sums run in different orders."""

VALUE_SHARE = 0.8
"""The server's default for kept sets per head of each layer."""

OFFSETS = [2**power for power in range(17)]


@dataclass
class Oracle:
    """Runs one request.

    Args:
        model: transformers model in float32.
        mean, abs_mean: the statistics, [L, H_q, F].
        inv_freq: [F] float64, for the first 2F dims of each head.
        num_kv_heads: KV heads.
        budget, interval, recent: the server's settings, in tokens.
        selection: "shared-mean", "union", "per-head" or "per-layer-head".
        aggregation: "mean" or "max".
        unrotated: [L, H_q, U], the mean query in the later dims of a head; empty leaves them unscored.
        scaling: RoPE's factor on the keys, and on the queries, in the dims that it turns.
        interleaved: whether dims 2f and 2f + 1 rotate together, rather than f and f + F.
        stored: dtype that K and V are rounded to before anything reads them.
        total: whether frozen tokens count towards the budget.
        scored: the layers that the statistics are of; None for all.
        rotates: whether each of them has RoPE; None for all.
        window: tokens that a query of the other layers sees.
        reads: layers that read the keys and values of a scored one before them, and which one.
        stages: scored layers of each pipeline stage, which has kept sets of its own; empty for one stage.
        round_to: how many tokens go together; up to one fewer stay beyond the budget.
        overlap: whether the server queues a step before the last one has ended, as it does with overlap scheduling: a
            round that is due when an answer ends then comes for nothing.
        keep_share: least share of the private tokens so far that a round keeps.
        recency: power of its rank by which a value is divided where it chooses; the newest token has rank 1.
        value_share: share of the kept tokens, the newest not counted, that each head of each layer chooses by the
            distance of their values from the mean of the newest; None for the server's default.
    """

    model: torch.nn.Module
    mean: torch.Tensor
    abs_mean: torch.Tensor
    inv_freq: torch.Tensor
    num_kv_heads: int
    budget: int
    interval: int
    recent: int
    selection: str = "per-layer-head"
    aggregation: str = "mean"
    unrotated: torch.Tensor | None = None
    scaling: float = 1.0
    interleaved: bool = False
    stored: torch.dtype = torch.float32
    total: bool = False
    round_to: int = 1
    value_share: float | None = None
    scored: tuple[int, ...] | None = None
    rotates: tuple[bool, ...] | None = None
    window: int = 0
    reads: dict[int, int] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    overlap: bool = True
    keep_share: float = 0.0
    recency: float = 0.0

    def __post_init__(self) -> None:
        if self.scored is None:
            self.scored = tuple(range(self.mean.shape[0]))

    @torch.no_grad()
    def logprobs(
        self,
        ids: list[int],
        prompt_length: int,
        frozen: int,
        *,
        cached: int = 0,
        chunk: int | Sequence[int] | None = None,
        pauses: Sequence[tuple[int, int]] = (),
        late: bool = False,
        early: int = 0,
        inputs: Sequence[tuple[int, int]] = (),
        redrawn: Collection[int] = (),
    ) -> tuple[torch.Tensor, int]:
        """Log-probabilities after each token from the last prompt token on, and the number of rounds.

        Args:
            ids: prompt and output.
            prompt_length: tokens of the prompt.
            frozen: first position that may be evicted.
            cached: leading tokens of the prompt that were computed beforehand.
            chunk: tokens of the prompt that are computed at once, or of each such part, with rounds in between; by
                default the whole prompt.
            pauses: half-open ranges [first, end) of tokens during which no round runs.
            early: tokens by which the first round comes early, together with that of another request.
            inputs: half-open ranges [first, end) of tokens that stay, on top of the budget.
            late: whether a round after the prompt knows none of the last range, and lets its tokens stay.
            redrawn: tokens after which a decode server retracts the request in the step of its round: the step that is
                queued counts for the round, but not its result, so that the newest token is computed again.

        Returns:
            [len(ids) - prompt_length + 1, vocabulary] float32; rounds.
        """
        stays = torch.zeros(len(ids), dtype=torch.bool)
        for first, end in inputs:
            stays[first:end] = True
        # By its kinds of layers only where some keep a state: the account itself says what a window shows.
        cache = RoundedCache(self.stored, self.model.config if self._keeps_states() else None)
        # What each layer's KV heads may see.
        visible = torch.zeros(len(self._layers()), self.num_kv_heads, len(ids), dtype=torch.bool)
        rounds, outputs = 0, []
        chunks = iter(chunk) if isinstance(chunk, Sequence) else itertools.repeat(chunk or prompt_length)
        done, end = 0, cached or min(next(chunks), prompt_length)
        following = {first: last for first, last in pauses if first < last}
        while True:
            begun = done
            while True:
                visible[..., begun:end] = True
                known = begun if late and begun >= prompt_length else end
                private = int((visible[self.scored[0], 0, frozen:known] & ~stays[frozen:known]).sum())
                keep = self._most_kept(frozen, int((~stays[frozen:known]).sum()))
                # The first token after the prompt is computed before the server looks at the request again.
                trigger = keep + self.interval - (0 if rounds else early)
                due = private >= trigger and end != prompt_length and end != cached
                if due or begun < prompt_length or end not in following:
                    break
                # Ranges without a round between them are computed at once.
                begun, end = end, following[end]
            logits = self._forward(ids[done:end], done, visible, cache)
            done = end
            if done >= prompt_length:
                outputs.append(logits[-1:] if done == prompt_length else logits)
            if done == len(ids):
                return torch.cat(outputs).log_softmax(-1), rounds + (due and self.overlap)
            if due:
                scored = list(self.scored)
                seen = visible[scored, :, frozen:known]
                private = keep + (private - keep) % self.round_to
                visible[scored, :, frozen:known] = self._kept(cache, seen, frozen, known, private, stays[frozen:known])
                rounds, trigger = rounds + 1, keep + self.interval
                if done in redrawn:
                    cache.crop(-1)
                    again = self._forward(ids[done - 1 : done], done - 1, visible, cache)
                    outputs[-1] = torch.cat([outputs[-1][:-1], again])
            if done < prompt_length:
                end = min(done + next(chunks), prompt_length)
            else:
                # Until the next round every query sees what is visible now and the tokens since.
                end = min(done + max(trigger - private, 1), len(ids))
            for first, last in pauses:
                if first <= done < last:
                    end = last
                elif done < first:
                    end = min(end, first)

    def _most_kept(self, frozen: int, so_far: int) -> int:
        """Private tokens that a round keeps of the `so_far` that there have been."""
        keep = max(self.budget - frozen, self.recent, 1) if self.total else self.budget
        return max(keep, math.ceil(self.keep_share * so_far))

    def _forward(self, ids: list[int], start: int, visible: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        total = start + len(ids)
        query = torch.arange(start, total)[:, None]
        key = torch.arange(total)[None]
        causal = key <= query
        within = causal & (key > query - self.window)
        group = self.mean.shape[1] // self.num_kv_heads

        def mask_of(layer: int):
            seen = within[None]  # [H_q or 1, S, total]
            source = self.reads.get(layer, layer)
            if source in self.scored:
                seen = causal & visible[source, :, None, :total].repeat_interleave(group, 0)
            mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None]
            return lambda module, args, kwargs: (args, {**kwargs, "attention_mask": mask})

        hooks = [
            attention.register_forward_pre_hook(mask_of(number), with_kwargs=True)
            for number, layer in enumerate(self._layers())
            # Layers that keep a state see all tokens.
            if (attention := attention_of(layer)) is not None
        ]
        try:
            output = self.model(
                input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, **self._places(start, total)
            )
        finally:
            for hook in hooks:
                hook.remove()
        return output.logits[0].float()

    def _layers(self) -> torch.nn.ModuleList:
        return self.model.model.layers

    def _keeps_states(self) -> bool:
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        return bool({"linear_attention", "conv", "hybrid"}.intersection(kinds))

    def _places(self, start: int, total: int) -> dict[str, torch.Tensor]:
        """What the model gets with the ids of the tokens from `start` to `total`."""
        return {"position_ids": torch.arange(start, total)[None]}

    def _turn(self, place):
        """By how much a token of the private part is turned, given how many stand before it."""
        return place

    def _kept(
        self,
        cache: DynamicCache,
        visible: torch.Tensor,
        frozen: int,
        next_position: int,
        keep: int,
        stays: torch.Tensor,
    ) -> torch.Tensor:
        """Private positions that stay, [L, H_kv, n]: the newest, those with large values, and the best of the others
        by their merged z-scores; and those of `stays` [n].

        A window shows the newest tokens of a row, so where there is one, those of `stays` are among the newest, too;
        then the newest begin with a page.
        """
        inputs, newest, entries = visible & stays, self.recent, self.recent
        if self.window and self.recent:
            there = visible[0, 0].nonzero().flatten()
            first = frozen + len(there) - self.recent
            whole = self.recent + first % self.round_to
            entries = whole if stays[there[-whole:]].any() else self.recent
            newest = int((~stays[there[-entries:]]).sum())
        kept = self._chosen(cache, visible & ~stays, frozen, next_position, keep, newest, visible, entries)
        return kept | inputs

    def _chosen(
        self,
        cache: DynamicCache,
        visible: torch.Tensor,
        frozen: int,
        next_position: int,
        keep: int,
        recent: int,
        all_visible: torch.Tensor,
        entries: int,
    ) -> torch.Tensor:
        """Those of `visible` that stay, `recent` of which are the newest; `entries` of all are."""
        layers, heads = self.mean.shape[:2]
        group = heads // self.num_kv_heads
        value_share = self.value_share
        if value_share is None:
            value_share = VALUE_SHARE if self.selection == "per-layer-head" else 0.0
        places = [[visible[layer, j].nonzero().flatten() for j in range(self.num_kv_heads)] for layer in range(layers)]
        z = []  # [L, H_q, candidates]
        for layer in range(layers):
            for head in range(heads):
                place = places[layer][head // group]
                candidates = frozen + place[: len(place) - recent]
                keys = self._keys(cache, layer, head // group, candidates)
                score = self._score(keys, self._turn(candidates), layer, head, self._turn(next_position))
                z.append((score - score.mean()) / score.std(unbiased=False).clamp_min(1e-6))
        z = torch.stack(z).unflatten(0, (layers, self.num_kv_heads, group))
        importance = torch.cat([self._importance(part) for part in z.split(self.stages or (layers,))])
        kept = torch.zeros_like(visible)
        for layer in range(layers):
            for j in range(self.num_kv_heads):
                place, best = places[layer][j], importance[layer, j].tolist()
                values = self._values(cache, layer, j, frozen + place)
                near = all_visible[layer, j].nonzero().flatten() if self.window else place
                near = self._values(cache, layer, j, frozen + near[len(near) - min(entries, 64) :])
                center = near.mean(0) if self.recent else 0.0
                ranks = torch.arange(len(place), len(place) - len(best), -1).double()
                sizes = ((values[: len(best)] - center).norm(dim=-1) / ranks.pow(self.recency)).tolist()
                by_value = sorted(range(len(best)), key=lambda index: (-sizes[index], index))
                large = by_value[: round(value_share * (keep - recent))]
                others = set(range(len(best))) - set(large)
                order = sorted(others, key=lambda index: (-best[index], index))
                kept[layer, j, place[[*large, *order[: keep - recent - len(large)]]]] = True
                kept[layer, j, place[len(best) :]] = True
        return kept

    def _keys(self, cache: DynamicCache, layer: int, head: int, places: torch.Tensor) -> torch.Tensor:
        """[n, D] float64: what scores read of the tokens at `places`, with the turned dims first."""
        return cache.layers[self.scored[layer]].keys[0, head, places].double()

    def _values(self, cache: DynamicCache, layer: int, head: int, places: torch.Tensor) -> torch.Tensor:
        """[n, D_v] float64: the values of the tokens at `places`."""
        return cache.layers[self.scored[layer]].values[0, head, places].double()

    def _importance(self, z: torch.Tensor) -> torch.Tensor:
        """[L, H_kv, n]: merged z-scores of layers that choose together; z is [L, H_kv, group, n]."""
        layers = len(z)
        return {
            "shared-mean": lambda: z.mean((0, 1, 2)).expand(layers, self.num_kv_heads, -1),
            "union": lambda: z.amax((0, 1, 2)).expand(layers, self.num_kv_heads, -1),
            "per-head": lambda: z.amax(2).mean(0).expand(layers, -1, -1),
            "per-layer-head": lambda: z.amax(2),
        }[self.selection]()

    def _score(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int, head: int, next_position: int
    ) -> torch.Tensor:
        pairs = len(self.inv_freq)
        if self.rotates is not None and not self.rotates[layer]:
            return (keys * self._mean_query(layer, head)).sum(-1)
        turning = keys[:, : 2 * pairs]
        parts = (turning[:, 0::2], turning[:, 1::2]) if self.interleaved else turning.chunk(2, dim=1)
        turned = torch.complex(*parts)
        plain = turned * torch.polar(torch.ones(()).double(), -positions[:, None] * self.inv_freq)
        mean = self.mean[layer, head].to(torch.complex128)
        phase = (mean * plain.conj()).angle()
        size = mean.abs() * plain.abs()
        # Pairs that do not turn are met by the mean query alone.
        uneven = (self.abs_mean[layer, head].double() - mean.abs()) * (self.inv_freq > 0)
        spread = (uneven * plain.abs()).sum(-1)
        distance = next_position - positions[:, None]
        terms = [(size * torch.cos(self.inv_freq * (distance + offset) + phase)).sum(-1) for offset in OFFSETS]
        future = torch.stack(terms)
        turned = self.scaling * ((future.mean(0) if self.aggregation == "mean" else future.amax(0)) + spread)
        if self.unrotated is None:
            return turned
        # The mean of the logit's other part does not depend on positions.
        return turned + (keys[:, 2 * pairs :] * self.unrotated[layer, head].double()).sum(-1)

    def _mean_query(self, layer: int, head: int) -> torch.Tensor:
        """[D] float64: the mean query of a layer without RoPE."""
        mean = self.mean[layer, head].to(torch.complex128)
        parts = (mean.real, mean.imag)
        paired = torch.stack(parts, dim=-1).flatten() if self.interleaved else torch.cat(parts)
        return torch.cat([paired, self.unrotated[layer, head].double()])


def means_of(stats: Path) -> dict[str, torch.Tensor]:
    """What an Oracle takes from a statistics file: `mean`, `abs_mean` and `unrotated`."""
    parts = load_file(stats)
    mean = torch.complex(parts["mean_re"], parts["mean_im"])
    return {"mean": mean, "abs_mean": parts["abs_mean"], "unrotated": parts["unrotated_mean"]}


def oracle_of(tiny: TinyModel) -> Oracle:
    """The oracle for a test model under the settings of the tests' servers."""
    model = tiny.load()
    return Oracle(
        **means_of(tiny.stats),
        model=model,
        inv_freq=model.model.rotary_emb.inv_freq.double(),
        num_kv_heads=tiny.num_kv_heads,
        budget=BUDGET,
        interval=INTERVAL,
        recent=RECENT,
        scaling=model.model.rotary_emb.attention_scaling,
        interleaved=tiny.interleaved,
    )
