"""While nothing has been evicted, the server is plain SGLang to the last bit."""

from __future__ import annotations

from harness import BUDGET, INTERVAL, compression, prompt
from tiny_model import END

OUTPUT = BUDGET + INTERVAL  # the last token's K/V is never computed, so private tokens stay one below the trigger


def cases() -> list[list[int]]:
    stem = prompt(1, 60)
    return [prompt(2, 5), stem, stem + prompt(3, 30), stem + prompt(4, 77)]


def observed(response) -> tuple:
    meta = response["meta_info"]
    return (
        response["output_ids"],
        meta["output_token_logprobs"],
        meta["output_top_logprobs"],
        meta["cached_tokens"],
    )


def test_bit_identical_below_the_trigger(serve):
    """Prevents compression from changing an answer, a log-probability or a prefix hit before it has evicted."""
    compressed, plain = serve("--page-size", "1"), serve("--page-size", "1", compressed=False)
    for client in (compressed, plain):
        # Other tests may have left prefixes.
        client.flush()
    for ids in cases():
        ours = compressed.generate(ids, OUTPUT, logprobs=True)
        assert observed(ours) == observed(plain.generate(ids, OUTPUT, logprobs=True))
        report = compression(ours)
        assert report["rounds"] == report["evicted_tokens"] == report["freed_slots"] == 0
        assert report["physical_length"] == report["logical_length"] == len(ids) + OUTPUT - 1
    assert "triattention" not in plain.generate(cases()[0], 4)["meta_info"]


def test_finished_output_is_shared_while_exact(serve):
    """Prevents uncompressed requests from losing what plain SGLang shares: their whole text, for the next turn."""
    client = serve("--page-size", "1")
    first = client.generate(prompt(5, 20), 30)
    follow = prompt(5, 20) + first["output_ids"] + prompt(6, 10)
    assert client.generate(follow, 4)["meta_info"]["cached_tokens"] == 20 + 29


def test_overlap_changes_nothing(serve):
    """Prevents the queued step of overlap scheduling from shifting a round by a token."""
    ids = prompt(9, 33)
    overlapped = serve("--page-size", "1").generate(ids, 500)
    sequential = serve("--page-size", "1", "--disable-overlap-schedule").generate(ids, 500)
    assert overlapped["output_ids"] == sequential["output_ids"]
    assert compression(overlapped) == compression(sequential)
    assert compression(overlapped)["rounds"] > 10


def test_sampling_settings_still_hold(serve):
    """Prevents penalties and stop conditions from counting physical instead of logical tokens."""
    client = serve("--page-size", "1")
    ids = prompt(10, 12)
    plain_text = client.generate(ids, 300)["output_ids"]
    assert len(plain_text) == 300
    # Once stop conditions count, so does the end-of-text token.
    plain_text = plain_text[: plain_text.index(END)] if END in plain_text else plain_text
    late = max(set(plain_text), key=plain_text.index)
    end = plain_text.index(late) + 1
    assert end > BUDGET + INTERVAL
    stopped = client.generate(ids, 300, stop_token_ids=[late], ignore_eos=False)
    assert stopped["output_ids"] == plain_text[:end]
    penalised = client.generate(ids, len(plain_text), frequency_penalty=2.0)["output_ids"]
    assert max(map(penalised.count, penalised)) < max(map(plain_text.count, plain_text))


def test_context_limit_counts_logical_tokens(serve):
    """Prevents a compressed request from exceeding the model's context, or ending early, because its row is short."""
    client = serve("--context-length", "512")
    fitting, too_long = 512 - 100 - 2, 512 - 100 + 1
    response = client.generate(prompt(11, 100), fitting)
    assert response["meta_info"]["completion_tokens"] == fitting
    assert compression(response)["rounds"] > 5
    sampling = {"max_new_tokens": too_long, "ignore_eos": True}
    assert client.post("/generate", input_ids=prompt(11, 100), sampling_params=sampling).status_code == 400
