"""An independent account of what a draft model drafts for a compressed request, from `transformers`.

SGLang gives a draft model all tokens but the first: it computes a token one place before the target does. It keeps the
tokens that the target keeps, but for one: the first private place is the last frozen one in the draft model, where the
token stays that came there first. Nothing here uses the project's code, see `oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from latent_family import LatentOracle
from oracle import Oracle
from vision_account import VisionOracle


@dataclass
class Watched(Oracle):
    """An oracle that also notes what a draft model follows and reads.

    Args:
        page_size: slots of a page.
        remaps: whether rounds move no K/V of the target.

    Attributes:
        seen: [L, H_kv, tokens, tokens] bool, what each of a draft model's queries may see, if its heads follow those of
            the scored layers; a token is counted at its place in the draft model, one before its own.
        shown: [L, H_kv, tokens, tokens] bool, what each of the target's queries may see.
        cache: K/V of all tokens.
        hidden: [tokens, size], what the logits are made of.
        inputs: of each layer, [tokens, size]; of the norm after them, by their number.
    """

    page_size: int = 1
    remaps: bool = False
    seen: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    cache: DynamicCache | None = None
    hidden: torch.Tensor | None = None
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def _forward(self, ids: list[int], start: int, visible: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        total = start + len(ids)
        if start == 0:
            shape = len(self.scored), self.num_kv_heads, visible.shape[-1]
            self.seen = torch.zeros(*shape, shape[-1], dtype=torch.bool)
            self.shown, self.cache = torch.zeros_like(self.seen), cache
            self._held = torch.ones(shape, dtype=torch.bool)
            self._rounds = []
            self._columns = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
            self.hidden, self.inputs = None, {}
        causal = torch.arange(total) <= torch.arange(start, total)[:, None]
        self.seen[:, :, start:total, :total] = causal & self._held[:, :, None, :total]
        self.shown[:, :, start:total, :total] = causal & visible[list(self.scored), :, None, :total]

        def note(number, hidden):
            before = self.inputs.get(number)
            self.inputs[number] = hidden if before is None else torch.cat((before, hidden))

        hooks = [
            layer.register_forward_pre_hook(lambda _, args, number=number: note(number, args[0][0]))
            for number, layer in enumerate(self._layers())
        ]
        # Where it takes images, its language model.
        text = getattr(self.model.model, "language_model", self.model.model)
        hooks.append(text.norm.register_forward_hook(lambda _, __, output: note(-1, output[0])))
        last = len(self._layers())
        hooks.append(text.norm.register_forward_pre_hook(lambda _, args: note(last, args[0][0])))
        try:
            logits = super()._forward(ids, start, visible, cache)
        finally:
            for hook in hooks:
                hook.remove()
        self.hidden = self.inputs[-1]
        return logits

    def _kept(
        self,
        cache: DynamicCache,
        visible: torch.Tensor,
        frozen: int,
        next_position: int,
        keep: int,
        stays: torch.Tensor,
    ) -> torch.Tensor:
        kept = super()._kept(cache, visible, frozen, next_position, keep, stays)
        for layer, columns in enumerate(self._columns):
            for head, before in enumerate(columns):
                known = max(before, default=frozen - 1) + 1
                after = self._closed_up([*before, *range(known, next_position)], kept[layer, head], frozen, keep)
                held = torch.zeros(next_position, dtype=torch.bool)
                held[:frozen] = True
                # The newest token of the draft model is one that the target has yet to compute.
                held[[*(token - 1 for token in after[1:]), next_position - 1]] = True
                self._held[layer, head, :next_position] = held
                columns[head] = after
        self._rounds.append((frozen, next_position, [list(each) for each in self._columns]))
        return kept

    def row(self, layer: int, head: int, place: int) -> list[int]:
        """The tokens before `place` that the target's query there sees, in the order of the row."""
        return self._ordered(self.shown[layer, head, place, :place], layer, head)

    def drafting_row(self, layer: int, head: int, place: int) -> list[int]:
        """The draft model's tokens before `place` that its query there may see, in the order of the row."""
        return self._ordered(self.seen[layer, head, place, :place], layer, head, ahead=1)

    def _ordered(self, visible: torch.Tensor, layer: int, head: int, ahead: int = 0) -> list[int]:
        """The tokens of `visible`, [tokens] bool, in the order of the row, where each stands `ahead` columns before the
        target's token of that number."""
        place, seen = len(visible), set(visible.nonzero().flatten().tolist())
        rows = [
            [*range(frozen), *(token - ahead for token in columns[layer][head][ahead:]), *range(end - ahead, place)]
            for frozen, end, columns in self._rounds
        ]
        return next(row for row in [*reversed(rows), list(range(place))] if set(row) == seen)

    def _closed_up(self, row: list[int], kept: torch.Tensor, frozen: int, keep: int) -> list[int]:
        """Tokens in the order of their columns after a round, which cuts out a stretch of whole pages before the newest
        tokens and brings what stays of it to the columns that others leave, in order; with a recency, the row stays in
        order."""
        stays = {token: bool(kept[token - frozen]) for token in row}
        if self.remaps or self.recency:
            return [token for token in row if stays[token]]
        cut = keep - self.recent
        cut -= (frozen + cut) % self.page_size
        assert cut > 0
        end = cut + len(row) - keep
        moving = iter([token for token in row[cut:end] if stays[token]])
        return [token if stays[token] else next(moving) for token in row[:cut] + row[end:]]


