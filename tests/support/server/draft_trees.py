"""Drafts that branch, and an independent account of them: in each step a draft model goes on from the likeliest of the
tokens that it has drafted, and the likeliest of all are verified as a tree.

SGLang counts as drafted before a token what lies in the slots of its branch, also where the token follows one of
another branch (`select_top_k_tokens`, sglang/srt/speculative/spec_utils.py). So does this account.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from draft_account import Read, cut_cache
from draft_pairs import Pair
from oracle import TOLERANCE

# SGLang's own choice for a Llama.
TREE_STEPS, BRANCHES, VERIFIED = 5, 4, 8
TREES = (
    *("--speculative-num-steps", str(TREE_STEPS), "--speculative-eagle-topk", str(BRANCHES)),
    *("--speculative-num-draft-tokens", str(VERIFIED)),
)
# Draws of what the account may be wrong by.
DRAWS = 4


@dataclass(frozen=True, eq=False)
class TreePair(Pair):
    """A model, and one that drafts for it with branches."""

    numbers = TREES
    steps = TREE_STEPS

    @classmethod
    def of(cls, pair: Pair) -> TreePair:
        return cls(**vars(pair))

    def holding(self, ids, account, starts):
        return holding_of_trees(self.read(ids, account), starts, 2 * TOLERANCE)


class Choice:
    """What is taken for the likeliest in one draw, in which all scores are wrong by up to `margin`: of equal ones, the
    first or the last. So likely are a token and the only one that can follow it."""

    def __init__(self, draw: int, margin: float) -> None:
        self._random = torch.Generator().manual_seed(draw)
        self._margin, self._sign = margin, 2 * (draw % 2) - 1

    def tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logarithms of how likely the BRANCHES likeliest tokens are, and the tokens, both [..., BRANCHES]."""
        noise = torch.rand(logits.shape, generator=self._random)
        return tuple((logits + self._margin * noise).log_softmax(-1).topk(BRANCHES))

    def best(self, scores: list[float], count: int) -> torch.Tensor:
        """[count] int64, places of the highest scores."""
        order = torch.arange(len(scores)) / len(scores)
        return (torch.tensor(scores) + self._sign * self._margin * order).topk(count).indices


@dataclass(frozen=True)
class Tree:
    """What a draft model proposed: each proposal's parent, -1 for the root, and token; and which were chosen."""

    parents: list[int]
    tokens: list[int]
    chosen: set[int]

    def held(self, answer: list[int]) -> int:
        """Tokens of the answer that follow one another from the root on."""
        place = -1
        for held, word in enumerate(answer):
            found = [each for each in self.chosen if self.parents[each] == place and self.tokens[each] == word]
            if not found:
                return held
            (place,) = found
        return len(answer)


@torch.no_grad()
def holding_of_trees(read: Read, starts: list[int], margin: float) -> list[int | None]:
    """As `draft_account.holding_of_head`, for trees: how many tokens of the answer each step's tree holds from its root
    on; None where draws of what the draft's scores may be wrong by disagree."""
    whole = DynamicCache()
    passed, logits = read.run_whole(whole)
    found: list[int | None] = []
    for start in starts:

        def goes_on(step, words, states, cache, start=start):
            """The next token of each branch, after the row and what is in the branch's slots."""
            return read.run(read.embed(words), states, start + step, read.seen_with(start, step + 1), cache)

        outcomes = set()
        for draw in range(DRAWS):
            cache, choice = cut_cache(whole, start, BRANCHES), Choice(draw, margin)
            tree = _drafted(logits[0, start - 1], passed[:, start - 1 : start], cache, goes_on, choice)
            outcomes.add(tree.held(read.ids[start + 1 :]))
        found.append(outcomes.pop() if len(outcomes) == 1 else None)
    return found


def _drafted(
    logits: torch.Tensor, state: torch.Tensor, cache: DynamicCache, goes_on: Callable, choice: Choice
) -> Tree:  # fmt: skip
    """The tree after a token, of which the draft model has made `logits` and `state`, [1, 1, size]."""
    values, words = choice.tokens(logits)
    parents, tokens, scores = [-1] * BRANCHES, words.tolist(), values.tolist()
    going, states = list(range(BRANCHES)), state.expand(BRANCHES, -1, -1)
    for step in range(TREE_STEPS - 1):
        states, logits = goes_on(step, torch.tensor([[tokens[proposal]] for proposal in going]), states, cache)
        (values, words), first = choice.tokens(logits[:, -1]), len(tokens)
        parents += [proposal for proposal in going for _ in range(BRANCHES)]
        tokens += words.flatten().tolist()
        scores += (values + torch.tensor([[scores[proposal]] for proposal in going])).flatten().tolist()
        best = choice.best(scores[first:], BRANCHES)
        going, states = (first + best).tolist(), states[best // BRANCHES]
    return Tree(parents, tokens, set(choice.best(scores, VERIFIED - 1).tolist()))
