"""How SGLang serves each architecture, where its config.json does not say, and what of it rounds are known to fit.

One row per architecture whose code in SGLang has been read; one without a row is refused, because a plain config.json
proves little: what it leaves out (layers without RoPE, windows, a pool of their own) would be guessed. What a row says
of layers, heads and rotation is compared with the loaded model once more. From SGLang 0.5.23: sglang/srt/models,
`is_hybrid_swa_model` in sglang/srt/configs/model_config.py, and `_auto_choose_speculative_params` in
sglang/srt/arg_groups/speculative_hook.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


def _always(_: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True)
class Refused:
    """Why compression does not cover an architecture, to complete "because ...", if `when` holds for its fields."""

    reason: str
    when: Callable[[Mapping[str, Any]], Any] = _always


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        windows: whether SGLang serves the sliding window that a config.json names; else every layer sees all tokens.
        window_extra: tokens that a query of a window layer sees more than the file says: some models give
            RadixAttention the window as the number of tokens before the query.
        window_field: where the file has the window.
        full_every: in a file that names no layer types, the last of each so many layers attends to all tokens and the
            others have the window; 0 if no layer differs from the others.
        heads_by_layer: the field that lists the query heads of each layer, where a file may have it.
        full_heads, window_heads: sizes of layers of this kind that differ from those of the others ("q_heads",
            "kv_heads", "head_dim", "v_head_dim"), each with the field that has it; a dot leads into an object.
        window_pool: window layers have a KV pool of their own (SWAKVPool).
        pool_covered: rounds are known to leave that pool whole.
        rope_in: the layers that RoPE turns, if some have a window.
        still_by_number: the file's `no_rope_layers` are the numbers of the layers that RoPE does not turn.
        rotary_share: share of a head's dims that RoPE turns, where the file does not say.
        interleaved: RoPE pairs neighbouring dims, where the file does not say.
        norm_after_rope: the module of an attention, if it has one, that normalises queries after their rotation, with
            a weight for each dim; keys have such a norm, too.
        may_lack_rope: no layer needs a rotary embedding, because states carry positions.
        learned_positions: embeddings of positions are added to those of tokens, so RoPE turns nothing.
        proportional_rope: RoPE may leave out dims between those that it turns.
        sinks: the softmax has one more, learned, logit per head.
        asymmetric: SGLang reads the widths of keys and of values separately, and its pools hold them so.
        shares_kv: layers may read the KV of earlier ones, and are scored by the queries of all that read them.
        latent: queries meet latent KV (MLA) in the way that scores assume.
        latent_halves: of latent KV, RoPE pairs the halves of a rotated key, where the file does not say.
        linear_states: some layers may keep a state instead of KV, which rounds leave alone.
        state_in_every_layer: each layer has a state and attention.
        state_drafts: ways of drafting tokens, in capitals, of which its states are known to take back what fails.
        layered_drafts: SGLang drafts each token with a layer of the model's own, which sees a window alone and keeps
            K/V in its pool (`--enable-multi-layer-eagle`), and rounds are known to leave these whole.
        assistants: a model with no KV of its own may draft, which reads that of the served one's last layers
            (`FROZEN_KV_MTP`).
        attentions: attentions, each with KV of its own, per layer that the file counts.
        loops: the field that says how often a token runs through all layers, with KV of its own each time.
        images: "prompt": SGLang computes an image prompt as one run of tokens of the row, so it may be frozen; "text":
            only requests without images are covered; None: not covered.
        images_on_request: SGLang takes images only with `--enable-multimodal`.
        image_drafts: draft models, by ways of drafting in capitals, whose drafts after an image are held to an account.
        branching_drafts: SGLang's default `speculative_eagle_topk` is above 1.
        refused: a reason that no general field shows.
    """

    windows: bool = True
    window_extra: int = 0
    window_field: str = "sliding_window"
    full_every: int = 0
    heads_by_layer: str = ""
    full_heads: Mapping[str, str] = field(default_factory=dict)
    window_heads: Mapping[str, str] = field(default_factory=dict)
    window_pool: bool = False
    pool_covered: bool = False
    rope_in: Literal["all", "windows", "none"] = "all"
    still_by_number: bool = False
    rotary_share: float = 1.0
    interleaved: bool = False
    norm_after_rope: str = ""
    may_lack_rope: bool = False
    learned_positions: bool = False
    proportional_rope: bool = False
    sinks: bool = False
    asymmetric: bool = False
    shares_kv: bool = False
    latent: bool = False
    latent_halves: bool = False
    linear_states: bool = False
    state_in_every_layer: bool = False
    state_drafts: tuple[str, ...] = ()
    layered_drafts: bool = False
    assistants: bool = False
    attentions: int = 1
    loops: str = ""
    images: Literal["prompt", "text"] | None = None
    images_on_request: bool = False
    image_drafts: tuple[str, ...] = ()
    branching_drafts: bool = False
    refused: Refused | None = None


