"""`sglang-triattn plan`: bytes of a decode step and what follows from them, by hand for five models.

Each request has 512 tokens of prompt and 7,680 of answer. With budget 2,048 and interval 128, its row grows to
512 + 2,176, and after each round from 512 + 2,048 again: 2,176 steps to the first round, then 43 times 128 more.
"""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from plan_cases import LLAMA3_8B, published

PROMPT, LENGTH, FIRST, BUDGET, INTERVAL, RECENT = 512, 8192, 2176, 2048, 128, 409
STEPS = LENGTH - PROMPT
ROUNDS = (STEPS - FIRST) // INTERVAL
# Tokens of a row at a step: the mean of all steps, and between two rounds.
DENSE_ROW = (PROMPT + 1 + LENGTH) / 2
BETWEEN = PROMPT + BUDGET + (1 + INTERVAL) / 2
COMPRESSED_ROW = (FIRST * (PROMPT + (1 + FIRST) / 2) + (STEPS - FIRST) * BETWEEN) / STEPS
CANDIDATES = FIRST - RECENT
# Of a round, for each layer and KV head: slots, importance and sizes of values; what stays, what the values choose (4/5
# of all but the newest) and what moves.
LISTS = CANDIDATES * (4 + 8 + 4 + 8) + BUDGET * 16 + 1311 * 20 + INTERVAL * 16
LATENT_LISTS = CANDIDATES * (4 + 8) + BUDGET * 16 + INTERVAL * 16


def touched(experts: int, chosen: int, tokens: int) -> float:
    return experts * (1 - (1 - chosen / experts) ** tokens)


def llama_70b_tp8() -> dict[str, float]:
    """Every GPU of eight has one KV head and eight query heads of each layer."""
    hidden, inner, layers = 8192, 28672, 80
    attention = hidden * (64 + 8 + 8) * 128 + 64 * 128 * hidden
    parameters = layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden + 128256 * hidden
    keys = layers * 1 * 128
    return {
        "weights": 2 * parameters / 8,
        "per_token": 2 * keys * 2,
        "round": CANDIDATES * (2 * keys * 2 + layers * 8 * 4 * 2) + INTERVAL * 2 * keys * 2 * 2 + layers * LISTS,
    }


