"""`sglang-triattn plan` for models other than plain Llama-like ones."""

import json
from pathlib import Path

import pytest

from plan_cases import CONFIGS, rows_of
from sglang_triattn.capacity import WINDOW_INTERVAL, WINDOW_SHARE

FREE = 8 << 30


@pytest.fixture
def rows(run_plan):
    """Plans a known model with 8 GiB for KV; returns the rows of the table and the whole output."""

    def run(name: str, *options: str) -> tuple[dict[str, list[int]], str]:
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        status, output, error = run_plan(config, "--memory", "9G", "--weights", "1G", "--reserve", "0", *options)
        assert status == 0, error
        return rows_of(output), output

    return run


@pytest.mark.parametrize(("name", "size"), [("qwen3-30b-a3b", 98304), ("glm-4.6", 376832), ("mixtral-8x7b", 131072)])
def test_models_with_experts_and_partial_rotation(rows, name, size):
    """Prevents KV of the rotated dims alone, and refusing experts, which have no part in the cache."""
    found, output = rows(name)
    assert found["dense"][:2] == [size, FREE // size]
    assert "(given)" in output
    assert "only their window" not in output


def test_windows_in_the_full_pool_count_as_any_layer(rows):
    """Prevents promising memory that SGLang keeps for window layers outside their window."""
    assert rows("gemma-3-1b")[0]["dense"][:2] == [26624, FREE // 26624]
    assert rows("exaone-4-32b", "--budget", "4096")[0]["dense"][0] == 262144


def test_layers_without_attention_keep_their_room(rows):
    """Prevents promising memory that SGLang's pool has for layers which never use it."""
    assert rows("nemotron-super-49b")[0]["dense"][0] == 327680


def test_heads_of_two_widths_and_layers_that_read_others(rows):
    """Prevents KV of heads as wide as those of window layers, and promising memory that SGLang's pool has for layers
    which read the KV of another."""
    assert rows("gemma-4-31b")[0]["dense"][0] == 10 * 4 * 2 * 512 * 2
    assert rows("gemma-4-e2b")[0]["dense"][0] == 7 * 2 * 512 * 2


def test_a_pool_for_windows_takes_its_share(rows):
    """Prevents counting a window layer's whole trace, or forgetting that its pool takes memory too."""
    found, output = rows("gpt-oss-20b", "--length", "32768", "--prompt", "1000", "--page-size", "1")
    pool = FREE // (24576 + int(WINDOW_SHARE * 24576))
    assert found["dense"] == [24576, pool, 32768, 131072, pool // 32768]
    assert "; 12 layers keep only their window, in 80% as many slots" in output
    compressed = found["compressed"]
    assert compressed[2] == 1000 + 2176
    assert compressed[4] == compressed[1] // 3176
    assert json.loads(Path("model").read_text())["sliding_window"] == 128


def test_windows_can_be_what_runs_out(rows):
    """Prevents requests whose windows do not fit, where the budget is little more than a window."""
    found, _ = rows("step-3.5-flash", "--budget", "520", "--interval", "8", "--prompt", "1", "--length", "9000")
    pool = found["compressed"][1]
    assert (
        found["compressed"][4] == int(WINDOW_SHARE * pool) // (513 + WINDOW_INTERVAL) < pool // found["compressed"][2]
    )
