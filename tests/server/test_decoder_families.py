"""Servers of further decoders, each of an architecture of its own in SGLang: what they keep and answer."""

import pytest

import harness
from decoder_families import DECODERS, SHORT_CONTEXT
from family_servers import WITHOUT_BUFFER, compare_with_account
from gemma4_family import TEXT_ALONE
from learned_family import LEARNED
from sets import wide

# On CPUs SGLang pads the width of MLPs, but not where a file lists that of each layer.
UNPADDED = """
def activate():
    from sglang.srt.configs import update_config
    padded = update_config.update_intermediate_size

    def unpadded(model, name, size):
        listed = isinstance(getattr(model.hf_config, name, None), list)
        return model if listed else padded(model, name, size)

    update_config.update_intermediate_size = unpadded
"""
# SGLang serves these in bfloat16, also with --dtype float32.
IN_FLOAT32 = """
def activate():
    from sglang.srt.arg_groups import model_override_base
    del model_override_base.MODEL_OVERRIDES["MistralLarge3ForCausalLM"]
"""
PLUGINS = {"gemma3n": ("unpadded", UNPADDED), "mistral-large": ("in_float32", IN_FLOAT32)}
# Models that repeat themselves: between the equal values of two equal tokens in the first layer, the order in a row
# would choose, which an account does not know. One kept set for all layers leaves no such choice.
REPEATING = {
    "arcee",
    "dynamic-rope",
    "gemma",
    "gemma3-with-images",
    "glm4",
    "granite-moe-shared",
    "hunyuan-moe",
    "nanbeige",
    "olmo",
    "olmo2",
    "olmoe",
    "persimmon",
    *LEARNED,
}


OTHERS = ("deepseek-v2", "minicpm3", "mistral-large", "gemma3-with-images", TEXT_ALONE, "nanbeige", "dynamic-rope")


@pytest.mark.parametrize(
    "family", ["gpt2", *(wide(family) for family in (*DECODERS, *OTHERS, *LEARNED) if family != "gpt2")]
)
def test_a_decoder(serve, tmp_path, family):
    """Prevents an architecture that is accepted by its file alone: layers scored by a rotation that is not theirs,
    windows that see tokens across a gap, heads of other sizes, positions that are
    counted from 1, and a launch that refuses it after all."""
    page_size, selection = (1, "shared-mean") if family in REPEATING else (16, "per-layer-head")
    flags: tuple[str, ...] = ()
    if family == "lfm2-moe":
        page_size, flags = 1, WITHOUT_BUFFER
    if family == "phi3":
        flags = ("--context-length", str(SHORT_CONTEXT))
    env = None
    if family in PLUGINS:
        name, source = PLUGINS[family]
        harness.install_plugin(tmp_path / name, name, source)
        env = {"PYTHONPATH": harness.python_path(tmp_path / name)}
    compare_with_account(serve, tmp_path, family, page_size, selection, *flags, env=env)
