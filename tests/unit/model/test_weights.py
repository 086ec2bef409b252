"""What a config.json says about the weights that a decode step reads, experts and latent attention included."""

import pytest
import torch
import transformers

from plan_cases import LLAMA3_8B, published, shape
from sglang_triattn.model.sizes import read_sizes, weight_bytes
from sglang_triattn.model.weights import Weights, bits_of, read_weights

EXPERTS = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("deepseek_v3", LATENT),
        ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
        ("glm4_moe", {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 2, "head_dim": 16}),
        ("gpt_oss", {"num_local_experts": 8, "head_dim": 16, "attention_bias": True}),
        ("mixtral", {"num_local_experts": 8, "sliding_window": None}),
        ("qwen3_moe", {"num_experts": 8, "head_dim": 16, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    ],
    ids=["deepseek_v3", "deepseek_v3-whole-queries", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe"],
)
def test_parameters_are_those_that_transformers_makes(model_type, fields):
    """Prevents experts that are forgotten or counted in dense layers, and wrong shapes of latent attention."""
    kv_heads = 4 if model_type == "deepseek_v3" else 2
    config = {**shape(model_type, 64, 4, 4, kv_heads, vocab_size=200, tie_word_embeddings=False), **EXPERTS, **fields}
    config["pad_token_id"] = None
    known = dict(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(known.pop("model_type"), **known)
        )
    assert read_sizes(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "count", "size"),
    [
        # Model cards: 671B, of which 14,848 are biases of the router; 20.9B; 30.5B.
        ("deepseek-v3", 671_026_419_200 - 58 * 256, 671_026_404_352 + 2 * 129280 * 7168),
        ("gpt-oss-20b", 20_914_757_184, 13_760_000_000),
        ("qwen3-30b-a3b", 30_532_122_624, 2 * 30_532_122_624),
    ],
)
def test_published_sizes(name, count, size):
    """Prevents estimates for experts that are not the files that users download."""
    config = published(name)
    assert read_sizes(config).parameters == count
    assert weight_bytes(read_sizes(config), config).total == pytest.approx(size, rel=0.01)


def test_experts_that_a_batch_touches():
    """Prevents reading all experts for one request, or only one request's for a batch."""
    weights = Weights(attention=0, mlp=0, head=0, embedding=0, vectors=0, experts=128, chosen=8)
    assert weights.touched(1) == pytest.approx(8)
    assert weights.touched(2) == pytest.approx(8 + 8 * (1 - 8 / 128))
    assert 127.9 < weights.touched(1000) <= 128
    assert Weights(attention=0, mlp=0, head=0, embedding=0, vectors=0).touched(5) == 0


@pytest.mark.parametrize("field", ["moe_intermediate_size", "num_experts_per_tok", "num_experts", "intermediate_size"])
def test_a_missing_field_leaves_the_weights_unknown(field):
    """Prevents figures for experts whose number or width the file does not give."""
    fields = {**published("qwen3-30b-a3b"), "mlp_only_layers": [0]}
    heads = {"layers": 48, "q_heads": 32, "kv_heads": 4, "head_dim": 128}
    assert read_weights(fields, **heads) is not None
    del fields[field]
    assert read_weights(fields, **heads) is None


def test_a_given_size_scales_what_a_step_reads():
    """Prevents a step that reads more than --weights, and reads that ignore it."""
    sizes = read_sizes(LLAMA3_8B)
    estimated = weight_bytes(sizes, LLAMA3_8B)
    half = weight_bytes(sizes, LLAMA3_8B, given=estimated.total // 2)
    assert half.read_bytes(2, 1, 9) == pytest.approx(estimated.read_bytes(2, 1, 9) / 2)
    assert estimated.read_bytes(1, 1, 9) == estimated.total - 2 * 128256 * 4096
    unknown = weight_bytes(read_sizes({**LLAMA3_8B, "model_type": "olmoe"}), LLAMA3_8B, given=1000)
    assert (unknown.read_bytes(4, 1, 9), unknown.copied_bytes(4, 2)) == (250, 0)
    packed = {**LLAMA3_8B, "quantization_config": {"quant_method": "bitsandbytes"}}
    assert weight_bytes(read_sizes(packed), packed, given=1000).read_bytes(1, 1, 9) == 1000


def test_groups_hold_and_read_all_of_attention():
    """Prevents attention data parallelism that splits attention over all GPUs, or copies experts."""
    weights = Weights(attention=800, down=80, mlp=160, head=40, embedding=40, vectors=0, router=10)
    bits = bits_of({}, None)
    assert bits.total_bytes(weights) == 2 * 1130
    # A GPU of eight holds a copy of the latent projections and of the router.
    assert bits.copied_bytes(weights, 8, 1) == int(2 * (80 + 10) * 7 / 8)
    assert bits.copied_bytes(weights, 8, 8) == int(2 * (80 + 10 + 800 + 40) * 7 / 8)
    assert bits.read_bytes(weights, 8, 1, 1) == 2 * (800 / 8 + 80 + (160 + 40) / 8 + 10)
    assert bits.read_bytes(weights, 8, 2, 1) == 2 * (800 / 4 + 80 + (160 + 40) / 8 + 10)