def qwen3_32b(tp: int) -> dict[str, float]:
    hidden, inner, layers = 5120, 25600, 64
    attention = hidden * (64 + 8 + 8) * 128 + 64 * 128 * hidden
    parameters = layers * (attention + 3 * hidden * inner + 2 * hidden + 2 * 128) + hidden + 151936 * hidden
    keys = layers * 8 // tp * 128
    return {
        "weights": 2 * parameters / tp,
        "per_token": 2 * keys * 2,
        "round": CANDIDATES * (2 * keys * 2 + layers * 64 // tp * 4 * 2)
        + INTERVAL * 2 * keys * 2 * 2
        + layers * 8 // tp * LISTS,
    }


def gpt_oss_20b() -> dict[str, float]:
    """12 layers read their window of 128, and have no rounds; 32 parameters of an expert share a scale of 8 bits."""
    hidden, layers, experts = 2880, 24, 32
    attention = layers * (hidden * (64 + 8 + 8) * 64 + 64 * 64 * hidden)
    biases = layers * ((64 + 8 + 8) * 64 + hidden + experts * (3 * hidden + 1))
    others = biases + layers * (2 * hidden + 64 + experts * hidden) + hidden + 201088 * hidden
    read = layers * touched(experts, 4, 32) * 3 * hidden * hidden
    keys = 12 * 8 * 64
    return {
        "weights": 2 * (attention + others) + read * 4.25 / 8,
        "per_token": 2 * keys * 2,
        "windows": 12 * 128 * 2 * 8 * 64 * 2,
        "round": CANDIDATES * (2 * keys * 2 + 12 * 64 * 4 * 2) + INTERVAL * 2 * keys * 2 * 2 + 12 * 8 * LISTS,
    }


def deepseek_v3_dp8() -> dict[str, float]:
    """Every GPU of eight reads all of attention, for 4 of the 32 requests, and an eighth of what is not attention."""
    hidden, layers, heads, expert = 7168, 61, 128, 3 * 7168 * 2048
    latents = hidden * (1536 + 512 + 64)
    attention = 1536 * heads * (128 + 64) + heads * 512 * (128 + 128) + heads * 128 * hidden
    norms = layers * (2 * hidden + 1536 + 512) + hidden
    split = 3 * 3 * hidden * 18432 + 58 * (1 + touched(256, 8, 32)) * expert + 2 * (129280 * hidden + norms)
    return {
        "weights": layers * (latents + attention) + split / 8 + 2 * 58 * 256 * hidden,
        "per_token": layers * 576 * 2,
        "round": CANDIDATES * (layers * 576 * 2 + layers * heads * 4 * 2)
        + INTERVAL * layers * 576 * 2 * 2
        + layers * LATENT_LISTS,
    }


def qwen3_30b_a3b() -> dict[str, float]:
    hidden, layers = 2048, 48
    attention = hidden * (32 + 4 + 4) * 128 + 32 * 128 * hidden
    router = 128 * hidden
    layer = attention + router + touched(128, 8, 32) * 3 * hidden * 768 + 2 * hidden + 2 * 128
    keys = layers * 4 * 128
    return {
        "weights": 2 * (layers * layer + hidden + 151936 * hidden),
        "per_token": 2 * keys * 2,
        "round": CANDIDATES * (2 * keys * 2 + layers * 32 * 4 * 2) + INTERVAL * 2 * keys * 2 * 2 + layers * 4 * LISTS,
    }


FIVE = pytest.mark.parametrize(
    ("name", "options", "expected", "group"),
    [
        ("llama-3.3-70b", "--gpu H100 --tp 8", llama_70b_tp8(), 32),
        ("qwen3-32b", "--gpu H100", qwen3_32b(1), 32),
        ("qwen3-32b", "--gpu H100 --tp 2", qwen3_32b(2), 32),
        ("gpt-oss-20b", "--gpu H100", gpt_oss_20b(), 32),
        ("deepseek-v3", "--gpu H200 --tp 8 --dp 8", deepseek_v3_dp8(), 4),
        ("qwen3-30b-a3b", "--gpu H100", qwen3_30b_a3b(), 32),
    ],
    ids=["llama-3.3-70b-tp8", "qwen3-32b", "qwen3-32b-tp2", "gpt-oss-20b", "deepseek-v3-dp8", "qwen3-30b-a3b"],
)


@pytest.fixture
def planned(run_plan):
    """Plans a known model; returns the content of --json, with the output as `text`."""

    def run(name: str, *options: str) -> dict:
        status, output, error = run_plan(published(name), *options, "--json", "plan.json")
        assert status == 0, error
        return {**json.loads(Path("plan.json").read_text()), "text": output}

    return run


SIZES = ("--prompt", str(PROMPT), "--length", str(LENGTH), "--batch", "32")


@FIVE
def test_bytes_of_a_step(planned, name, options, expected, group):
    """Prevents a step with wrong weights, with KV of the wrong number of tokens, heads or requests, or free rounds."""
    speed = planned(name, *options.split(), *SIZES)["speed"]
    window = expected.get("windows", 0)

    def kv(row: float) -> float:
        return group * (row * expected["per_token"] + window)

    parts = {
        "dense_mean": (kv(DENSE_ROW), 0),
        "dense_end": (kv(LENGTH), 0),
        "compressed_mean": (kv(COMPRESSED_ROW), group * expected["round"] * ROUNDS / STEPS),
        "compressed_end": (kv(BETWEEN), group * expected["round"] / INTERVAL),
    }
    for step, (read, rounds) in parts.items():
        found = speed["steps"][step]
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-9), step
        assert found["kv"] == pytest.approx(read, rel=1e-9), step
        assert found["rounds"] == pytest.approx(rounds, rel=1e-9), step
        assert found["total"] == pytest.approx(expected["weights"] + read + rounds, rel=1e-9)
    total = {step: expected["weights"] + read + rounds for step, (read, rounds) in parts.items()}
    assert speed["ceiling_mean"] == pytest.approx(total["dense_mean"] / total["compressed_mean"])
    assert speed["ceiling_end"] == pytest.approx(total["dense_end"] / total["compressed_end"])


