"""Requests that reason, when SGLang keeps no answer with reasoning."""

from __future__ import annotations

import pytest

from harness import assert_pool_is_whole, compression, prompt
from sets import wide

STRIPPED = ("--strip-thinking-cache", "--reasoning-parser", "qwen3", "--triattention-sinks", "48")


def reason(client, ids: list[int], **triattention) -> dict:
    response = client.post(
        "/generate",
        input_ids=ids,
        require_reasoning=True,
        sampling_params={
            "max_new_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {"triattention": triattention},
        },
    )
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("page_size", [wide(1), 16])
def test_stripped_answers_are_owned_once(serve, chat_model, page_size):
    """Prevents the tree from being given slots of an answer that SGLang frees; its strict checks end the server.

    Rounds leave the first 48 tokens alone, so that the beginning of the answer lies before the first hole.
    """
    client = serve("--page-size", str(page_size), *STRIPPED, model=chat_model, tokenizer=True)
    client.flush()
    ids = prompt(1, 20)
    answer = reason(client, ids)
    assert answer["meta_info"]["reasoning_tokens"] > 0
    assert compression(answer)["rounds"] > 0
    client.assert_alive()
    client.wait_for_slots()
    # Of prompt and answer, the tree holds only the prompt.
    again = reason(client, ids + answer["output_ids"])
    assert 0 < again["meta_info"]["cached_tokens"] <= 20
    assert_pool_is_whole(client)

    first = reason(client, ids, conversation=f"reasoning {page_size}")
    assert compression(first)["conversation_kept"]
    following = ids + first["output_ids"] + prompt(2, 9)
    second = reason(client, following, conversation=f"reasoning {page_size}")
    assert compression(second)["conversation"] == "resumed"
    assert_pool_is_whole(client)
