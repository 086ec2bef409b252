"""Calibration compared with queries taken where each tiny model computes them, before RoPE."""

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sglang_triattn.calibration.transformers_engine import CalibrationError, calibrate
from sglang_triattn.model.fingerprint import model_fingerprint
from sglang_triattn.stats.file import ModelShape, check_stats, load_stats, save_stats
from tiny_models import COMMON, make_model, make_text, make_tokenizer

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}

# config, where its queries are before RoPE, how many dims rotate, how they pair
NARROW = COMMON | {"head_dim": 16, "partial_rotary_factor": 0.5}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}

MODELS = {
    "llama": (transformers.LlamaConfig(**COMMON), "q_proj", 8, "half"),
    "llama-bias": (transformers.LlamaConfig(**COMMON, attention_bias=True), "q_proj", 8, "half"),
    "llama-head_dim": (transformers.LlamaConfig(**COMMON, head_dim=10), "q_proj", 10, "half"),
    "llama-yarn": (transformers.LlamaConfig(**COMMON, rope_parameters=YARN), "q_proj", 8, "half"),
    "qwen2": (transformers.Qwen2Config(**COMMON), "q_proj", 8, "half"),
    "qwen3-q_norm": (transformers.Qwen3Config(**COMMON, head_dim=16), "q_norm", 16, "half"),
    "phi3-fused": (transformers.Phi3Config(**COMMON), "qkv_proj", 8, "half"),
    "glm-interleaved": (transformers.GlmConfig(**NARROW), "q_proj", 8, "interleaved"),
    "glm4_moe": (transformers.Glm4MoeConfig(**NARROW, **EXPERTS, use_qk_norm=True), "q_norm", 8, "half"),
    "smollm3": (transformers.SmolLM3Config(**COMMON, no_rope_layers=[1, 0]), "q_proj", 8, "half"),
    "gemma3": (transformers.Gemma3TextConfig(**COMMON, **WINDOW, head_dim=16), "q_norm", 16, "half"),
    "exaone4": (transformers.Exaone4Config(**COMMON, **WINDOW), "q_norm", 8, "half"),
    "olmo3": (transformers.Olmo3Config(**COMMON, **WINDOW), "q_norm", 8, "half"),
    "cohere2": (transformers.Cohere2Config(**COMMON, **WINDOW), "q_proj", 8, "interleaved"),
}  # fmt: skip

# Which layers are scored, and which of them have RoPE, where this is not all.
LAYERS = {
    "smollm3": ((0, 1), (True, False)),
    "gemma3": ((1,), (True,)),
    "exaone4": ((1,), (False,)),
    "olmo3": ((1,), (True,)),
    "cohere2": ((1,), (False,)),
}