@FIVE
def test_break_even(planned, name, options, expected, group):
    """Prevents a break-even that forgets what rounds cost, or that no longer follows from their cost."""
    saved, row, length = 0.0, PROMPT + FIRST, PROMPT + FIRST
    saved -= expected["round"]
    row -= INTERVAL
    while saved <= 0:
        length, row = length + 1, row + 1
        saved += (length - row) * expected["per_token"]
        assert row < PROMPT + FIRST
    assert planned(name, *options.split(), *SIZES)["speed"]["break_even"] == length


def test_latent_kv_is_for_capacity(planned):
    """Prevents promising speed for DeepSeek-V3 with attention data parallelism, or splitting its KV over --tp."""
    groups = planned("deepseek-v3", "--gpu", "H200", "--tp", "8", "--dp", "8", *SIZES)
    assert groups["speed"]["verdict"] == "capacity, hardly speed"
    assert "groups       8 of 1 GPU, each with requests and KV of its own" in groups["text"]
    assert "8 of 256" not in groups["text"]
    assert f"of each layer {touched(256, 8, 32):.1f} of 256 experts, if routed at random" in groups["text"]
    alone = planned("deepseek-v3", "--gpu", "H200", "--tp", "8", *SIZES)
    assert "latent KV    one head, which each of 8 GPUs holds whole" in alone["text"]
    for content, groups_of_requests in ((groups, 8), (alone, 1)):
        dense = content["rows"][0]
        assert dense["bytes_per_token"] == 61 * 576 * 2
        assert dense["requests"] == dense["pool_tokens"] // LENGTH * groups_of_requests
    # Each GPU holds seven eighths of attention and of the input embedding more.
    attention = 61 * (1536 * 128 * 192 + 128 * 512 * 256 + 128 * 128 * 7168)
    more = groups["gpus"]["weight_share"] - alone["gpus"]["weight_share"]
    assert more == pytest.approx((attention + 2 * 129280 * 7168) * 7 / 8)


def test_where_dense_stops_fitting(planned):
    """Prevents a length at which one more token of each request would still fit, or these do not."""
    found = planned("qwen3-30b-a3b", "--gpu", "H100", "--prompt", "512", "--length", "16384", "--batch", "32")
    pool = found["rows"][0]["pool_tokens"]
    assert found["speed"]["dense_fits"] == pool // 32 < 16384
    assert f"32 requests fit compressed to the end; dense up to {pool // 32:,} tokens each" in found["text"]
    assert "had dense room for them; not measured" in found["text"]
    many = planned("qwen3-30b-a3b", "--gpu", "H100", "--batch", str(pool + 1))
    assert many["speed"]["dense_fits"] is None
    most = many["rows"][2]["requests"]
    assert f"{pool + 1:,} requests fit dense at no length; compressed, only {most:,} do" in many["text"]


def test_as_many_requests_as_fit(planned):
    """Prevents a default number of requests that dense could not run, and rates of any other number."""
    found = planned("llama-3.3-70b", "--gpu", "H100", "--tp", "8")
    dense, _, compressed, _ = (row["requests"] for row in found["rows"])
    speed = found["speed"]
    assert speed["requests"] == dense
    assert f"{dense:,} requests fit dense and compressed to the end" in found["text"]
    rates = speed["most_tokens_per_second"]
    assert rates["dense"] == pytest.approx(dense / speed["steps"]["dense_mean"]["least_seconds"])
    assert f"{rates['compressed']:,.0f} tokens/s compressed ({compressed:,} requests)" in found["text"]
    none = planned("qwen3-32b", "--gpu", "RTX4090", "--weight-dtype", "int4")
    assert none["speed"]["requests"] == none["rows"][2]["requests"] > none["rows"][0]["requests"] == 0
    assert "none dense" in none["text"]
    nothing = planned("qwen3-32b", "--gpu", "RTX4090", "--weight-dtype", "int4", "--prompt", "30000")
    assert nothing["speed"] is None
    assert "no such request fits even compressed: add --batch, or lower --prompt" in nothing["text"]