@dataclass
class WatchedLatent(Watched, LatentOracle):
    """The same of a model with latent KV."""


@dataclass
class WatchedVision(Watched, VisionOracle):
    """The same of a request with an image."""

    def places(self, total: int) -> torch.Tensor:
        """[axes, 1, total] or, with one axis, [1, total]: rotary positions."""
        return self._places(0, total)["position_ids"]


@dataclass(frozen=True, eq=False)
class Read:
    """A draft model, and what it reads of a text: hidden states are the target's of tokens that are known to hold, and
    its own of those that it has drafted.

    Attributes:
        head: `head(embeddings, hidden, places, mask, cache)` returns what the next draft reads, and what its logits are
            made of; the mask is [layers, 1 or heads, queries, keys].
        embed: gives embeddings of drafted tokens.
        last: makes logits.
        ids: prompt and output.
        seen: [layers, 1 or heads, n, n] bool for n tokens, see `Watched`.
        embeds: [n, size], what the target reads of each token: of an image's, what its encoder makes of the image.
        hidden: [n, size] or several of these side by side, of each token.
        places: [1, n] or [axes, 1, n], rotary positions, of what may be drafted after the text, too.
    """

    head: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    embed: torch.nn.Module
    last: torch.nn.Module
    ids: list[int]
    seen: torch.Tensor
    embeds: torch.Tensor
    hidden: torch.Tensor
    places: torch.Tensor

    def run(
        self, embeds: torch.Tensor, states: torch.Tensor, first: int, seen: torch.Tensor, cache: DynamicCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the next draft reads, logits) of tokens [branches, n, size] from the place `first` on."""
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        passed, made = self.head(embeds, states, self.places[..., first : first + embeds.shape[1]], mask, cache)
        return passed, self.last(made).float()

    def run_whole(self, cache: DynamicCache) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of all tokens but the first: what each step begins with."""
        return self.run(self.embeds[None, 1:], self.hidden[None, :-1], 0, self.seen[:, :, :-1, :-1], cache)

    def seen_with(self, start: int, drafted: int) -> torch.Tensor:
        """[layers, 1 or heads, 1, start + drafted] bool: what the newest of the drafted tokens may see."""
        own = torch.ones(*self.seen.shape[:2], drafted, dtype=torch.bool)
        return torch.cat([self.seen[:, :, start, :start], own], -1)[:, :, None]


@dataclass(frozen=True, eq=False)
class ReadNewest(Read):
    """The same of a draft model that sees the newest tokens of a row.

    Attributes:
        row: gives the tokens before a place, in the order of the row.
        newest: so many of these are seen.
        sinks: with as many of the first ones. Then tokens of the text see all, and drafted ones all of the draft.
    """

    row: Callable[[int], list[int]]
    newest: int
    sinks: int | None = None

    def __post_init__(self) -> None:
        if self.sinks is None:
            for place in range(self.seen.shape[-1]):
                self.seen[..., place, self.row(place)[: -self.newest]] = False

    def seen_with(self, start: int, drafted: int) -> torch.Tensor:
        seen, row = super().seen_with(start, drafted), self.row(start)
        newest, sinks = (self.newest - drafted + 1, 0) if self.sinks is None else (self.newest, self.sinks)
        seen[..., row[sinks : max(len(row) - newest, sinks)]] = False
        return seen


class WholeModel:
    """A model as one that drafts by itself, without hidden states of another."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model.model

    def __call__(
        self, embeds: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Read.head`."""
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda _, args, options, own=own: (args, {**options, "attention_mask": own[None]}), with_kwargs=True
            )
            for layer, own in zip(self._model.layers, mask, strict=True)
        ]
        try:
            made = self._model(inputs_embeds=embeds, position_ids=places, past_key_values=cache).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return made, made


def cut_cache(cache: DynamicCache, length: int, branches: int = 1) -> DynamicCache:
    """The first `length` tokens of a cache, for each of the branches."""
    cut = DynamicCache()
    for number, layer in enumerate(cache.layers):
        cut.update(*(each[:, :, :length].repeat(branches, 1, 1, 1) for each in (layer.keys, layer.values)), number)
    return cut


@torch.no_grad()
def holding_of_head(read: Read, starts: list[int], steps: int, margin: float) -> list[int | None]:
    """How many of the tokens drafted at each step hold; None where two tokens are about as likely.

    Args:
        starts: tokens that were computed before each step. The next one is known.
        steps: tokens drafted at each.
        margin: what the first token's log-probability must be above the second's.
    """

    def likeliest(logits):
        best = logits.log_softmax(-1).topk(2)
        return best.indices[..., 0], best.values[..., 0] - best.values[..., 1]

    ids, cache = read.ids, DynamicCache()
    passed, logits = read.run_whole(cache)
    likely, lead = likeliest(logits[0])
    found: list[int | None] = []
    for start in starts:
        held, place = 0, start - 1
        state, token, sure = passed[:, place : place + 1], likely[place], lead[place]
        own = cut_cache(cache, start)
        while held is not None and held < steps and place + 2 < len(ids):
            if sure < margin:
                held = None
            elif token != ids[place + 2]:
                break
            else:
                held, place = held + 1, place + 1
                seen = read.seen_with(start, held)
                state, logits = read.run(read.embed(token.view(1, 1)), state, place, seen, own)
                token, sure = likeliest(logits[0, 0])
        found.append(held)
    return found
