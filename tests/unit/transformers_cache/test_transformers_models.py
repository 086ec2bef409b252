"""The cache for transformers on models of different families: compared with their own `DynamicCache`, or refused."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from cache_cases import CONFIG, UNLIMITED, Newest, make_cache
from sglang_triattn.transformers_cache.feed import feed
from sglang_triattn.transformers_cache.policy import CacheError, Setting
from tiny_models import COMMON, make_model

MODELS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "qwen3": transformers.Qwen3Config(**COMMON, head_dim=16),
    "phi3": transformers.Phi3Config(**COMMON),
    "glm": transformers.GlmConfig(**COMMON, head_dim=16, partial_rotary_factor=0.5),
    "one-head-each": transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 6}),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_below_the_budget_nothing_changes(tmp_path, name, attention):
    """Prevents a mask, a position or a stored number that differs from what the model computes with its own cache."""
    folder = make_model(tmp_path / "model", MODELS[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    ids = torch.randint(2, 100, (70,), generator=torch.Generator().manual_seed(1))
    # One forward pass per call: pieces end with the prompt.
    cache = make_cache(model, [Setting(UNLIMITED, lambda pools: Newest())], prompt_length=70)
    plain = DynamicCache()
    start = 0
    for size in (40, 1, 29):
        piece = ids[start : start + size]
        # The kernel that sdpa chooses depends on whether there is a mask, so both sides get one.
        mask = torch.full((size, start + size), torch.finfo(torch.float32).min).triu(start + 1)[None, None]
        with torch.no_grad():
            expected = model(input_ids=piece[None], attention_mask=mask, past_key_values=plain).logits
        assert torch.equal(feed(model, cache, piece, logits=size), expected)
        start += size
    assert cache.get_seq_length() == plain.get_seq_length() == 70
    assert cache.rows.report(0).rounds == 0


def test_models_that_cannot_be_compacted(tmp_path):
    """Prevents attention that a row's mask does not reach, or for which no keys are kept."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    latent = {**COMMON, **experts, "num_key_value_heads": 6, "q_lora_rank": None, "topk_group": 1}
    cases = (
        (transformers.Gemma2Config(**COMMON, head_dim=16), "eager", "only 1 of its 2 layers have full attention"),
        (
            transformers.DeepseekV3Config(**latent, kv_lora_rank=16),
            "eager",
            r"it caches latents in place of keys \(MLA\)",
        ),
        (transformers.LlamaConfig(**COMMON), "flex_attention", "load it with attn_implementation"),
    )
    for number, (config, attention, message) in enumerate(cases):
        folder = make_model(tmp_path / str(number), config)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
        with pytest.raises(CacheError, match=message):
            make_cache(model, [Setting(CONFIG, lambda pools: Newest())])
