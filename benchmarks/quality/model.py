"""The model and the tokenizer for measuring quality."""

from __future__ import annotations

from typing import Any

import torch

from sglang_triattn.calibration.inputs import loaded
from sglang_triattn.transformers_cache.queries import ATTENTION


def load_model(path: str, device: str | None = None, dtype: str | None = None) -> Any:
    """Loads a model whose queries can be watched; by default on the GPU if there is one, else in float32 on the CPU.

    Raises:
        CalibrationError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "auto")
    model = loaded(AutoModelForCausalLM, path, dtype=dtype, attn_implementation=ATTENTION)
    return model.eval().to(device)


def load_tokenizer(path: str) -> Any:
    """Raises CalibrationError if it cannot be loaded."""
    from transformers import AutoTokenizer

    return loaded(AutoTokenizer, path)