def direct(folder, windows, where, rotary_dim, style, layers=(0, 1)):
    """Means of the output of each layer's `where`, one forward pass per window: of the components, of their absolute
    values and of the dims after `rotary_dim`, in double precision."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    heads = model.config.num_attention_heads
    seen = [([], []) for _ in layers]

    def watch(kept, rest):
        def hook(module, inputs, output):
            # q_norm: [S, H, d], or [H, S, d] in Gemma 3 and EXAONE 4; projections: [S, H * d], fused ones with K and V
            # after Q.
            x = output[0].double()
            if x.ndim == 3 and x.shape[1] != heads:
                x = x.transpose(0, 1)
            if x.ndim == 2:
                x = x[:, : heads * model.model.layers[0].self_attn.head_dim].unflatten(-1, (heads, -1))
            rest.append(x[..., rotary_dim:])
            x = x[..., :rotary_dim]
            half = rotary_dim // 2
            parts = (x[..., :half], x[..., half:]) if style == "half" else (x[..., 0::2], x[..., 1::2])
            kept.append(torch.complex(*parts))

        return hook

    for kept, layer in zip(seen, layers, strict=True):
        getattr(model.model.layers[layer].self_attn, where).register_forward_hook(watch(*kept))
    with torch.no_grad():
        for ids in windows:
            model(torch.tensor([ids]))
    queries, others = (torch.stack([torch.cat(one) for one in kept]) for kept in zip(*seen, strict=True))
    return queries.mean(1), queries.abs().mean(1), others.mean(1)


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_the_means_of_pre_rope_queries(tmp_path, monkeypatch, name):
    """Prevents a skipped q_norm, a RoPE undone wrongly, or unequal weights of windows."""
    # For a Qwen2 model transformers builds a Qwen tokenizer, for any folder.
    tokenizer = make_tokenizer(bos=False)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda path: tokenizer)
    config, where, rotary_dim, style = MODELS[name]
    folder = str(make_model(tmp_path / "model", config))
    ids = make_text(tmp_path / "text", 300)
    stats = calibrate(folder, str(tmp_path / "text"), window=128, device="cpu", progress=False)
    layers, rotates = LAYERS.get(name, ((0, 1), (True, True)))
    windows = [ids[:128], ids[128:256], ids[256:]]
    mean, abs_mean, unrotated = direct(folder, windows, where, rotary_dim, style, layers)
    assert (stats.layers, stats.rotates) == (layers, rotates)
    torch.testing.assert_close(stats.mean.to(torch.complex128), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stats.abs_mean.double(), abs_mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stats.unrotated_mean.double(), unrotated, rtol=1e-4, atol=1e-5)
    assert (stats.mean.dtype, stats.abs_mean.dtype) == (torch.complex64, torch.float32)
    assert (stats.num_kv_heads, stats.token_count) == (2, 300)
    assert (stats.rope.rotary_dim, stats.rope.style) == (rotary_dim, style)
    assert stats.head_dim == (getattr(config, "head_dim", None) or 8)
    assert stats.fingerprint == model_fingerprint(folder)
    # What is saved is accepted again, and fits the model that it was made on.
    save_stats(stats, tmp_path / "s.safetensors")
    shape = ModelShape(layers, 6, 2, stats.head_dim, stats.rope, model_fingerprint(folder), rotates)
    check_stats(load_stats(tmp_path / "s.safetensors"), shape)


def test_every_window_starts_with_bos(tmp_path):
    """Prevents windows in the middle of a text from being read unlike the beginning of any served text."""
    folder = str(make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON), bos=True))
    ids = make_text(tmp_path / "text", 300)
    stats = calibrate(folder, str(tmp_path / "text"), window=101, device="cpu", progress=False)
    windows = [[1, *ids[first : first + 100]] for first in (0, 100, 200)]
    mean, *_ = direct(folder, windows, "q_proj", 8, "half")
    torch.testing.assert_close(stats.mean.to(torch.complex128), mean, rtol=1e-4, atol=1e-5)
    assert stats.token_count == 303


def test_limits_are_kept(tmp_path):
    """Prevents using more text than asked for, or positions past the model's own limit."""
    config = transformers.LlamaConfig(**COMMON | {"max_position_embeddings": 64})
    folder = str(make_model(tmp_path / "model", config))
    ids = make_text(tmp_path / "text", 500)
    stats = calibrate(folder, str(tmp_path / "text"), max_tokens=260, device="cpu", progress=False)
    windows = [ids[first : min(first + 64, 260)] for first in range(0, 260, 64)]
    mean, *_ = direct(folder, windows, "q_proj", 8, "half")
    assert stats.token_count == 260
    torch.testing.assert_close(stats.mean.to(torch.complex128), mean, rtol=1e-4, atol=1e-5)


def test_half_precision_is_close(tmp_path):
    """Prevents sums in the model's dtype, which lose most of their digits."""
    folder = str(make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON)))
    make_text(tmp_path / "text", 2000)
    exact, rounded = (
        calibrate(folder, str(tmp_path / "text"), device="cpu", dtype=dtype, progress=False)
        for dtype in ("float32", "bfloat16")
    )
    assert (exact.mean - rounded.mean).abs().max() < 0.02 * exact.abs_mean.max()


