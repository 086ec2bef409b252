"""Beam search, which stays uncompressed, with compressed requests in the same batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from harness import assert_pool_is_whole, compression, prompt

ROWS = ("--max-running-requests", "4")


def search(client, seed: int, **settings):
    """The response to a search with three beams."""
    sampling = {"beam_width": 3, "n": 2, "max_new_tokens": 150, "ignore_eos": True, **settings}
    return client.post("/generate", input_ids=prompt(seed, 40), sampling_params=sampling)


def test_beams_with_compressed_requests(serve):
    """Prevents a round from evicting what beams share, or giving other rows of the batch wrong lengths."""
    client = serve(*ROWS)
    alone = client.generate(prompt(6, 40), 300)
    expected = search(serve(*ROWS, compressed=False), 5).json()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.generate, prompt(6, 40), 300)
        found = search(client, 5).json()
    assert found["output_ids"] == expected["output_ids"]
    assert abs(found["meta_info"]["sequence_score"] - expected["meta_info"]["sequence_score"]) < 1e-4
    assert compression(found)["rounds"] == 0
    assert other.result()["output_ids"] == alone["output_ids"]
    assert compression(other.result()) == compression(alone)
    assert compression(alone)["rounds"] >= 6
    assert_pool_is_whole(client)


def test_idle_conversations_make_way_for_beams(serve):
    """Prevents a search from waiting forever for rows that idle conversations hold."""
    client = serve(*ROWS)
    for number in range(3):
        params = {"triattention": {"conversation": f"idle {number}"}}
        assert compression(client.generate(prompt(number, 30), 120, custom_params=params))["conversation_kept"]
    assert search(client, 7).status_code == 200
    assert_pool_is_whole(client)


def test_beams_cannot_name_a_conversation(serve):
    """Prevents a client from relying on a row that a search does not keep."""
    refused = search(serve(*ROWS), 8, custom_params={"triattention": {"conversation": "beams"}})
    assert refused.status_code == 400
    assert "conversation does not work with beam_width 3" in refused.text
