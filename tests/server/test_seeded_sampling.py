"""Tokens sampled from a seed: a token's position is its place in the text, also after evictions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import seeded_draws
from harness import compression, install_plugin, prompt, python_path
from oracle import TOLERANCE, oracle_of

SEED = 77
CHUNK = 128


@pytest.fixture(scope="module")
def client(serve, tmp_path_factory):
    """The Client of a server that samples from seeds and prefills in chunks."""
    folder = tmp_path_factory.mktemp("seeded")
    install_plugin(folder, "seeded", Path(seeded_draws.__file__).read_text())
    flags = ("--page-size", "1", "--enable-deterministic-inference", "--chunked-prefill-size", str(CHUNK))
    return serve(*flags, env={"PYTHONPATH": python_path(folder)})


def draw(client, ids: list[int], tokens: int, **params) -> dict:
    return client.generate(ids, tokens, temperature=1, sampling_seed=SEED, custom_params={"triattention": params})


def shortfall(logprobs: torch.Tensor, first_position: int, tokens: list[int]) -> torch.Tensor:
    """[tokens]: by how much each token's perturbed log-probability misses the best one; 0 for the sampled token.

    Token i is sampled at `first_position` + i.
    """
    positions = torch.arange(first_position, first_position + len(tokens))
    hashed = seeded_draws.hashed(torch.full((len(tokens),), SEED), positions, torch.arange(logprobs.shape[-1]))
    noise = -(-(hashed.double() / seeded_draws.LARGEST).log()).log()
    drawn = logprobs.double() + noise
    return drawn.amax(-1) - drawn.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_drawn_at(logprobs: torch.Tensor, position: int, evicted: int, tokens: list[int]) -> None:
    """Asserts that the first token belongs to `position`, each other to the next, none to a place in the short row."""
    assert shortfall(logprobs, position, tokens).max() < 4 * TOLERANCE
    elsewhere = shortfall(logprobs, position - evicted, tokens)
    assert elsewhere[0] > 100 * TOLERANCE, "both positions draw this token, so the test distinguishes nothing"
    assert elsewhere.median() > 100 * TOLERANCE


def test_first_token_of_a_resumed_turn(client, tiny):
    """Prevents a turn after a shortened row from sampling its first token as if evicted tokens had never existed."""
    ids = prompt(31, 48)
    first = draw(client, ids, 150, conversation="seeded")
    following = ids + first["output_ids"] + prompt(32, 12)
    second = draw(client, following, 20, conversation="seeded", release=True)
    assert compression(second)["conversation"] == "resumed"
    oracle = oracle_of(tiny)
    expected, _ = oracle.logprobs(
        following + second["output_ids"][:-1],
        len(ids),
        len(ids),
        pauses=[(len(ids) + 149, len(following) + 1)],
        inputs=[(len(ids) + 149, len(following))],
    )
    evicted = compression(first)["evicted_tokens"]
    assert evicted > 50
    assert_drawn_at(expected[len(following) - len(ids) :], len(following) - 1, evicted, second["output_ids"])


def test_first_token_of_a_compacted_prompt(client, tiny):
    """Prevents the same after a prompt that lost tokens between its chunks."""
    ids = prompt(62, 500)
    response = draw(client, ids, 20, prompt="compact")
    assert compression(response)["rounds"] >= 2
    expected, _ = oracle_of(tiny).logprobs(ids + response["output_ids"][:-1], len(ids), 4, chunk=CHUNK)
    assert_drawn_at(expected, len(ids) - 1, compression(response)["evicted_tokens"], response["output_ids"])


def test_tokens_between_rounds(client, tiny):
    """Prevents decode steps after a round from sampling by their place in the row."""
    ids = prompt(33, 40)
    response = draw(client, ids, 200)
    assert compression(response)["rounds"] >= 4
    expected, _ = oracle_of(tiny).logprobs(ids + response["output_ids"][:-1], len(ids), len(ids))
    assert shortfall(expected, len(ids) - 1, response["output_ids"]).max() < 4 * TOLERANCE
