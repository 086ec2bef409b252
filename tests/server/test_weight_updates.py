"""New weights for a running server."""

from __future__ import annotations

import pytest
import torch

from harness import BUDGET, INTERVAL, Client, assert_pool_is_whole, compression, prompt, served_logprobs
from measured_statistics import LOOKUP_JOB, measuring


def update(client: Client, folder) -> None:
    # A server without weights would not look for any by itself.
    response = client.post("/update_weights_from_disk", model_path=str(folder), load_format="auto")
    assert response.status_code == 200, response.text


def test_updates_are_logged_in_one_line(serve, tiny):
    """Prevents silently scoring with statistics of other weights, a log full of one update's parts, and a conversation
    that resumes a row of other weights."""
    client = serve()
    named = {"custom_params": {"triattention": {"conversation": "old weights"}}}

    def notices() -> int:
        return client.server.log_path.read_text().count("The weights were updated, but TriAttention goes on scoring")

    before = notices()
    ids = prompt(70, 20)
    turn = client.generate(ids, 120, **named)
    assert compression(turn)["conversation_kept"]
    update(client, tiny.path)
    assert notices() == before + 1
    again = client.generate(ids + turn["output_ids"], 2, **named)
    assert compression(again)["conversation"] == "lost"
    update(client, tiny.path)
    assert notices() == before + 1
    assert compression(client.generate(prompt(71, 20), 120))["rounds"] == 1
    update(client, tiny.path)
    assert notices() == before + 2
    assert_pool_is_whole(client)


@pytest.mark.wide
@pytest.mark.parametrize("wanted", ["auto", "look-ups"])
def test_a_server_without_weights_measures_those_that_come(serve, chat_model, tmp_path, wanted):
    """Prevents statistics of random weights from being kept for later launches or from being used for good, and a
    conversation that resumes a row of other weights."""
    folder = tmp_path / "cache" / "sglang-triattn" / "statistics"
    auto = ("--triattention-stats", wanted)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")} if wanted == "auto" else measuring(tmp_path, job=LOOKUP_JOB)
    options = {"env": env, "model": chat_model, "tokenizer": True}
    client = serve(*auto, "--load-format", "dummy", **options)
    assert not list(folder.glob("*.safetensors"))
    assert "keeps nothing of what it measured" in client.server.log_path.read_text()
    named = {"custom_params": {"triattention": {"conversation": "old weights"}}}
    ids = prompt(72, 20)
    turn = client.generate(ids, BUDGET + INTERVAL + 9, **named)
    assert compression(turn)["conversation_kept"]

    update(client, chat_model.path)
    assert client.totals()["stats"] == "measured after an update of the weights"
    assert not list(folder.glob("*.safetensors"))
    again = client.generate(ids + turn["output_ids"], 2, **named)
    assert compression(again)["conversation"] == "lost"
    client.generate(ids, 1, custom_params={"triattention": {"conversation": "old weights", "release": True}})
    # It now keeps what a server keeps that had the weights, and the statistics, from the start.
    ours = client.generate(prompt(73, 20), 300, logprobs=True)
    assert_pool_is_whole(client)
    serve.stop(client)
    other = serve(*auto, **options)
    assert len(list(folder.glob("*.safetensors"))) == 1
    theirs = other.generate(prompt(73, 20), 300, logprobs=True)
    assert compression(ours)["rounds"] == compression(theirs)["rounds"] >= 5
    assert ours["output_ids"] == theirs["output_ids"]
    torch.testing.assert_close(*map(served_logprobs, (ours, theirs)), rtol=0, atol=1e-5)
    serve.stop(other)