_LOOPS = Refused("it runs its layers several times, with KV of its own each time")
DIFFUSION = Refused("it is a diffusion model, which rewrites its tokens")
_OTHER_DIMS = Refused(
    "it rotates other dims of a head than the leading ones",
    lambda fields: fields.get("rope_head_dim") not in (None, fields.get("head_dim")),
)
# The 7B model uses RoPE, the larger ones do not.
_ALIBI = Refused("it has ALiBi in place of rotation", lambda fields: fields.get("hidden_size") != 4096)

_PLAIN = Family(windows=False)
# Statistics are of queries after that norm, turned back. Where both dims of a pair have one weight, norm and rotation
# commute, and scores are what they are for other models; else they leave out what depends on where a token stands. To
# have that too, the phases that meet a key's dims would need the norm's weights.
_NORM_AFTER_ROPE = Family(windows=False, norm_after_rope="query_layernorm")
_OWN_POOL = Family(window_pool=True)
_MIMO = Family(
    window_pool=True,
    pool_covered=True,
    window_extra=1,
    window_field="sliding_window_size",
    window_heads={
        "q_heads": "swa_num_attention_heads",
        "kv_heads": "swa_num_key_value_heads",
        "head_dim": "swa_head_dim",
        "v_head_dim": "swa_v_head_dim",
    },
    asymmetric=True,
    layered_drafts=True,
)
# Tokens of an image see later ones, as in Gemma-3. SGLang's prefill leaves that out (most attention backends), cuts it
# at blocks of queries (Triton's, see extend_attention.py), or does it in layers that lack it. What comes of it stays
# with the prompt, which is frozen.
_GEMMA_4 = Family(
    window_pool=True,
    pool_covered=True,
    full_heads={
        "kv_heads": "num_global_key_value_heads",
        "head_dim": "global_head_dim",
        "v_head_dim": "global_head_dim",
    },
    shares_kv=True,
    proportional_rope=True,
    assistants=True,
    images="prompt",
    image_drafts=("FROZEN_KV_MTP",),
)
_WINDOW_POOL = Family(window_pool=True, pool_covered=True)
_SINKS = replace(_WINDOW_POOL, sinks=True)
# Their pool keeps one token more than a query of a window layer sees: as many as the file says, in addition to its own.
_KEEPS_ONE_MORE = replace(_WINDOW_POOL, window_extra=1)
_KEEPS_ONE_MORE_WITH_SINKS = replace(_KEEPS_ONE_MORE, sinks=True)
_STEP_3 = Family(
    window_pool=True,
    pool_covered=True,
    window_extra=1,
    window_heads={
        "q_heads": "attention_other_setting.num_attention_heads",
        "kv_heads": "attention_other_setting.num_attention_groups",
    },
)
_LEARNED_POSITIONS = Family(windows=False, rope_in="none", may_lack_rope=True, learned_positions=True)
_INTERLEAVED = Family(interleaved=True)
_MUSE_GLIMMER = replace(_WINDOW_POOL, interleaved=True, full_every=4, rope_in="windows")
_LATENT = Family(latent=True)
_LINEAR_STATES = Family(linear_states=True)
_NGRAM = ("NGRAM",)
# NEXTN is its own draft layer, which SGLang takes for EAGLE.
_LAYER = ("EAGLE", "NEXTN")
_NGRAM_OR_LAYER = ("NGRAM", *_LAYER)
# Drafts of a block of tokens at once.
_BLOCKS = "DFLASH"
# SGLang gives its draft layer token counts for positions, where the model has several axes (`Qwen3_5ForCausalLMMTP`,
# sglang/srt/models/qwen3_5_mtp.py): after an image, fewer drafts may hold, and answers stay what they are.
_QWEN_3_5 = Family(
    linear_states=True, images="prompt", image_drafts=(*_LAYER, _BLOCKS), state_drafts=(*_NGRAM_OR_LAYER, _BLOCKS)
)
_PLAIN_WITH_IMAGES = Family(windows=False, images="prompt")
_QWEN_VL = replace(_PLAIN_WITH_IMAGES, image_drafts=("EAGLE3",))
_PLAIN_WITH_TEXT = Family(windows=False, images="text")
_STATES_WITH_TEXT = Family(linear_states=True, images="text")
# Latents in some layers, a state in the others.
_LATENT_WITH_STATES = Family(latent=True, linear_states=True)
_KIMI_LINEAR = replace(_LATENT_WITH_STATES, may_lack_rope=True, rope_in="none")
_LATENT_WITH_TEXT = Family(latent=True, images="text")
# Of several language models, some with MLA.
_LATENT_OR_NOT_WITH_TEXT = Family(windows=False, latent=True, images="text")
# SGLang builds the class that transformers has for the file's language model.
_OTHER_LANGUAGE_MODEL = Refused(
    "its language model is none of those that are covered with images",
    lambda fields: fields.get("model_type") not in ("llava", "llama", "mistral", "qwen2"),
)
_NEMOTRON_H = Family(linear_states=True, may_lack_rope=True, rope_in="none")
_GEMMA_3 = Family(full_every=6)
_GEMMA_3N = Family(full_every=5, window_extra=1, shares_kv=True)
_COHERE_2 = Family(interleaved=True, window_extra=1, full_every=4, rope_in="windows")
# RadixAttention gets the window as the number of tokens before the query.
_EXAONE_MOE = Family(rope_in="windows", window_extra=1)
_LONGCAT = Family(attentions=2)

