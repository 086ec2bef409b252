"""Failures seen in other runtimes of this method, with a test or two for each.

Without a GPU a queued step has already run when a round begins, so only its result is in flight: SGLang's books do not
have the newest token yet. tests/gpu/test_graphs.py covers the other half, graphs captured before a round.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch

from harness import BUDGET, INTERVAL, assert_pool_is_whole, compression, prompt, served_logprobs
from oracle import TOLERANCE, Oracle, oracle_of
from server import ServerError
from sglang_triattn.model.fingerprint import model_fingerprint
from sglang_triattn.stats.file import load_stats, save_stats
from tiny_model import TinyModel, build_tiny_model

PROMPT, TOKENS = 64, 200
# Page size, recent tokens, selection. With one recent token, a single token evicted too many is missed. With more than
# an interval of them, order counts: rows are cut before them, or all K/V slides where that would cut a page.
ROUNDS = {
    "remap": ("1", 1, "shared-mean"),
    "cut": ("16", INTERVAL + 8, "per-layer-head"),
    "slide": ("64", INTERVAL + 8, "per-layer-head"),
}
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "45", "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "9"}


@dataclass
class Watched:
    """One request with several rounds, and what the scheduler ran for it."""

    ids: list[int]
    response: dict
    steps: list[dict]
    """Its decode steps, see `step_probe`."""
    oracle: Oracle

    @property
    def tokens(self) -> list[int]:
        return self.ids + self.response["output_ids"]

    @property
    def after_rounds(self) -> list[int]:
        """The first step after each round."""
        lengths = [step["attended"] for step in self.steps]
        return [index for index in range(1, len(lengths)) if lengths[index] < lengths[index - 1]]

    def keys(self) -> torch.Tensor:
        """[tokens, H_kv * head_dim]: the first layer's keys, each at its own token's position."""
        with torch.no_grad():
            cache = self.oracle.model(input_ids=torch.tensor([self.tokens]), use_cache=True).past_key_values
        return cache.layers[0].keys[0].transpose(0, 1).flatten(1)


@pytest.fixture(scope="module", params=ROUNDS)
def watched(probed, tiny, request) -> Watched:
    page_size, recent, selection = ROUNDS[request.param]
    flags = ("--page-size", page_size, "--triattention-recent", str(recent), "--triattention-selection", selection)
    client, steps = probed(*flags, contents=True)
    ids = prompt(91, PROMPT)
    response = client.generate(ids, TOKENS, logprobs=True)
    rid = response["meta_info"]["id"]
    own = [seen for step in steps() for seen in step["requests"] if seen["rid"] == rid]
    oracle = dataclasses.replace(oracle_of(tiny), recent=recent, selection=selection)
    found = Watched(ids, response, own, oracle)
    assert compression(response)["rounds"] == len(found.after_rounds) >= 4
    return found


def test_a_round_to_exactly_the_budget_spares_the_token_in_flight(watched):
    """Prevents a round that leaves exactly the budget from freeing the slot of the token being computed."""
    keys = watched.keys()
    for index in watched.after_rounds:
        before, after = watched.steps[index - 1], watched.steps[index]
        assert before["attended"] == PROMPT + BUDGET + INTERVAL
        assert after["attended"] == PROMPT + BUDGET + 1, "a round leaves the budget, and this step adds its token"
        assert after["known"] == after["logical"] - 1, "nothing was in flight"
        in_flight = torch.tensor(after["newest_key"])
        torch.testing.assert_close(in_flight, keys[after["logical"] - 2], rtol=0, atol=TOLERANCE)
    expected, _ = watched.oracle.logprobs(watched.tokens[:-1], PROMPT, PROMPT)
    values, tokens = served_logprobs(watched.response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE


def test_the_first_write_after_a_round(watched):
    """Prevents the first new K/V from landing on a kept token, in a freed slot, or at the row's physical position."""
    keys = watched.keys()
    for index in watched.after_rounds:
        first, second = watched.steps[index], watched.steps[index + 1]
        assert len(set(first["slots"])) == first["attended"]
        assert second["slots"][:-1] == first["slots"]
        assert second["prints"][:-2] == first["prints"][:-1], "the write changed K/V that the round had kept"
        written = torch.tensor(second["newest_key"])
        torch.testing.assert_close(written, keys[first["logical"] - 1], rtol=0, atol=TOLERANCE)
        elsewhere = keys[first["attended"] - 1]
        assert (written - elsewhere).abs().max() > 50 * TOLERANCE


