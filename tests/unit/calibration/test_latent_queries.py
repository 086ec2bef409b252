"""Queries of models with latent KV, as they meet the latents."""

import pytest
import torch
import transformers

from sglang_triattn.calibration.latent_queries import absorbed, key_weights
from sglang_triattn.calibration.query_sums import QuerySums
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.model.rope import Rope, to_complex, unrotate
from tiny_models import COMMON, make_model, make_text

HEADS, NOPE, VALUE, RANK, PAIRS = 3, 5, 4, 7, 2
ROPE = Rope(torch.tensor([1.0, 0.1], dtype=torch.float64), 1.0, 2 * PAIRS, "interleaved")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expansion(seed: int = 9) -> tuple[torch.nn.Linear, torch.Tensor]:
    """A projection of latents, and the part of its weights that makes keys, [H, NOPE, RANK]."""
    weight = random(HEADS * (NOPE + VALUE), RANK, seed=seed)
    linear = torch.nn.Linear(RANK, len(weight), bias=False, dtype=torch.float64)
    linear.weight.data.copy_(weight)
    return linear, weight.unflatten(0, (HEADS, -1))[:, :NOPE]


@torch.no_grad()
def test_an_absorbed_query_meets_a_latent_as_the_query_meets_its_key():
    """Prevents weights of values, or of another head, in the place of those of keys."""
    linear, weights = expansion()
    found = key_weights(linear, RANK, HEADS, NOPE, like=linear.weight)
    assert torch.equal(found, weights)
    query, latent = random(HEADS, NOPE), random(RANK, seed=1)
    keys = linear(latent).unflatten(0, (HEADS, -1))[:, :NOPE]
    torch.testing.assert_close(absorbed(query, found) @ latent, (query * keys).sum(-1))


@torch.no_grad()
def test_prefill_and_decode_add_up_to_the_same_sums():
    """Prevents other statistics where SGLang expands keys than where it absorbs queries, and sums of only one of the
    two where a run has both."""
    _, weights = expansion()
    still, turning, places = random(HEADS, 20, NOPE), random(HEADS, 20, 2 * PAIRS, seed=1), torch.arange(20)
    inner = torch.einsum("hsd,hdr->hsr", still, weights)
    found = []
    for cut in (0, 12, 20):  # tokens before it are expanded
        sums = QuerySums(ROPE, (True,), absorb=lambda _, query: absorbed(query, weights))
        for part, absorbs in ((slice(cut), False), (slice(cut, 20), True)):
            if len(places[part]):
                queries = inner if absorbs else still
                sums.add_latent(0, turning[:, part], places[part], queries[:, part], absorbed=absorbs)
                sums.end_pass(len(places[part]))
        # Reading must change nothing: progress is saved in between.
        sums.read()
        found.append(sums.read())
    for one in found:
        torch.testing.assert_close(one.unrotated[0], inner.sum(1))
        torch.testing.assert_close(one.total, found[0].total)
        assert (one.count, one.head_dim) == (20, 2 * PAIRS + RANK)
    plain = to_complex(unrotate(turning.float(), places, ROPE), ROPE)
    torch.testing.assert_close(found[0].abs_total[0], plain.abs().double().sum(1), rtol=1e-5, atol=1e-5)


SIZES = {
    **COMMON,
    **{"num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12},
    **{"v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1},
    **{"topk_group": 1},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
MODELS = {
    "deepseek-v3": transformers.DeepseekV3Config(
        **SIZES, first_k_dense_replace=1, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
    ),
    "half": transformers.DeepseekV3Config(**SIZES, first_k_dense_replace=1, rope_interleave=False),
    "glm-4.7-flash": transformers.Glm4MoeLiteConfig(**SIZES),
}


@pytest.mark.parametrize("name", MODELS)
def test_statistics_predict_mean_logits(tmp_path, name):
    """Prevents means of other dims than those that meet the pool's rows, and pairs of dims in transformers' order."""
    config = MODELS[name]
    folder = str(make_model(tmp_path / "model", config))
    make_text(tmp_path / "text", 300)
    stats = calibrate(folder, str(tmp_path / "text"), window=300, device="cpu", progress=False)
    rank, turning, half = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_rope_head_dim // 2
    assert (stats.num_kv_heads, stats.head_dim, stats.rotary_start) == (1, rank + turning, rank)
    assert stats.rope.style == ("half" if name == "half" else "interleaved")
    assert stats.unrotated_mean.shape == (2, 6, rank)
    if name == "deepseek-v3":
        assert stats.rope.attention_scaling != 1

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.q_b_proj.register_forward_hook(lambda *call: seen.append(call[2][0].unflatten(-1, (6, -1))))
    ids = transformers.AutoTokenizer.from_pretrained(folder)((tmp_path / "text").read_text())["input_ids"]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids[: stats.token_count]]))
    for number, query in enumerate(seen):
        attention = model.model.layers[number].self_attn
        query, latent = query.double(), random(rank, seed=number).float()
        keys = attention.kv_b_proj(latent).detach().unflatten(0, (6, -1))[:, : config.qk_nope_head_dim].double()
        expected = (query[..., : config.qk_nope_head_dim] * keys).sum(-1).mean(0)
        found = stats.unrotated_mean[number].double() @ latent.double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        plain = query[..., config.qk_nope_head_dim :]
        parts = (plain[..., :half], plain[..., half:]) if name == "half" else (plain[..., 0::2], plain[..., 1::2])
        mean = torch.complex(*parts).mean(0)
        torch.testing.assert_close(stats.mean[number].to(torch.complex128), mean, rtol=1e-4, atol=1e-5)
