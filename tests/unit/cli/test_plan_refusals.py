"""`sglang-triattn plan` refuses models and numbers for which it has no figures, in one sentence."""

import json
import sys

import pytest

from plan_cases import LLAMA3_8B, published
from sglang_triattn.cli import main as cli


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "multi-head latent attention (MLA)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "a sliding window of 4096 tokens"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "a sliding window of 4096"),
        ({"model_type": "llama4", "layer_types": ["chunked_attention"]}, "local to chunks"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16}, "state-space or linear-attention"),
        ({"model_type": "jamba", "mamba_d_state": 16}, "state-space"),
        ({"model_type": "mamba2"}, "state-space"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"model_type": "gemma3", "text_config": {"x": 1}, "vision_config": {"x": 1}}, "images or sound"),
        ({"model_type": "glm", "attention_chunk_size": 8192}, "local to chunks"),
        ({"model_type": "new", "layer_types": ["novel_attention"]}, "of the type novel_attention"),
        ({"model_type": "mimo", "head_dim": 192, "v_head_dim": 128}, "different widths"),
        ({"model_type": "gpt2", "num_hidden_layers": None}, "has no num_hidden_layers"),
        ({"model_type": "openelm", "num_key_value_heads": [3, 4]}, "num_key_value_heads [3, 4]"),
        ({"model_type": "olmoe"}, "give their size, such as --weights 18.5G"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised by bitsandbytes"),
    ],
    ids=lambda value: value.get("model_type", "quantised") if isinstance(value, dict) else "",
)
def test_models_are_refused_by_name(run_plan, change, words):
    """Prevents figures for a cache of another shape, and refusals that do not say which model and why."""
    status, output, error = run_plan({**LLAMA3_8B, **change})
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
        ("--gpu H100 --tp 8 --dp 3", "--dp is 3, but groups of equally many of the 8 GPUs of --tp were expected"),
        ("--dp 0", "--dp is 0, but it must be at least 1"),
        ("--batch 0", "--batch is 0, but it must be at least 1"),
        ("--requests 0", "--requests is 0, but it must be at least 1"),
        ("--bandwidth 3.35", "--bandwidth is 3.35, but bytes per second such as 3.35T or 864G were expected"),
        ("--bandwidth 3.35TB", "--bandwidth is 3.35TB"),
        ("--bandwidth 0T", "--bandwidth is 0T"),
        ("--share 0", "--share is 0, but it must be a fraction above 0, at most 1"),
        ("--share nan", "--share is nan"),
        ("--share 0.5 --budget 9", "--budget and --share are given, but each sets the budget: use one of them"),
        ("--share 0.5 --requests 9", "--share and --requests are given"),
        (
            "--requests 100000",
            "No budget lets 100,000 requests of 32,768 tokens, 1,024 of them prompt, fit on 1 x 24.00",
        ),
        ("--plot plan.pdf", "--plot is plan.pdf, but a file that ends in .png or .svg was expected"),
        ("--plot none/plan.png", "Cannot write none/plan.png (No such file or directory)"),
        ("--plot plan.png --prompt 9 --length 9", "--plot has no step to draw"),
        ("--json none/plan.json", "Cannot write none/plan.json (No such file or directory)"),
    ],
)
def test_mistakes_give_one_sentence_and_status_2(run_plan, options, words):
    """Prevents tracebacks, and figures from numbers that mean nothing."""
    status, _, error = run_plan(LLAMA3_8B, *options.split())
    assert status == 2
    assert words in error
    assert error.startswith("sglang-triattn: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1


def test_some_memory_is_needed(capsys, tmp_path):
    """Prevents a usage message that does not say that --gpu would do."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    assert cli.main(["plan", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "sglang-triattn: Neither --gpu nor --memory is given, but the memory of a GPU was expected: add one, such as "
        "--gpu H100 or --memory 24G.\n"
    )


def test_a_picture_needs_matplotlib(run_plan, monkeypatch):
    """Prevents a traceback where only --plot needs a package that is missing."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, output, error = run_plan(LLAMA3_8B, "--plot", "plan.png")
    assert status == 2
    assert "requests" in output
    assert error == (
        "sglang-triattn: --plot needs matplotlib, which is not installed: run `pip install matplotlib`, or leave "
        "--plot out.\n"
    )


def test_budgets_below_a_window_are_refused(run_plan):
    """Prevents a plan with a budget that the server refuses."""
    status, _, error = run_plan(published("gpt-oss-20b"), "--budget", "100")
    assert status == 2
    assert "--triattention-budget is 100, but some layers of this model attend to a sliding window of 128" in error


def test_unreadable_files_are_explained(run_plan, capsys, tmp_path):
    """Prevents a traceback for a model that does not exist or is not a config."""
    assert "is not a JSON object" in run_plan([1])[2]
    assert "is not a JSON object" in run_plan("text")[2]
    assert cli.main(["plan", "--model", str(tmp_path / "none"), "--memory", "24G"]) == 2
    assert "cannot be read (No such file or directory): give a config.json" in capsys.readouterr().err