def test_retracted_requests_compute_what_they_would_have(probed, tiny):
    """Prevents preemption from leaving a compressed request with positions, counts or holes of the row that it lost.

    SGLang recomputes a retracted request's output in a single prefill. From there on its answer must be that of a
    request with an equally long text of which nothing has been evicted yet.
    """
    client, steps = probed("--page-size", "1", "--max-total-tokens", "1024", env=RETRACT)
    prompts = [prompt(80 + number, 25 + number) for number in range(3)]
    responses = client.generate_all(prompts, TOKENS, logprobs=True)
    seen = [request for step in steps() for request in step["requests"]]
    compressed = 0
    for ids, response in zip(prompts, responses, strict=True):
        own = [step for step in seen if step["rid"] == response["meta_info"]["id"]]
        starts = [index for index in range(1, len(own)) if own[index]["retractions"] > own[index - 1]["retractions"]]
        compressed += sum(own[index - 1]["logical"] > own[index - 1]["attended"] for index in starts)
        values, tokens = served_logprobs(response)
        everything = ids + response["output_ids"]
        # Token counts after which each stretch was sampled; its first token comes from a prefill.
        prefilled = [len(ids), *(own[index]["logical"] - 1 for index in starts), len(everything)]
        for first, end in itertools.pairwise(prefilled):
            expected, _ = oracle_of(tiny).logprobs(everything[: end - 1], first, len(ids))
            part = slice(first - len(ids), end - len(ids))
            assert (expected.gather(1, tokens[part]) - values[part]).abs().max() < TOLERANCE
    assert compressed >= 2, "no request was retracted after a round"
    assert_pool_is_whole(client)


@pytest.mark.wide
def test_two_runs_in_one_process(serve):
    """Prevents statistics, counts or kept sets of a run that change the next run."""
    client = serve("--page-size", "1")
    prompts = [prompt(95 + number, 40 + 9 * number) for number in range(3)]
    runs, rounds = [], [client.totals()["rounds"]]
    for _ in range(2):
        client.flush()
        runs.append([client.generate(ids, TOKENS) for ids in prompts])
        rounds.append(client.totals()["rounds"])
        # Another run in between: other prompts, other settings, a row that is parked and given up.
        fields = {"conversation": "between", "budget": 32, "interval": 8, "recent": 8}
        client.generate(prompt(99, 30), 90, custom_params={"triattention": fields})
    one, other = runs
    assert [answer["output_ids"] for answer in one] == [answer["output_ids"] for answer in other]
    assert [compression(answer) for answer in one] == [compression(answer) for answer in other]
    assert all(compression(answer)["rounds"] >= 4 for answer in one)
    assert rounds[1] - rounds[0] == sum(compression(answer)["rounds"] for answer in one)


@pytest.fixture(scope="module")
def other_theta(tmp_path_factory) -> TinyModel:
    """A model whose `rope_theta` is not the 10,000 assumed when a configuration names none."""
    return build_tiny_model(tmp_path_factory.mktemp("models"), "other-theta")


def test_statistics_of_another_rope_theta_are_refused(serve, tiny, other_theta, tmp_path):
    """Prevents scoring with the frequencies of another model than the one served, where a file's fingerprint, by which
    a launch would know it before, is that of the served one."""
    stats = dataclasses.replace(load_stats(tiny.stats), fingerprint=model_fingerprint(str(other_theta.path)))
    save_stats(stats, tmp_path / "other.safetensors")
    with pytest.raises(ServerError) as caught:
        serve(model=dataclasses.replace(other_theta, stats=tmp_path / "other.safetensors"))
    (line,) = [line for line in str(caught.value).splitlines() if line.startswith("sglang-triattn: error: ")]
    assert "RoPE frequency 1 of 16 (rope_theta or rope scaling) is 0.56" in line
    assert " and 0.44" in line
    assert "sglang-triattn calibrate" in line
    assert "Traceback" not in str(caught.value)


def test_statistics_without_frequencies_take_the_models_own(serve, other_theta, tmp_path_factory):
    """Prevents a default `rope_theta` where the published format says nothing, and silence about it."""
    oracle = oracle_of(other_theta)
    parts = {"q_mean_real": oracle.mean.real, "q_mean_imag": oracle.mean.imag, "q_abs_mean": oracle.abs_mean}
    entries = {
        f"layer{layer:02d}_head{head:02d}": {name: part[layer, head].clone() for name, part in parts.items()}
        for layer in range(other_theta.num_layers)
        for head in range(other_theta.num_q_heads)
    }
    published = tmp_path_factory.mktemp("published") / "other-theta.pt"
    torch.save({"metadata": {"rope_style": "half", "head_dim": other_theta.head_dim}, "stats": entries}, published)
    client = serve(model=dataclasses.replace(other_theta, stats=published))
    assert f"because {published} holds none" in client.server.log_path.read_text()
    ids = prompt(92, 45)
    response = client.generate(ids, TOKENS, logprobs=True)
    everything = ids + response["output_ids"][:-1]
    expected, rounds = oracle.logprobs(everything, len(ids), len(ids))
    assert compression(response)["rounds"] == rounds >= 4
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
    default = 10000.0 ** (-torch.arange(16, dtype=torch.float64) / 16)
    wrong, _ = dataclasses.replace(oracle, inv_freq=default).logprobs(everything, len(ids), len(ids))
    assert (wrong.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE
