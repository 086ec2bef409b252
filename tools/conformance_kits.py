"""Every test kit of the installed SGLang wheel, and of each: how `make conformance` runs it, or why it does not.

`kits_in_wheel` and `modules_in_wheel` read the wheel; the lists here must name exactly what these find. Standard
library only.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One class of tests, as it is run."""

    kit: str
    """Below `sglang.test`: `kits.FILE.CLASS`, or a module whose functions `tests` of benchmarks/conformance/cases.py
    call."""
    adapter: str = ""
    """The class in benchmarks/conformance/cases.py that gives the kit what it expects, or calls the functions."""
    launch: str = "usual"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Class attributes of the kit that differ from its defaults."""
    note: str = ""
    """How this case differs from others of the same kit, and what else was set."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons by the names of tests that are not run."""
    quick: bool = False

    @property
    def name(self) -> str:
        """Unique among the cases."""
        return self.kit.removeprefix("kits.") + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Launch:
    """A way in which each of the three servers is started."""

    args: tuple[str, ...] = ("--max-running-requests", "32")
    model: str = "random"
    """`random`, of tools/tiny_model.py, or `smollm2`, for cases that ask for sense."""
    env: Mapping[str, str] = field(default_factory=dict)


LAUNCHES = {
    "usual": Launch(("--max-running-requests", "32", "--enable-return-hidden-states")),
    "retracting": Launch(env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}),
    "waiting-timeout": Launch(("--max-running-requests", "1"), env={"SGLANG_REQ_WAITING_TIMEOUT": "1"}),
    "running-timeout": Launch(env={"SGLANG_REQ_RUNNING_TIMEOUT": "4"}),
    "text": Launch(model="smollm2"),
}

_DATA = "needs a data set that no package index has"
_DRAFTS = "needs a trained draft model"
_SESSIONS = "streaming sessions are refused with compression"
_GPU = "needs a GPU"
_VISION = "needs a vision-language model of usable quality"
_SPEED = "its limits are speeds of GPUs"

_KL = {"kl_div_thres": 0.003, "kl_div_max_samples": 4}
_TREE = {"kl_threshold": 0.003, "prefix_len": 128, "num_groups": 2, "branches_per_group": 2}
_ABORT = {"abort_all_max_new_tokens": 8000, "abort_all_sleep": 6}
_NO_GSM8K = {"test_gsm8k": _DATA}
_UNLIMITED = "its answer has no limit, and a model of this size writes up to the end of its context"
_SENSE = "asks for sense; run with SmolLM2"
_OPENAI = "needs an API without SGLang"

