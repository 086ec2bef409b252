"""Torch in the place of SGLang's kernels around drafted tokens."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from interpreter import assert_pass_interpreted
from sglang_triattn.patches.cpu import drafts

DEPTH, VOCABULARY = 3, 4


def test_it_computes_what_the_kernels_do():
    """Prevents drafts that are verified on CPUs by other rules than on GPUs."""
    assert_pass_interpreted("tests/support/unit/drafts_by_kernels.py")


@st.composite
def drafted(draw) -> tuple[int, list[int], list[int], list[int]]:
    """topk; of each group of proposals its parent, -1 for the root; the chosen proposals; a token for each of these.

    With a proposal, its parent is chosen, and what follows the same token are different ones.
    """
    topk = draw(st.integers(1, VOCABULARY))
    parents, before = [-1], list(range(topk))
    for step in range(1, DEPTH):
        parents += before
        first = topk + (step - 1) * topk * topk
        before = draw(st.lists(st.integers(first, first + topk * topk - 1), min_size=topk, max_size=topk, unique=True))
    chosen: set[int] = set()
    for proposal in draw(st.lists(st.integers(0, topk + (DEPTH - 1) * topk * topk - 1), min_size=1, max_size=4)):
        while proposal >= 0:
            chosen.add(proposal)
            proposal = parents[proposal // topk]
    tokens = draw(st.lists(st.permutations(range(VOCABULARY)), min_size=len(parents), max_size=len(parents)))
    ordered = sorted(chosen)
    return topk, parents, ordered, [tokens[proposal // topk][proposal % topk] for proposal in ordered]


@given(tree=drafted(), length=st.integers(0, 5), data=st.data())
def test_trees_by_their_definition(tree, length, data):
    """Prevents a token that is accepted though one before it does not hold, and one that sees another branch: the
    account follows each token to the root by itself."""
    topk, parents, chosen, tokens = tree
    n = len(chosen) + 1
    paths = {0: [0]}
    for number, proposal in enumerate(chosen, 1):
        parent = parents[proposal // topk]
        paths[number] = [*paths[chosen.index(parent) + 1 if parent >= 0 else 0], number]

    mask, positions = torch.ones(n * (length + n), dtype=torch.bool), torch.zeros(n, dtype=torch.int64)
    links = torch.full((3, 1, n), -1)
    drafts.build_trees(
        torch.tensor([parents]), torch.tensor([chosen], dtype=torch.int64), torch.tensor([length]), mask, positions,
        *links, topk, DEPTH, n, None,
    )  # fmt: skip
    seen = mask.view(n, length + n)
    for number, path in paths.items():
        assert seen[number].nonzero().flatten().tolist() == [*range(length), *(length + place for place in path)]
        assert positions[number] == length + len(path) - 1

    predicted = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=n, max_size=n))
    words = [0, *tokens]
    held = [path for path in paths.values() if all(predicted[a] == words[b] for a, b in pairwise(path))]
    expected = max(held, key=len)
    outputs = torch.zeros(n, dtype=torch.int32), torch.full((1, DEPTH + 1), -1), torch.zeros(1, dtype=torch.int32)
    predicts, accepted, number = drafts.verify_greedily(
        *outputs, torch.tensor([words]), *links, torch.tensor([predicted])
    )
    assert accepted[0].tolist() == [*expected, *[-1] * (DEPTH + 1 - len(expected))]
    assert int(number) == len(expected) - 1
    assert predicts[expected].tolist() == [predicted[place] for place in expected]
