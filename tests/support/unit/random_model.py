"""Fixtures with a random transformers model, for the tests of the quality benchmark."""

import pytest
import torch
import transformers

from tiny_models import COMMON, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a random model."""
    return make_model(tmp_path_factory.mktemp("quality") / "model", transformers.LlamaConfig(**COMMON))


@pytest.fixture(scope="module")
def model(folder):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
