"""What is refused because SGLang's own code of an architecture lacks it, which no config.json says.

A test compares the names with SGLang's source.
"""

from __future__ import annotations

from sglang_triattn.compatibility.rule import BLOCKS, Rule, Server, many

# Their `forward` takes no `pp_proxy_tensors`. Granite-4-H's does, but each stage looks for the weights of all; MiMo-V2
# ends with an error in the first step.
_UNSTAGED = """
AfmoeForCausalLM ChatGLMModel Cohere2ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration
CohereForCausalLM DbrxForCausalLM DeepseekForCausalLM DeepseekOCRForCausalLM DeepseekVL2ForCausalLM DotsOCRForCausalLM
Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration ExaoneForCausalLM
FalconH1ForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma3nForCausalLM
Gemma3nForConditionalGeneration Gemma4UnifiedForConditionalGeneration GemmaForCausalLM GlmAsrForConditionalGeneration
GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM GraniteSWAForCausalLM Grok1ForCausalLM
Grok1ModelForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HYV3ForCausalLM InklingForConditionalGeneration
InternLM2ForCausalLM InternS1ForConditionalGeneration InternVLChatModel IQuestQ1ForCausalLM
KimiVLForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration
LightOnOCRForConditionalGeneration Llama4ForConditionalGeneration LlavaLlamaForCausalLM LlavaMistralForCausalLM
LlavaQwenForCausalLM LlavaVidForCausalLM LocateAnythingForConditionalGeneration LongcatFlashForCausalLM MiDashengLMModel
MiMoForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniCPMO
MultiModalityCausalLM MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration NemotronH_Nano_Omni_Reasoning_V3
NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 NVILAForConditionalGeneration NVILALiteForConditionalGeneration
Olmo2ForCausalLM OlmoeForCausalLM OlmoForCausalLM OrionForCausalLM PaddleOCRVLForConditionalGeneration
PersimmonForCausalLM Phi3SmallForCausalLM PhiForCausalLM PhiMoEForCausalLM PixtralForConditionalGeneration
POINTSV15ChatModel QuantMixtralForCausalLM Qwen2AudioForConditionalGeneration Qwen2VLForConditionalGeneration
Qwen3ASRForConditionalGeneration Qwen3NextForCausalLM QWenLMHeadModel Sarashina2VisionForCausalLM StableLmForCausalLM
Starcoder2ForCausalLM Step3p7ForConditionalGeneration Step3VLForConditionalGeneration StepVLForConditionalGeneration
TorchNativeLlamaForCausalLM TorchNativePhi3ForCausalLM VoxtralForConditionalGeneration XverseForCausalLM
XverseMoeForCausalLM YiVLForCausalLM
"""
# They have `set_eagle3_layers_to_capture`.
_CAPTURING = """
ApertusForCausalLM BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM Cosmos3ForConditionalGeneration
DeepseekV2ForCausalLM DeepseekV3ForCausalLM ExaoneMoEForCausalLM ExaoneMoeForCausalLM Gemma3ForCausalLM
Gemma3ForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration
Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GptOssForCausalLM InternLM3ForCausalLM InternS2MobiusForConditionalGeneration
InternS2PreviewForConditionalGeneration IQuestCoderForCausalLM KimiK25ForConditionalGeneration Llama4ForCausalLM
Llama4ForConditionalGeneration LlamaForCausalLM LongcatFlashForCausalLM MellumForCausalLM MiniMaxM2ForCausalLM
Ministral3ForCausalLM MistralForCausalLM MistralLarge3ForCausalLM Phi3ForCausalLM Qwen2_5_VLForConditionalGeneration
Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM
Qwen3_5MoeForConditionalGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration SarvamMoEForCausalLM TeleFLMForCausalLM
"""
# They have `set_dflash_layers_to_capture`. Qwen3-VL's calls one of its language model, which has none.
_CAPTURING_FOR_BLOCKS = """
BeamForCausalLM Cosmos3ForConditionalGeneration DeepseekV2ForCausalLM DeepseekV3ForCausalLM Gemma4ForCausalLM
Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration Glm4MoeLiteForCausalLM GptOssForCausalLM
InklingForConditionalGeneration InternLM3ForCausalLM InternS2MobiusForConditionalGeneration
InternS2PreviewForConditionalGeneration IQuestCoderForCausalLM KimiK25ForConditionalGeneration
KimiK3ForConditionalGeneration KimiK3LinearForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM
Lfm2VlForConditionalGeneration Llama4ForCausalLM LlamaForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM
MiMoV2ForCausalLM Ministral3ForCausalLM MistralForCausalLM MistralLarge3ForCausalLM MuseGlimmerForCausalLM
MuseGlimmerForConditionalGeneration NanbeigeForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2
NemotronH_Omni_Reasoning_V3 NemotronHForCausalLM NemotronHPuzzleForCausalLM Phi3ForCausalLM Qwen3_5ForCausalLM
Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration Qwen3ForCausalLM
Qwen3MoeForCausalLM Qwen3NextForCausalLM TeleFLMForCausalLM
"""
UNSTAGED = frozenset(_UNSTAGED.split())
"""Architectures that SGLang does not serve in pipeline stages."""
CAPTURING = frozenset(_CAPTURING.split())
"""Architectures whose hidden states SGLang can capture for an EAGLE-3 head."""
CAPTURING_FOR_BLOCKS = frozenset(_CAPTURING_FOR_BLOCKS.split())
"""Architectures whose hidden states SGLang can capture for a model that drafts a block of tokens at once."""


def _by_transformers(server: Server) -> bool:
    return server.settings.get("model_impl") == "transformers"


SERVED_CODE = (
    Rule(
        "pp_size",
        many,
        "SGLang itself cannot serve this model in stages",
        "use --pp-size 1",
        lambda server: server.traits.architecture in UNSTAGED and not _by_transformers(server),
        names_model=True,
    ),
    *(
        Rule(
            "speculative_algorithm",
            lambda value, drafts=drafts: str(value).upper() == drafts,
            f"SGLang's code of this model does not capture the hidden states that {drafts} reads",
            "use another --speculative-algorithm, or leave it out",
            lambda server, known=known: server.traits.architecture not in known | {""} or _by_transformers(server),
            names_model=True,
        )
        for drafts, known in (("EAGLE3", CAPTURING), (BLOCKS, CAPTURING_FOR_BLOCKS))
    ),
)
"""Rules for some models, after those of `rules`."""