def test_transformers_is_left_as_it_was(tmp_path, monkeypatch):
    """Prevents calibration inside a larger program from slowing or recording that program's own models."""
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    folder = str(make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON)))
    make_text(tmp_path / "text", 300)
    calibrate(folder, str(tmp_path / "text"), device="cpu", progress=False)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    monkeypatch.setattr("sglang_triattn.calibration.query_sums.unrotate", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(folder, str(tmp_path / "text"), device="cpu", progress=False)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def other_mla():
    return transformers.DeepseekV2Config(
        **COMMON | {"num_key_value_heads": 6}, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, moe_intermediate_size=16, n_group=1,
        topk_group=1, num_experts_per_tok=2,
    )  # fmt: skip


def gpt2():
    return transformers.GPT2Config(n_embd=48, n_head=6, n_layer=2, vocab_size=102, bos_token_id=1)


def no_full():
    return transformers.Llama4TextConfig(
        **COMMON, head_dim=8, layer_types=["sliding_attention", "chunked_attention"], num_local_experts=2
    )


def dynamic():
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return transformers.LlamaConfig(**COMMON, rope_parameters=parameters)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (other_mla, "turn their queries in a way that is not supported"),
        (gpt2, "no rotary position embedding"),
        (no_full, "needs some with full attention"),
        (dynamic, "'dynamic' changes its frequencies"),
    ],
)
def test_unsupported_models_are_refused(tmp_path, config, message):
    """Prevents statistics of vectors that never meet the cached keys."""
    folder = str(make_model(tmp_path / "model", config()))
    make_text(tmp_path / "text", 300)
    with pytest.raises(CalibrationError, match=message) as error:
        calibrate(folder, str(tmp_path / "text"), device="cpu", progress=False)
    assert "\n" not in str(error.value)


def test_layers_outside_the_attention_function_are_refused(tmp_path, monkeypatch):
    """Prevents layers without statistics, in models whose attention cannot be observed."""
    folder = str(make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON)))
    make_text(tmp_path / "text", 300)
    forward = transformers.models.llama.modeling_llama.LlamaAttention.forward

    def skip_first(self, hidden_states, **kwargs):
        return (hidden_states, None) if self.layer_idx == 0 else forward(self, hidden_states, **kwargs)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", skip_first)
    with pytest.raises(CalibrationError, match="Only 1 of 2 layers"):
        calibrate(folder, str(tmp_path / "text"), device="cpu", progress=False)


def test_nan_queries_are_refused(tmp_path):
    """Prevents writing statistics of a model that overflows in the chosen dtype."""
    folder = make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[1].self_attn.q_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(folder)
    make_text(tmp_path / "text", 300)
    with pytest.raises(CalibrationError, match="NaN or infinite queries"):
        calibrate(str(folder), str(tmp_path / "text"), device="cpu", progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": "no/such-model"}, "Model no/such-model cannot be loaded"),
        ({"data": "none.txt"}, "cannot be read"),
        ({"data": "."}, "cannot be read"),
        ({"data": "short"}, "too short: 255 tokens, but at least 256"),
        ({"data": "binary"}, "not UTF-8"),
        ({"max_tokens": 255}, "at least 256 tokens"),
        ({"window": 1}, "windows of at least 16"),
        ({"device": "abacus"}, "Device 'abacus' does not exist"),
    ],
    ids=str,
)
def test_mistakes_are_explained_in_one_sentence(tmp_path, monkeypatch, options, message):
    """Prevents a traceback, or a long run before the mistake is noticed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON))
    make_text(tmp_path / "text", 300)
    make_text(tmp_path / "short", 255)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    arguments = {"model_path": "model", "data": "text", "device": "cpu", "progress": False} | options
    with pytest.raises(CalibrationError, match=message) as error:
        calibrate(**arguments)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")
