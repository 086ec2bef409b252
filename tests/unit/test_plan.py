"""`sglang-triattn plan`: sizes from a config.json, and what a GPU then holds."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_triattn import cli
from sglang_triattn.capacity_plan import Gpus, Workload, peak_tokens, plan
from sglang_triattn.config import Config
from sglang_triattn.model_sizes import read_sizes, weight_bytes
from sglang_triattn.rounds import plan_round

ROOT = Path(__file__).parents[2]
QWEN3_32B = Path(__file__).parent / "configs" / "qwen3-32b.json"


def shape(model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    return {
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 40960,
        **more,
    }


LLAMA3_8B = shape("llama", 4096, 32, 32, 8, intermediate_size=14336, vocab_size=128256)
QWEN3_8B = shape("qwen3", 4096, 36, 32, 8, head_dim=128, intermediate_size=12288, vocab_size=151936)
SMOLLM2 = shape("llama", 576, 30, 9, 3, intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Plans a config (a dict, saved as the file `model`); returns status, output and error output."""
    monkeypatch.chdir(tmp_path)

    def run(config: object, *options: str) -> tuple[int, str, str]:
        Path("model").write_text(json.dumps(config))
        status = cli.main(
            ["plan", "--model", "model", *(options if "--memory" in options else ("--memory", "24G", *options))]
        )
        return status, *capsys.readouterr()

    return run


def rows_of(output: str) -> dict[str, list[int]]:
    """The table's figures by the name of their row."""
    found = re.findall(r"^(\w+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", output, re.M)
    return {name: [int(figure.replace(",", "")) for figure in figures] for name, *figures in found}


@pytest.mark.parametrize(
    ("config", "count"),
    [(LLAMA3_8B, 131072), (QWEN3_8B, 147456), (SMOLLM2, 30 * 3 * 64 * 2 * 2)],
    ids=["Llama-3-8B", "Qwen3-8B", "SmolLM2-135M"],
)
def test_bytes_per_token(config, count):
    """Prevents keys without values, query heads in place of KV heads, and a head_dim that the config overrides."""
    sizes = read_sizes(config)
    assert sizes.bytes_per_token("bfloat16") == count
    assert sizes.bytes_per_token("fp8_e4m3") == sizes.bytes_per_token("fp8_e5m2") == count // 2


def test_heads_split_over_ranks():
    """Prevents a GPU's share below the one KV head that SGLang gives each rank."""
    sizes = read_sizes(LLAMA3_8B)
    for tp, kv_heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
        sizes.check_ranks(tp)
        assert sizes.bytes_per_token("bfloat16", tp) == 32 * kv_heads * 128 * 2 * 2


@pytest.mark.parametrize(
    ("config", "count"), [(LLAMA3_8B, 8_030_261_248), (QWEN3_8B, 8_190_735_360), (SMOLLM2, 134_515_008)]
)
def test_published_parameter_counts(config, count):
    """Prevents an estimate that forgets the output head or counts a tied one twice."""
    assert read_sizes(config).parameters == count
    assert weight_bytes(read_sizes(config), config, None) == (2 * count, "bfloat16")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "phi3", "granite"])
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_those_that_transformers_makes(model_type, bias):
    """Prevents shapes of a model type that is called known and is not."""
    config = shape(model_type, 64, 3, 4, 2, intermediate_size=96, vocab_size=200, tie_word_embeddings=False)
    config |= {"head_dim": 16, "pad_token_id": None, "sliding_window": None}
    if model_type in ("llama", "granite"):
        config |= {"attention_bias": bias, "mlp_bias": bias}
    elif model_type == "qwen3":
        config |= {"attention_bias": bias}
    known = dict(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(known.pop("model_type"), **known)
        )
    sizes = read_sizes(config)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    in_layers = [p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    assert sizes.matrices == sum(in_layers)


@pytest.mark.parametrize(
    ("quantized", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "fp8"}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4 + 20 / 32,
        ),
    ],
    ids=["awq", "gptq", "fp8", "compressed-tensors"],
)
def test_quantised_weights(quantized, bits):
    """Prevents an estimate that takes embeddings for quantised, or a quantised checkpoint for 16 bits."""
    sizes = read_sizes(LLAMA3_8B)
    config = {**LLAMA3_8B, "quantization_config": quantized}
    assert weight_bytes(sizes, config, None)[0] == int(sizes.matrices * bits / 8) + 2 * sizes.others
    assert weight_bytes(sizes, config, "int8")[0] == sizes.matrices + 2 * sizes.others


