"""`sglang-triattn check` and the launch come to one judgement, by config.json and by what SGLang makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from plan_cases import CONFIGS
from sglang_triattn.compatibility.resolve import resolve
from sglang_triattn.compatibility.traits import uncovered_in_file
from sglang_triattn.compatibility.verdict import judge
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.launch.checks import values_of
from sglang_triattn.patches.launch.traits import traits_of

DRAFTS = {"speculative_eagle_topk": 1, "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
BRANCHES = {"speculative_eagle_topk": 4, "speculative_num_steps": 5, "speculative_num_draft_tokens": 8}
SETTINGS = {
    "plain": {},
    "decode server": {"disaggregation_mode": "decode"},
    "n-grams": {"speculative_algorithm": "NGRAM"},
    "draft layers": {"speculative_algorithm": "EAGLE", **DRAFTS},
    "drafts that branch": {"speculative_algorithm": "EAGLE", **BRANCHES, "attention_backend": "fa3"},
    "stages": {"pp_size": 2},
    "host tier": {"enable_hierarchical_cache": True},
    "mixed chunks": {"enable_mixed_chunk": True},
    "stages and mixed chunks": {"pp_size": 2, "enable_mixed_chunk": True},
    "decode server without overlap": {"disaggregation_mode": "decode", "disable_overlap_schedule": True},
    "decode server, two ranks": {"disaggregation_mode": "decode", "tp_size": 2},
    "decode server, two replicas": {"disaggregation_mode": "decode", "dp_size": 2},
    "decode server and LoRA": {"disaggregation_mode": "decode", "enable_lora": True},
    "drafts and LoRA": {"speculative_algorithm": "EAGLE", **DRAFTS, "enable_lora": True},
    "draft layers by another name": {"speculative_algorithm": "NEXTN", **DRAFTS, "enable_multi_layer_eagle": True},
    "attention data parallelism": {"tp_size": 2, "dp_size": 2, "attn_dp_size": 2},
    "measuring in stages": {"pp_size": 2},
}
CONFIG = {"measuring in stages": Config(stats_after_update="measure")}
# SGLang drafts each token with a layer of its own (`overrides.py` of sglang/srt/arg_groups).
LAYERED = ("MiMoV2FlashForCausalLM",)
# Their code comes with the model.
UNREADABLE = {"kimi-k2", "kimi-linear-48b-a3b", "longcat-flash", "nemotron-super-49b", "step-3.5-flash"}


def refused(judgement, *given) -> bool:
    try:
        found = judgement(*given)
    except TriAttentionError:
        return True
    return getattr(found, "refusal", None) is not None


class Settings:
    """SGLang's settings with some given, and some that a launch of a model with this configuration completes."""

    def __init__(self, given: dict[str, Any], content: dict[str, Any]) -> None:
        self._record = ServerArgs(model_path="dummy")
        layered = content["architectures"][0] in LAYERED and given.get("speculative_algorithm") == "EAGLE"
        completed = {"attn_dp_size": 1, "device": "cuda", "page_size": 1, "enable_multi_layer_eagle": layered}
        self._given = {**completed, **given}

    def __getattr__(self, name: str) -> Any:
        return self._given[name] if name in self._given else getattr(self._record, name)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_check_and_launch_agree(name, tmp_path):
    """Prevents `check` from saying "compresses" of a model and settings that the launch refuses, or the reverse."""
    content = json.loads((CONFIGS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content))
    try:
        model = ModelConfig(str(tmp_path))
    except Exception:
        assert name in UNREADABLE
        return
    for case, given in SETTINGS.items():
        config = CONFIG.get(case, Config())
        # A launch reads the file first.
        launch = bool(uncovered_in_file(content)) or refused(
            resolve, config, values_of(Settings(given, content)), traits_of(model)
        )
        check = refused(judge, content, name, config, given)
        assert check == launch, case