def test_short_answers_gain_nothing(planned):
    """Prevents promises for answers that end before the first round."""
    found = planned("llama-3.3-70b", "--gpu", "H100", "--tp", "8", "--length", "2000")
    speed = found["speed"]
    assert (speed["ceiling_mean"], speed["ceiling_end"], speed["verdict"]) == (1, 1, "no capacity, hardly speed")
    assert speed["break_even"] > 1024 + FIRST
    never = planned("llama-3.3-70b", "--gpu", "H100", "--tp", "8", "--budget", "131072")
    assert never["speed"]["break_even"] is None
    assert "break-even   none up to the context limit" in never["text"]


def test_the_hardware(run_plan):
    """Prevents a flag that loses against --gpu, or wins in silence, and speed without a bandwidth."""
    text = run_plan(LLAMA3_8B, "--gpu", "H100", "--memory", "40G", "--bandwidth", "2T")[1]
    assert "memory       40.00 GiB" in text
    assert "note         --memory 40G wins over the 80G of H100" in text
    assert "note         --bandwidth 2T wins over the 3.35T of H100" in text
    assert "requests at once, 2 TB/s" in text
    assert "note" not in run_plan(LLAMA3_8B, "--gpu", "A100", "--memory", "80G", "--bandwidth", "2.039T")[1]
    assert "1.008 TB/s" in run_plan(LLAMA3_8B, "--memory", "24G", "--bandwidth", "1008g")[1]
    text = run_plan(LLAMA3_8B, "--memory", "24G", "--json", "plan.json")[1]
    assert text.endswith(
        "\nspeed        left out, because it needs the memory bandwidth: add --gpu, or --bandwidth 3.35T\n"
    )
    assert json.loads(Path("plan.json").read_text())["speed"] is None


def test_weights_that_are_not_known(planned):
    """Prevents a model whose experts are not known from counting as if a step read only some of them."""
    found = planned("minimax-m2", "--gpu", "H100", "--tp", "4", "--weights", "220G")
    assert "all weights are counted as read" in found["text"]
    assert found["speed"]["steps"]["dense_end"]["weights"] == (220 << 30) / 4
    assert found["speed"]["experts_touched"] is None
    states = planned("qwen3-next-80b-a3b", "--gpu", "H100", "--tp", "2", "--weights", "80G")
    assert "; states of fixed size are not counted" in states["text"]


def test_recommended_budgets(planned):
    """Prevents a budget that is not the largest, or that the plan then does not use."""
    shared = planned("qwen3-32b", "--gpu", "H200", "--prompt", "1024", "--length", "17408", "--share", "0.25")
    assert shared["recommended_budget"] == shared["settings"]["budget"] == 16384 // 4
    assert "recommended  budget 4,096, 0.25 of the 16,384 tokens of an answer" in shared["text"]
    found = planned("qwen3-32b", "--gpu", "H200", "--requests", "50")
    budget, row = found["recommended_budget"], found["rows"][2]
    assert row["peak_tokens"] == 1024 + budget + INTERVAL == row["pool_tokens"] // 50
    assert row["requests"] >= 50 == found["speed"]["requests"]
    assert f"recommended  budget {budget:,}, the largest at which 50 requests fit\n" in found["text"]
    one = planned("qwen3-32b", "--gpu", "H200", "--requests", "1")
    assert one["text"].count("the largest at which 1 requests fit; nothing is evicted") == 1
    assert one["rows"][2]["peak_tokens"] == one["rows"][0]["peak_tokens"]
    windows = planned("gpt-oss-20b", "--gpu", "RTX5090", "--requests", "200")
    assert windows["rows"][2]["requests"] >= 200
    assert windows["recommended_budget"] >= 128


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture(planned, ending):
    """Prevents an empty picture, or one that does not say where dense stops fitting."""
    options = ("--prompt", "512", "--length", "16384", "--batch", "32", "--plot", f"plan.{ending}")
    planned("qwen3-30b-a3b", "--gpu", "H100", *options)
    content = Path(f"plan.{ending}").read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        assert ET.fromstring(text).tag.endswith("svg")
        assert all(words in text for words in ("dense does not fit", "compressed, budget 2,048", "no measurement"))