@pytest.mark.parametrize("scope", ["private", "total"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("prompt", [1, 77, 128, 500])
def test_peak_is_that_of_the_product(scope, page_size, prompt):
    """Prevents a bound that differs from what rounds hold a request to, tokens in flight and pages included."""
    config = Config(budget=200, interval=30, recent=20, budget_scope=scope)
    frozen = max(prompt - prompt % page_size, config.sinks)
    length, evicted, peak = prompt, 0, prompt
    while length + evicted < 2000:
        # SGLang allocates a slot for the next token; then a round may be due.
        length += 1
        peak = max(peak, length)
        in_pages = -(-peak // page_size) * page_size
        assert peak_tokens(config, Workload(prompt, length + evicted), page_size) == in_pages
        due = plan_round(config, frozen=frozen, length=length, evicted_before=evicted, page_size=page_size)
        if due is not None:
            length, evicted = due.new_length, evicted + due.evicted_tokens
    assert evicted > 500
    assert peak_tokens(None, Workload(prompt, 2000), page_size) == -(-2000 // page_size) * page_size


def test_rows(run):
    """Prevents columns that are swapped, fp8 that leaves the pool as it is, and pages in part."""
    status, output, _ = run(LLAMA3_8B, "--weights", "16G", "--reserve", "0", "--prompt", "1000", "--page-size", "64")
    assert status == 0
    tokens = (8 << 30) // 131072
    scratch = (64 << 20) // 131072
    assert rows_of(output) == {
        "dense": [131072, tokens, 32768, 40960, tokens // 32768],
        "fp8": [65536, 2 * tokens, 32768, 40960, 2 * tokens // 32768],
        "compressed": [131072, tokens - scratch, 960 + 2176, 40960, (tokens - scratch) // 3136],
        "both": [65536, 2 * (tokens - scratch), 3136, 40960, 2 * (tokens - scratch) // 3136],
    }
    rows = rows_of(run(LLAMA3_8B, "--weights", "15.83G", "--reserve", "0", "--page-size", "64")[1])
    tokens = int(8.17 * (1 << 30)) // 131072
    assert tokens % 64
    assert rows["dense"][1] == tokens // 64 * 64


def test_longest_trace(run):
    """Prevents a trace past the pool for a dense cache, and one short of the context limit for a bounded one."""
    _, output, _ = run(LLAMA3_8B, "--weights", "23G", "--reserve", "0", "--budget", "2048")
    rows = rows_of(output)
    assert [rows[name][3] for name in ("dense", "compressed")] == [8192, 40960]
    _, output, _ = run(LLAMA3_8B, "--weights", "23G", "--reserve", "0", "--budget", "8000")
    rows = rows_of(output)
    assert [rows[name][3] for name in ("dense", "compressed")] == [8192, 8192 - 512]


def test_options_reach_the_plan(run):
    """Prevents flags that are read and forgotten."""
    rows = rows_of(run(LLAMA3_8B, "--budget-scope", "total", "--interval", "100", "--length", "9000")[1])
    assert (rows["dense"][2], rows["compressed"][2]) == (9000, 2048 + 100)
    rows = rows_of(run(LLAMA3_8B, "--length", "500")[1])
    assert rows["dense"][2] == rows["compressed"][2] == 500
    rows = rows_of(run(LLAMA3_8B, "--kv-dtype", "fp8_e4m3", "--tp", "2")[1])
    assert {name: row[0] for name, row in rows.items()} == {"fp8": 32768, "both": 32768}
    fp8_kv = {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}
    assert set(rows_of(run({**LLAMA3_8B, "quantization_config": fp8_kv})[1])) == {"fp8", "both"}
    assert (
        "12.00 GiB on each of 2 GPUs, 25% in reserve"
        in run(LLAMA3_8B, "--memory", "12G", "--tp", "2", "--reserve", "0.25")[1]
    )


def test_json(run):
    """Prevents a file that says something else than the table."""
    status, output, _ = run(QWEN3_8B, "--json", "plan.json")
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
def test_memory_units(run, text, count):
    """Prevents 7 % of memory lost between powers of ten and of two."""
    assert run(SMOLLM2, "--memory", text, "--json", "plan.json")[0] == 0
    assert json.loads(Path("plan.json").read_text())["gpus"]["memory_bytes"] == count


def test_context_limit(run):
    """Prevents a stretched context that is stretched twice, or not at all, and a default length above the limit."""
    linear = {**LLAMA3_8B, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_sizes(linear).context == 81920
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10240}
    assert read_sizes({**LLAMA3_8B, "rope_scaling": yarn}).context == 40960
    assert rows_of(run({**SMOLLM2, "max_position_embeddings": 800})[1])["dense"][2] == 800


def test_folder_and_nested_text_config(run, tmp_path):
    """Prevents a model folder, or a text model inside a wrapper, from being refused."""
    wrapped = {"model_type": "wrapper", "text_config": LLAMA3_8B}
    assert rows_of(run(wrapped)[1]) == rows_of(run(LLAMA3_8B)[1]) != {}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert cli.main(["plan", "--model", str(tmp_path), "--memory", "24G"]) == 0


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None, "model_type": "mistral"},
        {"sliding_window": 4096, "model_type": "qwen2"},
        {"layer_types": ["full_attention"] * 32, "kv_lora_rank": None},
    ],
    ids=str,
)
def test_ordinary_models_are_planned(harmless):
    """Prevents the refusal of a model for a field that is there but off."""
    assert read_sizes({**LLAMA3_8B, **harmless}).bytes_per_token("bfloat16") == 131072


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "multi-head latent attention (MLA)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "a sliding window of 4096 tokens"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "a sliding window of 4096"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, "a sliding window"),
        ({"model_type": "llama4", "layer_types": ["chunked_attention"]}, "of the type chunked_attention"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16}, "state-space or linear-attention"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "state-space"),
        ({"model_type": "mamba2"}, "state-space"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"model_type": "gemma3", "text_config": {"x": 1}, "vision_config": {"x": 1}}, "images or sound"),
        ({"model_type": "glm", "attention_chunk_size": 8192}, "local to chunks"),
        ({"model_type": "deci", "block_configs": [{}]}, "differ from one another"),
        ({"model_type": "mimo", "head_dim": 192, "v_head_dim": 128}, "different widths"),
        ({"model_type": "gpt2", "num_hidden_layers": None}, "num_hidden_layers None"),
        ({"model_type": "openelm", "num_key_value_heads": [3, 4]}, "num_key_value_heads [3, 4]"),
        ({"model_type": "olmoe"}, "give their size, such as --weights 18.5G"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by bitsandbytes"),
    ],
    ids=lambda value: value.get("model_type", "quantised") if isinstance(value, dict) else "",
)
def test_models_are_refused_by_name(run, change, words):
    """Prevents figures for a cache of another shape, and refusals that do not say which model and why."""
    status, output, error = run({**LLAMA3_8B, **change})
    assert (status, output) == (2, "")
    assert words in error
    assert error.startswith("sglang-triattn: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1
    assert change.get("model_type", "bitsandbytes") in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--memory 24", "--memory is 24, but a size such as 24G"),
        ("--memory 24GB", "--memory is 24GB"),
        ("--memory 0G", "--memory is 0G"),
        ("--weights much", "--weights is much"),
        ("--memory 12G", "leave too little of 12.00 GiB"),
        ("--reserve 1", "--reserve is 1, but it must be a fraction"),
        ("--reserve nan", "--reserve is nan"),
        ("--tp 3", "do not split evenly over --tp 3"),
        ("--tp 0", "--tp is 0, but it must be at least 1"),
        ("--budget 0", "--budget is 0"),
        ("--page-size -1", "--page-size is -1"),
        ("--length 40961", "the context limit of this llama model is 40960"),
        ("--length 100 --prompt 101", "--prompt is 101"),
        ("--json none/plan.json", "Cannot write none/plan.json (No such file or directory)"),
    ],
)
def test_mistakes_give_one_sentence_and_status_2(run, options, words):
    """Prevents tracebacks, and figures from numbers that mean nothing."""
    status, _, error = run(LLAMA3_8B, *options.split())
    assert status == 2
    assert words in error
    assert error.startswith("sglang-triattn: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1


def test_unreadable_files_are_explained(run, capsys, tmp_path):
    """Prevents a traceback for a model that is not there or not a config."""
    assert "is not a JSON object" in run([1])[2]
    assert "is not a JSON object" in run("text")[2]
    assert cli.main(["plan", "--model", str(tmp_path / "none"), "--memory", "24G"]) == 2
    assert "cannot be read (No such file or directory): give a config.json" in capsys.readouterr().err


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
    """Prevents rounding, page or scope arithmetic by which keeping less serves fewer."""
    sizes = read_sizes(LLAMA3_8B)
    gpus = Gpus(free, 0.0, 0, 0, 1, page_size)
    small, large = (
        plan(
            sizes,
            gpus,
            Config(budget=b, interval=interval, recent=0, budget_scope=scope),
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


def test_needs_neither_sglang_nor_transformers():
    """Prevents a calculator that cannot run, or takes half a minute, where no server is to be started."""
    code = (
        "import sys; from sglang_triattn import cli\n"
        f"assert cli.main(['plan', '--model', {str(QWEN3_32B)!r}, '--memory', '80G']) == 0\n"
        "assert not {'sglang', 'transformers', 'triton'} & set(sys.modules), 'heavy import'"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_readme_shows_what_the_command_prints(monkeypatch, capsys):
    """Prevents an example in the README that the command no longer prints."""
    monkeypatch.chdir(ROOT)
    section = (ROOT / "README.md").read_text().split("## What fits\n")[1].split("\n## ")[0]
    command = re.search(r"^    sglang-triattn (plan .*)$", section, re.M)[1]
    assert cli.main(shlex.split(command)) == 0
    assert re.search(r"```\n(.*?)```", section, re.S)[1] == capsys.readouterr().out
    assert cli.main([*shlex.split(command), "--reserve", "0"]) == 0
    assert f"{rows_of(capsys.readouterr().out)['dense'][3]:,} tokens, close to the report" in section
