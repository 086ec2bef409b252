"""Configs of known models for tests of `sglang-triattn plan` and `check`, and a reader for its table."""

import json
import re

from checkout import ROOT

CONFIGS = ROOT / "tests" / "support" / "configs"
QWEN3_32B = CONFIGS / "qwen3-32b.json"
# Of the published files; on a CPU, SGLang refuses to read them, so that other tests go without.
QUANTIZED = {
    "deepseek-v3": {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
    "gpt-oss-20b": {"quantization_config": {"quant_method": "mxfp4"}},
}


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


def published(name: str) -> dict:
    """The config.json of a known model, with how its weights are quantised."""
    return json.loads((CONFIGS / f"{name}.json").read_text()) | QUANTIZED.get(name, {})


def rows_of(output: str) -> dict[str, list[int]]:
    """The table's figures by row name."""
    found = re.findall(r"^(\w+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+)$", output, re.M)
    return {name: [int(figure.replace(",", "")) for figure in figures] for name, *figures in found}