CASES = (
    Case("kits.basic_decode_correctness_kit.BasicDecodeCorrectnessMixin", launch="text"),
    Case(
        "kits.basic_scheduler_stress_kit.BasicSchedulerStressMixin",
        launch="text",
        left_out={"test_long_prompt": "run with the random model, which reads 8,000 tokens faster"},
    ),
    Case(
        "kits.basic_scheduler_stress_kit.BasicSchedulerStressMixin",
        note="long prompt",
        left_out={"test_streaming_response": _SENSE, "test_concurrent_requests": _SENSE},
    ),
    Case("kits.matched_stop_kit.MatchedStopMixin", launch="text", quick=True),
    Case("kits.json_mode_kit.JSONModeMixin", "OpenAIClient", launch="text"),
    Case("kits.json_constrained_kit.JSONConstrainedMixin", launch="text"),
    Case("kits.regex_constrained_kit.RegexConstrainedMixin", launch="text"),
    Case("kits.ebnf_constrained_kit.EBNFConstrainedMixin", launch="text"),
    Case("kits.anthropic_messages_kit.AnthropicMessagesMixin", launch="text"),
    Case("kits.spec_server_kits.SpecParityKit", "ParityWithPlain", launch="text", note="against plain SGLang"),
    Case(
        "test_programs",
        "Programs",
        launch="text",
        left_out={
            "test_image_qa": _VISION,
            "test_stream": "asserts nothing; test_stream_logprobs does",
            "test_parallel_encoding": "waits for ever for an endpoint that SGLang's server no longer has",
            "test_completion_speculative": _OPENAI,
            "test_chat_completion_speculative": _OPENAI,
        },
    ),
    Case("kits.basic_api_contract_kit.BasicAPIContractMixin", quick=True),
    Case("kits.abort_timeout_kit.AbortAllMixin", settings=_ABORT, quick=True),
    Case(
        "kits.pause_generation_kit.PauseResumeInPlaceMixin",
        settings={"pause_num_requests": 16, "pause_max_new_tokens": 256, "pause_duration": 2, "pause_ignore_eos": True},
        quick=True,
    ),
    Case("kits.cache_hit_kit", "MultiTurnCacheHits", quick=True),
    Case("kits.cache_hit_kit", "LongMultiTurnCacheHits", note="answers past the small budget"),
    Case("kits.radix_cache_server_kit", "RadixTraffic", note="100 nodes", quick=True),
    Case(
        "kits.kl_divergence_kit.KLDivergenceMixin",
        "KLPrompts",
        settings={**_KL, "kl_div_prefill_max_new_tokens": 40, "kl_div_decode_max_new_tokens": 40},
        note="below the small budget",
    ),
    Case(
        "kits.kl_divergence_kit.KLDivergenceMixin",
        "KLPrompts",
        settings={**_KL, "kl_div_prefill_max_new_tokens": 128, "kl_div_decode_max_new_tokens": 128},
    ),
    Case(
        "kits.unified_radix_cache_kit.UnifiedRadixTreeTestMixin",
        "KLPrompts",
        settings={**_TREE, "max_new_tokens": 24},
        note="below the small budget",
        left_out=_NO_GSM8K,
    ),
    Case(
        "kits.unified_radix_cache_kit.UnifiedRadixTreeTestMixin",
        "KLPrompts",
        settings={**_TREE, "max_new_tokens": 128},
        left_out=_NO_GSM8K,
    ),
    Case("kl_test_utils", "KLOfOneTurn", note="below the small budget"),
    Case("kl_test_utils", "KLOfOneTurnPastTheBudget"),
    Case(
        "kits.spec_server_kits.SpecCorrectnessKit",
        "Tokenizer",
        left_out={"test_acc_length": f"asserts an acceptance length: {_DRAFTS}"},
    ),
    Case(
        "kits.spec_server_kits.SpecLogprobKit",
        left_out={
            "test_logprob_mixed": (
                "over 100 requests with the log-probabilities of up to 2,000 prompt tokens; its function is "
                "run by test_utils with shorter prompts"
            )
        },
    ),
    Case("test_utils", "LogprobChecks", note="run_logprob_check"),
    Case("kits.spec_server_kits.SpecPenaltyKit", "SpecRequests"),
    Case(
        "kits.spec_server_kits.SpecFeatureKit",
        "SpecRequests",
        note="two prompts a client",
        left_out={
            "test_constrained_decoding": _UNLIMITED,
            "test_radix_attention": "the function of radix_cache_server_kit, which is run by itself",
        },
    ),
    Case("kits.spec_server_kits.SpecHiddenStatesKit"),
    Case("kits.spec_server_kits.SpecSamplingMaskKit"),
    Case(
        "test_deterministic",
        "Deterministic",
        note="batches of 1 to 4",
        left_out={
            "test_radix_cache": "draws token ids up to 50,000, past the vocabulary of 49,152, which ends any server"
        },
    ),
    Case("kits.radix_cache_server_kit", "RadixTraffic", launch="retracting", note="100 nodes, retracting", quick=True),
    Case("kits.cache_hit_kit", "MultiTurnCacheHits", launch="retracting", note="retracting"),
    Case(
        "kits.unified_radix_cache_kit.UnifiedRadixTreeTestMixin",
        "KLPrompts",
        launch="retracting",
        settings={**_TREE, "max_new_tokens": 24},
        note="below the small budget, retracting",
        left_out=_NO_GSM8K,
    ),
    Case("kits.spec_server_kits.SpecPenaltyKit", "SpecRequests", launch="retracting", note="retracting"),
    Case(
        "kits.abort_timeout_kit.WaitingTimeoutMixin",
        launch="waiting-timeout",
        settings={"waiting_timeout_max_new_tokens": 1000},
    ),
    Case(
        "kits.abort_timeout_kit.RunningTimeoutTwoWaveMixin",
        launch="running-timeout",
        settings={"running_timeout_max_new_tokens": 8000},
    ),
)

