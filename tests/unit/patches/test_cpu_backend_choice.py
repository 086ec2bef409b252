"""Which attention backend a launch on the plain-CPU platform ends up with."""

import sys

import pytest
import torch
from sglang.srt.platforms import current_platform
from sglang.srt.server_args import prepare_server_args

from families import config_of
from sglang_triattn.patches import cpu
from sglang_triattn.patches.cpu import platform as cpu_platform
from sglang_triattn.patches.cpu.backend_choice import NAME

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "glm-4.5": "Glm4MoeForCausalLM",
}

on_cpu = pytest.mark.skipif(not current_platform.is_out_of_tree(), reason="this machine has an accelerator")


def resolved(folder, family: str, *flags: str) -> dict:
    config = config_of(family)
    config.architectures = [ARCHITECTURES[family]]
    config.dtype = "float32"
    config.save_pretrained(folder)
    settings = prepare_server_args(["--model-path", str(folder), "--skip-tokenizer-init", *flags])
    settings.resolve_once()
    return settings.resolved_dict()


@on_cpu
@pytest.mark.parametrize(
    ("family", "flags", "expected"),
    [
        ("llama", (), "torch_native"),
        ("gemma3", (), "torch_native"),
        ("qwen3-moe", (), "torch_native"),
        ("glm-4.5", (), "torch_native"),
        ("gemma2", (), NAME),
        ("gpt-oss", (), NAME),
        ("deepseek-v3", (), NAME),
        ("llama", ("--speculative-algorithm", "NGRAM"), NAME),
        ("llama", ("--attention-backend", NAME), NAME),
        ("gpt-oss", ("--attention-backend", NAME), NAME),
        ("deepseek-v3", ("--attention-backend", "torch_native"), "torch_native"),
    ],
    ids=str,
)
def test_the_backend_of_a_launch(tmp_path, family, flags, expected):
    """Prevents models from being served by a backend that answers them wrongly, models that it serves from changing
    theirs, and a choice that is overruled."""
    settings = resolved(tmp_path, family, *flags)
    assert settings["attention_backend"] == expected
    assert settings["moe_runner_backend"] == ("triton" if family == "gpt-oss" else "auto")


@on_cpu
def test_what_the_user_chose_is_refused_not_replaced(tmp_path):
    """Prevents SGLang's refusal of a backend from being silenced."""
    with pytest.raises(AssertionError, match="requires one of"):
        resolved(tmp_path, "gpt-oss", "--attention-backend", "torch_native")


def test_nothing_of_it_with_a_gpu(monkeypatch):
    """Prevents choices, hooks and replaced functions on a machine with a GPU."""
    for name in ("backend_choice", "reference_backend", "attention"):
        monkeypatch.delitem(sys.modules, f"{cpu.__name__}.{name}", raising=False)
        monkeypatch.delattr(cpu, name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu_platform.activate() is None
    assert f"{cpu.__name__}.backend_choice" not in sys.modules
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu_platform.activate() is not None
    assert f"{cpu.__name__}.backend_choice" in sys.modules
    assert f"{cpu.__name__}.reference_backend" not in sys.modules
