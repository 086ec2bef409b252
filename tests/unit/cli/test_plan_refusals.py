"""`sglang-triattn plan` refuses models and numbers for which it has no figures, in one sentence."""

import pytest

from plan_cases import LLAMA3_8B
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


def test_unreadable_files_are_explained(run_plan, capsys, tmp_path):
    """Prevents a traceback for a model that does not exist or is not a config."""
    assert "is not a JSON object" in run_plan([1])[2]
    assert "is not a JSON object" in run_plan("text")[2]
    assert cli.main(["plan", "--model", str(tmp_path / "none"), "--memory", "24G"]) == 2
    assert "cannot be read (No such file or directory): give a config.json" in capsys.readouterr().err
