"""An independent account of what a draft model drafts for a compressed request, from `transformers`.

SGLang gives a draft model all tokens but the first: it computes a token one place before the target does. So the place
that the target has forgotten holds the next token in the draft model, which forgets that one. Nothing here uses the
project's code, see `oracle`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from latent_family import LatentOracle
from oracle import Oracle


@dataclass
class Watched(Oracle):
    """An oracle that also notes what a draft model follows and reads.

    Attributes:
        seen: [tokens, tokens] bool, what each query of the last layer's first KV head may see.
        hidden: [tokens, size], what the logits are made of.
        inputs: of each layer, [tokens, size].
    """

    seen: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def _forward(self, ids: list[int], start: int, visible: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        total = start + len(ids)
        if start == 0:
            self.seen = torch.zeros(visible.shape[-1], visible.shape[-1], dtype=torch.bool)
            self.hidden, self.inputs = None, {}
        causal = torch.arange(total) <= torch.arange(start, total)[:, None]
        self.seen[start:total, :total] = causal & visible[self.scored[-1], 0, :total]

        def note(number, hidden):
            before = self.inputs.get(number)
            self.inputs[number] = hidden if before is None else torch.cat((before, hidden))

        hooks = [
            layer.register_forward_pre_hook(lambda _, args, number=number: note(number, args[0][0]))
            for number, layer in enumerate(self._layers())
        ]
        hooks.append(self.model.model.norm.register_forward_hook(lambda _, __, output: note(-1, output[0])))
        try:
            logits = super()._forward(ids, start, visible, cache)
        finally:
            for hook in hooks:
                hook.remove()
        self.hidden = self.inputs[-1]
        return logits


@dataclass
class WatchedLatent(Watched, LatentOracle):
    """The same of a model with latent KV."""


@torch.no_grad()
def holding(
    draft: torch.nn.Module, ids: list[int], seen: torch.Tensor, starts: list[int], steps: int, margin: float
) -> list[int | None]:
    """How many of the tokens drafted at each step hold; None where two tokens are about as likely.

    Args:
        draft: transformers model in float32.
        ids: prompt and output.
        seen: [n, n] bool for n tokens, see `Watched`.
        starts: tokens that were computed before each step. The next one is known.
        steps: tokens drafted at each.
        margin: what the first token's log-probability must be above the second's.
    """
    shifted = torch.tensor([ids[1:]])
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None, :-1, :-1]
    places = torch.arange(shifted.shape[1])[None]
    logits = draft(input_ids=shifted, attention_mask=mask, position_ids=places).logits[0].float()
    best = logits.log_softmax(-1).topk(2)
    found: list[int | None] = []
    for start in starts:
        held: int | None = 0
        for place in range(start - 1, min(start - 1 + steps, len(ids) - 2)):
            if best.values[place, 0] - best.values[place, 1] < margin:
                held = None
                break
            if best.indices[place, 0] != ids[place + 2]:
                break
            held += 1
        found.append(held)
    return found


@torch.no_grad()
def holding_of_head(
    head: torch.nn.Module, target: torch.nn.Module, ids: list[int], seen: torch.Tensor, hidden: torch.Tensor,
    starts: list[int], steps: int, margin: float,
) -> list[int | None]:  # fmt: skip
    """As `holding`, for a draft model that reads hidden states: the target's of tokens that are known to hold, and its
    own of those that it has drafted.

    Args:
        head: `head(embeddings, hidden, places, mask, cache)` returns what the next draft reads, and what its logits are
            made of.
        target: gives embeddings and the last layer.
        hidden: [n, size] or several of these side by side, of each token but the last.
    """
    embed, last = target.model.embed_tokens, target.lm_head
    blocked = torch.finfo(torch.float32).min

    def run(tokens, states, first, mask, cache):
        places = torch.arange(first, first + len(tokens))[None]
        mask = torch.where(mask, 0.0, blocked)[None, None]
        passed, made = head(embed(torch.tensor([tokens])), states, places, mask, cache)
        best = last(made[0]).float().log_softmax(-1).topk(2)
        return passed, best.indices[:, 0], best.values[:, 0] - best.values[:, 1]

    cache = DynamicCache()
    passed, likely, lead = run(ids[1:], hidden[None, :-1], 0, seen[:-1, :-1], cache)
    found: list[int | None] = []
    for start in starts:
        held, place = 0, start - 1
        state, token, sure = passed[:, place : place + 1], likely[place], lead[place]
        own = DynamicCache()
        own.update(cache.layers[0].keys[:, :, :start], cache.layers[0].values[:, :, :start], 0)
        while held is not None and held < steps and place + 2 < len(ids):
            if sure < margin:
                held = None
            elif token != ids[place + 2]:
                break
            else:
                held, place = held + 1, place + 1
                mask = seen[start, : place + 1].clone()
                mask[start:] = True
                state, tokens, leads = run([int(token)], state, place, mask[None], own)
                token, sure = tokens[0], leads[0]
        found.append(held)
    return found
