"""Rows that are found by their first token ids."""

import random
from array import array

import pytest

from sglang_triattn.request.row_index import BLOCK, RowIndex, block_hashes, common_length, row_hash


def ids(*parts: tuple[int, int]) -> array:
    """Token ids: of each (value, count), `count` times `value`."""
    return array("q", [value for value, count in parts for _ in range(count)])


def found(index: RowIndex, prompt: array, owner: object = None) -> list[int]:
    return list(index.candidates(block_hashes(prompt, owner)))


def test_a_prompt_finds_the_rows_that_it_may_go_on_after():
    """Prevents a scan of all rows, and a row that is missed because it is longer than the prompt's part of it."""
    index, text = RowIndex(), ids((1, 3 * BLOCK + 5))
    index.add(1, row_hash(text, 2 * BLOCK + 9, None))
    index.add(2, row_hash(text, 3 * BLOCK, None))
    index.add(3, row_hash(ids((2, 3 * BLOCK)), 2 * BLOCK, None))
    index.add(4, row_hash(text, 5, None))
    assert found(index, text + ids((7, 4))) == [2, 1, 4]
    assert found(index, text[: 2 * BLOCK + 10]) == [1, 4]
    assert found(index, ids((1, BLOCK - 1))) == [4]
    # Text that differs from the first block on finds only what was filed under none.
    assert found(index, ids((3, 2 * BLOCK))) == [4]
    assert found(index, text, owner="another") == []


def test_forgotten_rows_are_not_found():
    """Prevents the name of a row that is gone from being looked up, and an index that grows for ever."""
    index, text = RowIndex(), ids((1, BLOCK))
    for name in (1, 2):
        index.add(name, row_hash(text, BLOCK, None))
    index.discard(1)
    index.discard(1)
    assert found(index, text) == [2]
    index.discard(2)
    assert not index
    index.add(3, row_hash(text, BLOCK, None))
    index.clear()
    assert not index
    assert found(index, text) == []


@pytest.mark.parametrize("known", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("least", [0, BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 9])
def test_a_hash_goes_on_from_those_of_the_prompt(known, least):
    """Prevents a row from being filed where no prompt looks, because hashes of its first ids were at hand."""
    text = array("q", range(4 * BLOCK))
    prompt = block_hashes(text[: known * BLOCK + 3], "owner")
    assert (
        row_hash(text, least, "owner", prompt)
        == row_hash(text, least, "owner")
        == block_hashes(text, "owner")[least // BLOCK]
    )


@pytest.mark.parametrize("seed", range(20))
def test_common_length(seed):
    """Prevents a row that is resumed after a token that differs, or cut before one that does not."""
    rng = random.Random(seed)
    one = array("q", [rng.randrange(3) for _ in range(rng.randrange(200))])
    other = one[: rng.randrange(len(one) + 1)] + array("q", [rng.randrange(3) for _ in range(rng.randrange(50))])
    equal = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    assert common_length(one, other) == (min(len(one), len(other)) if equal is None else equal)
