"""`sglang-triattn plan`: what a GPU holds."""

import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from documents import DOCS, fenced_blocks, section
from plan_cases import LLAMA3_8B, QWEN3_8B, ROOT, SMOLLM2, rows_of
from sglang_triattn.capacity import Gpus, Workload, peak_tokens, plan
from sglang_triattn.cli import main as cli
from sglang_triattn.config import Config
from sglang_triattn.kernels.workspace import LIMIT_BYTES
from sglang_triattn.model.sizes import read_sizes
from sglang_triattn.rounds.plan import plan_round
from sglang_triattn.rounds.rules import complete


@pytest.mark.parametrize("scope", ["private", "total"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("prompt", [1, 77, 128, 500])
def test_peak_is_that_of_the_product(scope, page_size, prompt):
    """Prevents a bound that differs from what rounds enforce, tokens in flight and pages included."""
    config = complete(Config(budget=200, interval=30, recent=20, budget_scope=scope))
    frozen = max(prompt - prompt % page_size, config.sinks)
    length, evicted, peak = prompt, 0, prompt
    while length + evicted < 2000:
        # SGLang allocates a slot for the next token; then a round may be due.
        length += 1
        peak = max(peak, length)
        ceil_align = -(-peak // page_size) * page_size
        assert peak_tokens(config, Workload(prompt, length + evicted), page_size) == ceil_align
        due = plan_round(config, frozen=frozen, length=length, evicted_before=evicted, page_size=page_size)
        if due is not None:
            length, evicted = due.new_length, evicted + due.evicted_tokens
    assert evicted > 500
    assert peak_tokens(None, Workload(prompt, 2000), page_size) == -(-2000 // page_size) * page_size


def test_rows(run_plan):
    """Prevents swapped columns, fp8 that leaves the pool unchanged, and partial pages."""
    status, output, _ = run_plan(
        LLAMA3_8B, "--weights", "16G", "--reserve", "0", "--prompt", "1000", "--page-size", "64"
    )
    assert status == 0
    tokens = (8 << 30) // 131072
    workspace = LIMIT_BYTES // 131072
    assert rows_of(output) == {
        "dense": [131072, tokens, 32768, 40960, tokens // 32768],
        "fp8": [65536, 2 * tokens, 32768, 40960, 2 * tokens // 32768],
        "compressed": [131072, tokens - workspace, 960 + 2176, 40960, (tokens - workspace) // 3136],
        "both": [65536, 2 * (tokens - workspace), 3136, 40960, 2 * (tokens - workspace) // 3136],
    }
    rows = rows_of(run_plan(LLAMA3_8B, "--weights", "15.83G", "--reserve", "0", "--page-size", "64")[1])
    tokens = int(8.17 * (1 << 30)) // 131072
    assert tokens % 64
    assert rows["dense"][1] == tokens // 64 * 64


def test_longest_trace(run_plan):
    """Prevents a dense trace longer than the pool, and a bounded one shorter than the context limit."""
    _, output, _ = run_plan(LLAMA3_8B, "--weights", "23G", "--reserve", "0", "--budget", "2048")
    rows = rows_of(output)
    assert [rows[name][3] for name in ("dense", "compressed")] == [8192, 40960]
    _, output, _ = run_plan(LLAMA3_8B, "--weights", "23G", "--reserve", "0", "--budget", "8000")
    rows = rows_of(output)
    assert [rows[name][3] for name in ("dense", "compressed")] == [8192, 8192 - LIMIT_BYTES // 131072]


def test_options_reach_the_plan(run_plan):
    """Prevents flags that are read and then forgotten."""
    rows = rows_of(run_plan(LLAMA3_8B, "--budget-scope", "total", "--interval", "100", "--length", "9000")[1])
    assert (rows["dense"][2], rows["compressed"][2]) == (9000, 2048 + 100)
    rows = rows_of(run_plan(LLAMA3_8B, "--length", "500")[1])
    assert rows["dense"][2] == rows["compressed"][2] == 500
    rows = rows_of(run_plan(LLAMA3_8B, "--kv-dtype", "fp8_e4m3", "--tp", "2")[1])
    assert {name: row[0] for name, row in rows.items()} == {"fp8": 32768, "both": 32768}
    fp8_kv = {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}
    assert set(rows_of(run_plan({**LLAMA3_8B, "quantization_config": fp8_kv})[1])) == {"fp8", "both"}
    assert (
        "12.00 GiB on each of 2 GPUs, 25% in reserve"
        in run_plan(LLAMA3_8B, "--memory", "12G", "--tp", "2", "--reserve", "0.25")[1]
    )


def test_json(run_plan):
    """Prevents a file that disagrees with the table."""
    status, output, _ = run_plan(QWEN3_8B, "--json", "plan.json")
    assert status == 0
    content = json.loads(Path("plan.json").read_text())
    names = ("bytes_per_token", "pool_tokens", "peak_tokens", "longest_trace", "requests")
    assert {row["name"]: [row[name] for name in names] for row in content["rows"]} == rows_of(output)
    assert [row["kv_dtype"] for row in content["rows"]] == ["bfloat16", "fp8_e5m2"] * 2
    gpus = content["gpus"]
    assert (gpus["memory_bytes"], gpus["weight_bytes"], gpus["reserve"]) == (24 << 30, 2 * 8_190_735_360, 0.1)
    assert gpus["kv_bytes"] == int((24 << 30) * 0.9) - gpus["weight_bytes"]
    assert (content["model"]["kv_heads"], content["model"]["context"]) == (8, 40960)
    assert (content["settings"]["budget"], content["request"]) == (2048, {"prompt": 1024, "length": 32768})
    assert content["weights"].startswith("estimated")


@pytest.mark.parametrize(
    ("text", "count"), [("24G", 24 << 30), ("24GiB", 24 << 30), ("1.5g", 3 << 29), ("900MiB", 900 << 20)]
)
def test_memory_units(run_plan, text, count):
    """Prevents losing 7 % of memory between powers of ten and of two."""
    assert run_plan(SMOLLM2, "--memory", text, "--json", "plan.json")[0] == 0
    assert json.loads(Path("plan.json").read_text())["gpus"]["memory_bytes"] == count


def test_folder_and_nested_text_config(run_plan, tmp_path):
    """Prevents a model folder, or a text model inside a wrapper, from being refused."""
    wrapped = {"model_type": "wrapper", "text_config": LLAMA3_8B}
    assert rows_of(run_plan(wrapped)[1]) == rows_of(run_plan(LLAMA3_8B)[1]) != {}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert cli.main(["plan", "--model", str(tmp_path), "--memory", "24G"]) == 0


@settings(deadline=None)
@given(
    budgets=st.tuples(st.integers(1, 50_000), st.integers(1, 50_000)),
    interval=st.integers(1, 1000),
    prompt=st.integers(1, 20_000),
    page_size=st.sampled_from([1, 16, 64]),
    scope=st.sampled_from(["private", "total"]),
    free=st.integers(1 << 28, 1 << 36),
)
def test_a_smaller_budget_never_fits_fewer_requests(budgets, interval, prompt, page_size, scope, free):
    """Prevents rounding, page or scope arithmetic in which keeping less serves fewer."""
    sizes = read_sizes(LLAMA3_8B)
    gpus = Gpus(free, 0.0, 0, 0, 1, page_size)
    small, large = (
        plan(
            sizes,
            gpus,
            complete(Config(budget=b, interval=interval, recent=0, budget_scope=scope)),
            Workload(prompt, 32768),
            "bfloat16",
        )
        for b in sorted(budgets)
    )
    for one, other in zip(small, large, strict=True):
        assert one.requests >= other.requests
        assert one.longest_trace >= other.longest_trace
    dense, _, compressed, _ = large
    assert compressed.requests >= dense.requests


def test_the_docs_show_what_the_command_prints(monkeypatch, capsys):
    """Prevents an example in docs/capacity.md that the command no longer prints."""
    monkeypatch.chdir(ROOT)
    text = section(DOCS / "capacity.md", "What fits")
    command = re.search(r"^    sglang-triattn (plan .*)$", text, re.M)[1]
    assert cli.main(shlex.split(command)) == 0
    assert fenced_blocks(text) == [("", capsys.readouterr().out)]
    assert cli.main([*shlex.split(command), "--reserve", "0"]) == 0
    assert f"{rows_of(capsys.readouterr().out)['dense'][3]:,} tokens, close to the report" in " ".join(text.split())