NOT_RUN = {
    "kits.dsa_metadata_kit": f"{_GPU}: CUDA graphs of DeepSeek's sparse attention",
    "kits.eval_accuracy_kit.MMLUSanityMixin": _DATA,
    "kits.eval_accuracy_kit.GSM8KMixin": _DATA,
    "kits.eval_accuracy_kit.MMLUMixin": _DATA,
    "kits.eval_accuracy_kit.MMMUProMixin": _DATA,
    "kits.eval_accuracy_kit.HumanEvalMixin": _DATA,
    "kits.eval_accuracy_kit.MGSMEnMixin": _DATA,
    "kits.fwd_occupancy_kit.FwdOccupancyMixin": f"{_GPU}: measures how busy it is",
    "kits.lm_eval_kit.LMEvalMixin": f"{_DATA}, and the package lm_eval",
    "kits.mmmu_vlm_kit.MMMUMixin": f"{_DATA}; {_VISION}",
    "kits.mmmu_vlm_kit.MMMUMultiModelTestBase": f"{_DATA}; {_VISION}",
    "kits.pd_parity_kit.PDLogprobParityMixin": "disaggregated prefill is refused with compression",
    "kits.perf_bench_kit.Metric": f"a record, not a test; {_SPEED}",
    "kits.prefix_cache_branching_kit.PrefixCacheBranchingMixin": (
        "expects that a shared prefix is not yet cached at its second use, which holds for models with recurrent "
        "states alone"
    ),
    "kits.reasoning_kit.ReasoningTokenUsageMixin": (
        "needs a model with a token that ends its thoughts; tests/server/test_reasoning.py has these checks"
    ),
    "kits.reasoning_kit.SeparateReasoningMixin": (
        "needs a model that thinks; tests/server/test_reasoning.py has these checks"
    ),
    "kits.spec_decoding_kit.SpecDecodingMixin": _DRAFTS,
    "kits.spec_server_kits.SpecAccuracyKit": f"{_DATA}; {_DRAFTS}",
    "kits.spec_server_kits.SpecGrammarKit": f"asserts that drafts were verified: {_DRAFTS}",
    "kits.spec_server_kits.SpecPerfKit": f"{_DATA}; {_SPEED}",
    "kits.streaming_session_kit.StreamingSessionKitMixin": _SESSIONS,
    "kits.streaming_session_kit.AbortLeakReproKitMixin": _SESSIONS,
    "kits.unified_radix_cache_kit.AccuracyTwoPassMixin": f"{_DATA}; its other test needs a storage for HiCache",
    "kits.vlm_perf_kit": f"{_VISION}; {_SPEED}",
}

# Modules other than the kits, and whole packages, by the reason why no case calls them.
OTHER_MODULES = {
    "run by the kits that use it": ("kl_multiturn_utils",),
    "run by tests/server/test_jitter.py": ("cache_consistency_jitter",),
    "starts servers and clients of larger models for the kits; here benchmarks.conformance does that": (
        "server_fixtures", "runners", "test_deterministic_utils", "send_one", "gpt_oss_common", "dsv41_flash_common",
        "glm53_flash_common", "muse_spark_utils", "gb300_utils", "ci", "external_models",
    ),
    "runs scripts inside a scheduler or a cache; the scripts are not in the wheel": (
        "scripted_runtime", "scripted_runtime_chunked_helpers", "mem_cache_utils", "unified_allocator_fixtures",
        "separate_buffer_allocator_double", "mock_model", "boundary_fixtures", "communicator_patch", "parallel_groups",
        "config_publishers", "doc_patch", "logprob_test_utils", "otel_collector", "observability",
    ),
    "the KV canary is refused with compression": ("kv_canary",),
    _DATA: (
        "run_eval", "sgl_eval_utils", "simple_eval_common", "simple_eval_humaneval", "simple_eval_mgsm",
        "simple_eval_mixed_prefix_gsm8k", "few_shot_gsm8k", "chunked_prefill_test_utils", "accuracy_test_runner",
        "run_combined_tests", "precision_baseline_store",
    ),
    _VISION: ("vlm_utils", "simple_eval_mmmu_vlm"),
    _SPEED: ("nightly_utils", "nightly_bench_utils", "performance_test_runner"),
    "needs a larger model, one that calls tools": ("tool_call_test_runner",),
    "needs LoRA adapters of larger models; tests/server/test_lora.py makes its own": ("lora_utils",),
    "needs larger models, one of which drafts; tests/server/test_hicache.py has small ones": (
        "hicache_spec_storage_common",
    ),
    "for other machines than CPUs and NVIDIA's GPUs": ("ascend", "xpu", "hicache_xpu_common"),
    "tests kernels, layers or transfers of SGLang, not a server": (
        "kernels", "cpu_test_utils", "layer_ut_utils", "quant_ref_utils", "test_deepep_utils", "test_marlin_utils",
        "mooncake_utils",
    ),
    "tests of disaggregated prefill, which is refused with compression": ("manual",),
}  # fmt: skip


def folder() -> Path:
    """`sglang/test` of the installed wheel, found without importing SGLang."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("sglang is not installed")
    return Path(spec.submodule_search_locations[0]) / "test"


def kits_in_wheel() -> set[str]:
    """`kits.FILE.CLASS` of each class in each kit file, `kits.FILE` of a file without classes."""
    found = set()
    for file in (folder() / "kits").glob("*.py"):
        name = f"kits.{file.stem}"
        classes = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
        found |= {f"{name}.{own}" for own in classes} or {name}
    return found


def modules_in_wheel() -> set[str]:
    """Names of all modules and packages in the kits' folder."""
    found = {file.stem for file in folder().glob("*.py")}
    found |= {path.name for path in folder().iterdir() if any(path.rglob("*.py")) and path.is_dir()}
    return found - {"__init__", "kits", "__pycache__"}


def other_modules() -> dict[str, str]:
    """Reasons by the modules that no case calls."""
    return {name: reason for reason, names in OTHER_MODULES.items() for name in names}
