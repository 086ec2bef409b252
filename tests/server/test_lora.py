"""Adapters: their requests are compressed like others, together with requests for the base model."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import BUDGET, INTERVAL, compression, prompt, python_path, served_logprobs
from lora_adapter import build_adapter, install_unpinned, merge, serving
from oracle import TOLERANCE, Oracle, oracle_of


@pytest.fixture(scope="module")
def serve_lora(serve, tiny, tmp_path_factory):
    """`serve_lora(compressed=True)` returns the Client of a server with the adapter "other"."""
    flags = serving(build_adapter(tmp_path_factory.mktemp("adapter"), tiny))
    env = {"PYTHONPATH": python_path(install_unpinned(tmp_path_factory.mktemp("unpinned")))}
    return lambda **options: serve(*flags, env=env, **options)


@pytest.fixture(scope="module")
def adapted_oracle(tiny) -> Oracle:
    """An oracle with the base model's statistics and a model into which the adapter is merged."""
    return merge(oracle_of(tiny), tiny)


def test_adapter_and_base_requests_together(serve_lora, tiny, adapted_oracle):
    """Prevents rounds that mix up requests of different adapters, or score an adapter's keys as the base model's."""
    client = serve_lora()
    prompts, loras = [prompt(31, 40), prompt(31, 40), prompt(32, 21), prompt(33, 55)], [None, "other", "other", None]
    with ThreadPoolExecutor(4) as pool:
        responses = pool.map(lambda ids, lora: client.generate(ids, 200, logprobs=True, lora=lora), prompts, loras)
    base = oracle_of(tiny)
    for ids, lora, response in zip(prompts, loras, responses, strict=True):
        report = compression(response)
        assert report["frozen_length"] == len(ids)
        assert report["logical_length"] - report["physical_length"] == report["evicted_tokens"] == report["freed_slots"]
        values, tokens = served_logprobs(response)
        ours, others = (adapted_oracle, base) if lora else (base, adapted_oracle)
        everything = ids + response["output_ids"][:-1]
        expected, rounds = ours.logprobs(everything, len(ids), len(ids))
        assert report["rounds"] == rounds >= 3
        assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
        wrong, _ = others.logprobs(everything, len(ids), len(ids))
        assert (wrong.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE
    client.flush()
    assert client.slots_in_use() == 0


def test_prefixes_of_an_adapter_stay_its_own(serve_lora):
    """Prevents a frozen prefix of the base model from being served to an adapter, even after rounds."""
    client = serve_lora()
    client.flush()
    ids, tokens = prompt(41, 60), BUDGET + 2 * INTERVAL + 8
    answers = [client.generate(ids, tokens, lora=lora) for lora in (None, "other", None, "other")]
    assert {compression(answer)["rounds"] for answer in answers} == {2}
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 0, len(ids) - 1, len(ids) - 1]
    assert [answer["output_ids"] for answer in answers[:2]] == [answer["output_ids"] for answer in answers[2:]]


def test_short_adapter_requests_equal_plain_sglang(serve_lora):
    """Prevents compression from touching a request that never outgrows its budget."""
    ids, tokens = prompt(51, 30), BUDGET + INTERVAL - 1
    client = serve_lora()
    short, base = (client.generate(ids, tokens, logprobs=True, lora=lora) for lora in ("other", None))
    assert compression(short)["rounds"] == 0
    assert short["output_ids"] != base["output_ids"]
    plain = serve_lora(compressed=False).generate(ids, tokens, logprobs=True, lora="other")
    assert short["output_ids"] == plain["output_ids"]
    assert short["meta_info"]["output_top_logprobs"] == plain["meta_info"]["output_top_logprobs"]