FAMILIES: dict[str, Family] = {
    "AfmoeForCausalLM": Family(rope_in="windows"),
    "ApertusForCausalLM": _PLAIN,
    "ArceeForCausalLM": _PLAIN,
    "BaichuanForCausalLM": Family(refused=_ALIBI),
    "BailingMM2NativeForConditionalGeneration": _PLAIN_WITH_TEXT,
    "BailingMMNativeForConditionalGeneration": _PLAIN_WITH_TEXT,
    "BailingMoEForCausalLM": _PLAIN,
    "BailingMoeForCausalLM": _PLAIN,
    "BailingMoeV2ForCausalLM": _PLAIN,
    "BailingMoeV2_5ForCausalLM": _LATENT_WITH_STATES,
    "BailingMoeV3ForCausalLM": replace(_LATENT_WITH_STATES, may_lack_rope=True),
    "BailingMoeV3VLForConditionalGeneration": replace(_LATENT_WITH_STATES, may_lack_rope=True, images="text"),
    "BeamForCausalLM": _OWN_POOL,
    "ChatGLMModel": Family(interleaved=True, rotary_share=0.5),
    "Cohere2ForCausalLM": _COHERE_2,
    "Cohere2MoeForCausalLM": _COHERE_2,
    "Cohere2VisionForConditionalGeneration": replace(_COHERE_2, images="text"),
    "CohereForCausalLM": _INTERLEAVED,
    "Cosmos3EdgeForConditionalGeneration": _PLAIN_WITH_TEXT,
    "Cosmos3ForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "DbrxForCausalLM": _PLAIN,
    "DeciLMForCausalLM": _PLAIN,
    "DeepseekForCausalLM": _PLAIN,
    "DeepseekOCRForCausalLM": _PLAIN_WITH_TEXT,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "DeepseekVL2ForCausalLM": _LATENT_OR_NOT_WITH_TEXT,
    "DiffusionGemmaForBlockDiffusion": Family(refused=DIFFUSION),
    "Dots1ForCausalLM": Family(),
    "DotsOCRForCausalLM": _PLAIN_WITH_IMAGES,
    "DotsVLMForCausalLM": _LATENT_WITH_TEXT,
    "Ernie4_5ForCausalLM": _INTERLEAVED,
    "Ernie4_5_ForCausalLM": _INTERLEAVED,
    "Ernie4_5_MoeForCausalLM": _INTERLEAVED,
    "Ernie4_5_VLMoeForConditionalGeneration": Family(windows=False, interleaved=True, images="text"),
    "Exaone4ForCausalLM": Family(rope_in="windows"),
    "ExaoneForCausalLM": _PLAIN,
    "ExaoneMoEForCausalLM": _EXAONE_MOE,
    "ExaoneMoeForCausalLM": _EXAONE_MOE,
    "FalconH1ForCausalLM": Family(linear_states=True, state_in_every_layer=True, state_drafts=_NGRAM),
    "GPT2LMHeadModel": _LEARNED_POSITIONS,
    "GPTBigCodeForCausalLM": _LEARNED_POSITIONS,
    "GPTJForCausalLM": _INTERLEAVED,
    "Gemma2ForCausalLM": Family(full_every=2),
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": replace(_GEMMA_3, images="prompt", images_on_request=True),
    "Gemma3nForCausalLM": _GEMMA_3N,
    "Gemma3nForConditionalGeneration": replace(_GEMMA_3N, images="text"),
    "Gemma4ForCausalLM": replace(_GEMMA_4, images=None),
    "Gemma4ForConditionalGeneration": _GEMMA_4,
    # Without an encoder: its image tokens come from pixels by a projection, which no test has served.
    "Gemma4UnifiedForConditionalGeneration": replace(_GEMMA_4, images="text", image_drafts=()),
    "GemmaForCausalLM": _PLAIN,
    "Glm4ForCausalLM": _INTERLEAVED,
    "Glm4MoeForCausalLM": Family(rotary_share=0.5),
    "Glm4MoeLiteForCausalLM": _LATENT,
    "Glm4vForConditionalGeneration": Family(images="prompt"),
    "Glm4vMoeForConditionalGeneration": Family(images="prompt"),
    "GigaChat35ForCausalLM": _LATENT_WITH_STATES,
    "GlmAsrForConditionalGeneration": _PLAIN_WITH_TEXT,
    "GlmOcrForConditionalGeneration": Family(images="prompt"),
    "GptOssForCausalLM": _SINKS,
    "GraniteForCausalLM": Family(),
    "GraniteMoeForCausalLM": Family(),
    "GraniteMoeHybridForCausalLM": Family(linear_states=True, may_lack_rope=True, state_drafts=_NGRAM),
    "GraniteMoeSWAForCausalLM": _KEEPS_ONE_MORE_WITH_SINKS,
    "GraniteMoeSharedForCausalLM": Family(),
    "GraniteSWAForCausalLM": _KEEPS_ONE_MORE_WITH_SINKS,
    "Grok1ForCausalLM": Family(branching_drafts=True),
    "Grok1ModelForCausalLM": Family(branching_drafts=True),
    "Grok1VForCausalLM": Family(branching_drafts=True),
    "HYV3ForCausalLM": _PLAIN,
    "HrmTextForCausalLM": Family(refused=_LOOPS),
    "HunYuanDenseV1ForCausalLM": _NORM_AFTER_ROPE,
    "HunYuanMoEV1ForCausalLM": _NORM_AFTER_ROPE,
    "IQuestCoderForCausalLM": _PLAIN,
    "IQuestLoopCoderForCausalLM": Family(refused=_LOOPS),
    "IQuestQ1ForCausalLM": replace(_KEEPS_ONE_MORE_WITH_SINKS, still_by_number=True),
    "InklingForConditionalGeneration": _OWN_POOL,
    "InternLM2ForCausalLM": _PLAIN,
    "InternLM3ForCausalLM": _PLAIN,
    "InternS1ForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "InternS2MobiusForConditionalGeneration": _STATES_WITH_TEXT,
    "InternS2PreviewForConditionalGeneration": _STATES_WITH_TEXT,
    "InternVLChatModel": Family(images="prompt"),
    "JetNemotronForCausalLM": Family(refused=Refused("it has linear-attention layers")),
    "K2HorizonForCausalLM": Family(refused=_OTHER_DIMS),
    "KimiK25ForConditionalGeneration": Family(latent=True, images="prompt"),
    "KimiK3ForConditionalGeneration": replace(_KIMI_LINEAR, images="text"),
    "KimiK3LinearForCausalLM": _KIMI_LINEAR,
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "KimiVLForConditionalGeneration": _LATENT_WITH_TEXT,
    "LLaDA2MoeModelLM": Family(refused=DIFFUSION),
    "LagunaForCausalLM": replace(_KEEPS_ONE_MORE, heads_by_layer="num_attention_heads_per_layer"),
    "Lfm2ForCausalLM": _LINEAR_STATES,
    "Lfm2MoeForCausalLM": _LINEAR_STATES,
    "Lfm2VlForConditionalGeneration": _STATES_WITH_TEXT,
    "LightOnOCRForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "Llama4ForCausalLM": _INTERLEAVED,
    "Llama4ForConditionalGeneration": _OWN_POOL,
    "LlamaForCausalLM": Family(windows=False, branching_drafts=True),
    "LlavaForConditionalGeneration": replace(_PLAIN_WITH_TEXT, refused=_OTHER_LANGUAGE_MODEL),
    "LlavaLlamaForCausalLM": _PLAIN_WITH_TEXT,
    "LlavaMistralForCausalLM": _PLAIN_WITH_TEXT,
    "LlavaQwenForCausalLM": _PLAIN_WITH_TEXT,
    "LlavaVidForCausalLM": _PLAIN_WITH_TEXT,
    "LocateAnythingForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "LongcatFlashForCausalLM": replace(_LONGCAT, latent=True),
    "LongcatFlashForCausalLMNextN": _LONGCAT,
    "MellumForCausalLM": _WINDOW_POOL,
    "MiDashengLMModel": _PLAIN_WITH_TEXT,
    "MiMoForCausalLM": _PLAIN,
    "MiMoV2ASRForCausalLM": _PLAIN_WITH_TEXT,
    "MiMoV2FlashForCausalLM": _MIMO,
    "MiMoV2ForCausalLM": _MIMO,
    "MiniCPM3ForCausalLM": replace(_LATENT, latent_halves=True),
    "MiniCPMForCausalLM": _PLAIN,
    "MiniCPMO": _PLAIN_WITH_IMAGES,
    "MiniCPMV": _PLAIN_WITH_IMAGES,
    "MiniCPMV4_6ForConditionalGeneration": _STATES_WITH_TEXT,
    "MiniCPMV4_7ForConditionalGeneration": _STATES_WITH_TEXT,
    "MiniMaxM2ForCausalLM": _PLAIN,
    "MiniMaxM3SparseForCausalLM": Family(refused=Refused("its layers attend to selected blocks of tokens")),
    "Ministral3ForCausalLM": _PLAIN,
    "Mistral3ForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "MistralForCausalLM": _PLAIN,
    "MistralLarge3ForCausalLM": _LATENT,
    "MixtralForCausalLM": _PLAIN,
    "MultiModalityCausalLM": _PLAIN_WITH_IMAGES,
    "MuseGlimmerForCausalLM": _MUSE_GLIMMER,
    "MuseGlimmerForConditionalGeneration": replace(_MUSE_GLIMMER, images="text"),
    "NVILAForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "NVILALiteForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "NanbeigeForCausalLM": Family(windows=False, loops="num_loops"),
    "NemotronHForCausalLM": replace(_NEMOTRON_H, state_drafts=_NGRAM),
    "NemotronHPuzzleForCausalLM": replace(_NEMOTRON_H, state_drafts=_NGRAM),
    "NemotronH_Nano_Omni_Reasoning_V3": replace(_NEMOTRON_H, images="text"),
    "NemotronH_Nano_VL_V2": replace(_NEMOTRON_H, images="text"),
    "NemotronH_Omni_Reasoning_V3": replace(_NEMOTRON_H, images="text"),
    "OPTForCausalLM": _LEARNED_POSITIONS,
    "Olmo2ForCausalLM": Family(),
    "Olmo3ForCausalLM": Family(full_every=4),
    "OlmoForCausalLM": _PLAIN,
    "OlmoeForCausalLM": _PLAIN,
    "OrionForCausalLM": _PLAIN,
    "POINTSV15ChatModel": _PLAIN_WITH_IMAGES,
    "PaddleOCRVLForConditionalGeneration": Family(interleaved=True, images="prompt"),
    "PersimmonForCausalLM": _PLAIN,
    "Phi3ForCausalLM": _PLAIN,
    "Phi3SmallForCausalLM": _PLAIN,
    "PhiForCausalLM": _PLAIN,
    "PhiMoEForCausalLM": _PLAIN,
    "PixtralForConditionalGeneration": _LATENT_OR_NOT_WITH_TEXT,
    "QWenLMHeadModel": _PLAIN,
    "QuantMixtralForCausalLM": _PLAIN,
    "Qwen2AudioForConditionalGeneration": _PLAIN_WITH_TEXT,
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen2MoeForCausalLM": _PLAIN,
    "Qwen2VLForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_VL,
    "Qwen3ASRForConditionalGeneration": _PLAIN_WITH_TEXT,
    "Qwen3ForCausalLM": _PLAIN,
    "Qwen3MoeForCausalLM": _PLAIN,
    "Qwen3NextForCausalLM": Family(linear_states=True, rotary_share=0.25, state_drafts=(*_NGRAM_OR_LAYER, _BLOCKS)),
    "Qwen3OmniMoeForConditionalGeneration": _PLAIN_WITH_TEXT,
    "Qwen3VLForConditionalGeneration": _QWEN_VL,
    "Qwen3VLMoeForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_3_5,
    "SDARForCausalLM": Family(refused=DIFFUSION),
    "SDARMoeForCausalLM": Family(refused=DIFFUSION),
    "Sarashina2VisionForCausalLM": _PLAIN_WITH_IMAGES,
    "SarvamMLAForCausalLM": _LATENT,
    "SarvamMoEForCausalLM": _PLAIN,
    "SeedOssForCausalLM": Family(),
    "SmolLM3ForCausalLM": Family(),
    "SolarForCausalLM": _PLAIN,
    "Spark2_5ForCausalLM": _WINDOW_POOL,
    "StableLmForCausalLM": _PLAIN,
    "Starcoder2ForCausalLM": _PLAIN,
    "Step3VLForConditionalGeneration": replace(_PLAIN_WITH_IMAGES, images_on_request=True),
    "Step3p5ForCausalLM": replace(_STEP_3, layered_drafts=True),
    "Step3p7ForConditionalGeneration": replace(_STEP_3, images="text"),
    "StepVLForConditionalGeneration": _PLAIN_WITH_IMAGES,
    "TeleFLMForCausalLM": _PLAIN,
    "TorchNativeLlamaForCausalLM": _PLAIN,
    "TorchNativePhi3ForCausalLM": _PLAIN,
    "VoxtralForConditionalGeneration": _PLAIN_WITH_TEXT,
    "XllmForCausalLM": Family(refused=_OTHER_DIMS),
    "XverseForCausalLM": _PLAIN,
    "XverseMoeForCausalLM": _PLAIN,
    "YiVLForCausalLM": _PLAIN_WITH_TEXT,
    "ZayaForCausalLM": Family(refused=Refused("its attention keeps a state in addition to the KV cache")),
}

_OTHER = Family()


def is_unknown(architectures: list[str] | None) -> bool:
    """Whether the first of `architectures`, as a config.json lists them, has no row."""
    return bool(architectures) and architectures[0] not in FAMILIES


def family_of(architectures: list[str] | None) -> Family:
    """The row of the first of `architectures`; if it has none, the one of a plain decoder, to describe what is
    refused."""
    return FAMILIES.get(architectures[0], _OTHER) if architectures else _OTHER


def family_in(fields: Mapping[str, Any]) -> Family:
    """The Family of a config.json, by its fields."""
    return family_of(fields.get("architectures"))
