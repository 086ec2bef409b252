"""A random LoRA adapter of a test model: its files, the flags that serve it, and a model into which it is merged.

SGLang's LoRA pins memory, which needs an accelerator; without one, the plugin `unpinned_memory` disables that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

import unpinned_memory
from harness import install_plugin
from oracle import Oracle
from tiny_model import TinyModel

RANK, SCALE = 4, 2.0
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapter_weights(tiny: TinyModel, modules: Sequence[str] = MODULES) -> dict[str, torch.Tensor]:
    """lora_A and lora_B of each projection in each layer, large enough that the adapter gives other answers."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, weight in tiny.load().state_dict().items():
        *_, module, kind = name.split(".")
        if module in modules and kind == "weight":
            stem = "base_model.model." + name.removesuffix(".weight")
            rows, columns = weight.shape
            found[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(RANK, columns, generator=generator)
            found[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=generator)
    return found


def build_adapter(folder: Path, tiny: TinyModel, modules: Sequence[str] = MODULES) -> Path:
    """Writes an adapter of these projections of `tiny` to `folder`, which exists."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK * SCALE, "lora_dropout": 0.0,
        "target_modules": list(modules), "bias": "none", "base_model_name_or_path": str(tiny.path),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapter_weights(tiny, modules), folder / "adapter_model.safetensors")
    return folder


def serving(adapter: Path) -> tuple[str, ...]:
    """Flags of a server that has the adapter under the name "other"."""
    return ("--enable-lora", "--lora-paths", f"other={adapter}", "--lora-backend", "torch_native")


def install_unpinned(folder: Path) -> Path:
    """Makes `folder`, once on PYTHONPATH, the plugin `unpinned_memory`."""
    install_plugin(folder, "unpinned", Path(unpinned_memory.__file__).read_text())
    return folder


def merge(oracle: Oracle, tiny: TinyModel, modules: Sequence[str] = MODULES) -> Oracle:
    """Merges the adapter of `tiny` into the oracle's model; its statistics stay."""
    weights, state = adapter_weights(tiny, modules), oracle.model.state_dict()
    for name in weights:
        if "lora_A" in name:
            delta = SCALE * weights[name.replace("lora_A", "lora_B")] @ weights[name]
            state[name.removeprefix("base_model.model.").replace("lora_A.", "")] += delta
    return oracle
