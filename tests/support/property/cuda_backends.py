"""SGLang's attention backends for CUDA, built without a GPU: what they plan with is plain torch and Triton.

What comes from compiled libraries is replaced by stand-ins, which do nothing. Needs Triton's interpreter.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.runtime_context import get_schedule, get_server_args, get_spec, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from content import HEAD_DIM, KV_HEADS, Q_HEADS
from memory import CONTEXT, ROWS
from simulation import Simulation

FOLDER = "sglang.srt.layers.attention"
LIBRARIES = (
    "flash_mla",
    "flash_mla.flash_mla_interface",
    "sgl_kernel",
    "sgl_kernel.flash_attn",
    "sgl_kernel.flash_mla",
)
# What these modules import only where there is a GPU, or compile when they are used.
ON_GPUS = {
    "flashinfer_backend": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "fast_decode_plan",
    ),
    "flashinfer_mla_backend": ("BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"),
    "trtllm_mla_backend": ("_jit_fixup_module", "make_persistent_multi_ctas_kv_counter_buffer"),
}
ALLOCATING = ("empty", "zeros", "ones", "full", "arange", "tensor")
# Tokens that the draft model computes beyond the first.
STEPS = 4


def publish_settings() -> None:
    """SGLang's process-wide settings, which its backends read."""
    settings = ServerArgs(model_path="dummy")
    settings.resolve_once()
    publish(settings, role="scheduler")


@contextmanager
def drafting(branches: int, page_size: int = 1) -> Iterator[None]:
    """While open, the server drafts so many tokens in each step, and has pages of so many slots."""
    drafts = {"speculative_num_steps": STEPS, "speculative_eagle_topk": branches}
    drafts |= {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": STEPS + 1}
    with get_spec().override(**drafts), get_schedule().override(page_size=page_size):
        yield


@contextmanager
def seeing(newest: int, sinks: int) -> Iterator[None]:
    """While open, steps of a draft see so many of a row's newest tokens and of its first ones."""
    with ExitStack() as stack:
        for module in ("flashinfer_backend", "triton_backend"):
            place = importlib.import_module(f"{FOLDER}.{module}")
            stack.enter_context(mock.patch.object(place, "resolve_draft_decode_window", return_value=(newest, sinks)))
        yield


@contextmanager
def without_gpu() -> Iterator[None]:
    """While open, the backends can be imported, built and asked to plan on a CPU, for a server that drafts chains."""
    with drafting(1), torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in LIBRARIES}))
        for module, names in ON_GPUS.items():
            place = importlib.import_module(f"{FOLDER}.{module}")
            for name in names:
                stack.enter_context(mock.patch.object(place, name, _standin(), create=True))
        for name in ALLOCATING:
            # What is not written has to be equal in two plans.
            allocate = torch.zeros if name == "empty" else getattr(torch, name)
            stack.enter_context(mock.patch.object(torch, name, _on_cpu(allocate)))
        flashmla = importlib.import_module(f"{FOLDER}.flashmla_backend")
        stack.enter_context(mock.patch.object(flashmla, "get_mla_metadata", _divided))
        properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=properties))
        yield


def _standin() -> mock.MagicMock:
    """A class or function of a compiled library, whose objects keep what they are called with."""
    return mock.MagicMock(side_effect=lambda *_, **__: mock.MagicMock(is_cuda_graph_enabled=False))


def _on_cpu(allocate: Callable) -> Callable:
    """`allocate` with the CPU in the place of "cuda", which some backends name themselves, and nothing pinned."""

    def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return allocate(*args, **kwargs)

    return allocated


def _divided(lengths: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
    """In the place of FlashMLA's plan, in its shapes: which lengths it was made for."""
    return lengths.sum().expand(1, 8), torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def runner_of(sim: Simulation, *, latent: bool, reach: int | None = None, draft: bool = False) -> SimpleNamespace:
    """What backends read of SGLang's ModelRunner, over the simulation's memory.

    Args:
        latent: for a model with MLA.
        reach: tokens before its own that a query of a window layer sees; None without such layers.
        draft: for the steps of a draft model, which has K/V for all slots that rows list, and for no others.
    """
    pool = sim.pool if draft else sim.allocator.get_kvcache()
    two_pools = pool is not sim.pool
    text = transformers.LlamaConfig(num_attention_heads=Q_HEADS, num_key_value_heads=KV_HEADS)
    text.architectures = ["LlamaForCausalLM"]
    model = SimpleNamespace(
        attention_arch=AttentionArch.MLA if latent else AttentionArch.MHA,
        num_attention_heads=Q_HEADS,
        get_max_num_attention_heads=lambda: Q_HEADS,
        get_num_kv_heads=lambda *_: KV_HEADS,
        context_len=CONTEXT,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        swa_v_head_dim=HEAD_DIM,
        kv_lora_rank=HEAD_DIM,
        qk_nope_head_dim=HEAD_DIM,
        qk_rope_head_dim=HEAD_DIM,
        hidden_size=Q_HEADS * HEAD_DIM,
        scaling=1.0,
        linear_attn_registry_result=None,
        hf_config=text,
        hf_text_config=text,
        is_encoder_decoder=False,
        is_local_attention_model=False,
        is_hybrid_swa=two_pools,
        is_multimodal=False,
    )
    translator = KVIndexTranslator(
        req_to_token=sim.rows.req_to_token,
        token_to_kv_pool_allocator=sim.allocator,
        token_to_kv_pool=pool,
        page_size=sim.page_size,
        device="cpu",
    )
    return SimpleNamespace(
        model_config=model,
        model=torch.nn.Module(),
        server_args=get_server_args(),
        req_to_token_pool=sim.rows,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=sim.allocator,
        kv_index_translator=translator,
        page_size=sim.page_size,
        max_running_requests=ROWS,
        sliding_window_size=reach,
        device="cpu",
        gpu_id=0,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        use_mla_backend=latent,
        is_draft_worker=True,
        is_hybrid_swa=two_pools,
        attn_cp_size=1,
        dcp_size=1,
        decode_num_tokens_per_req=lambda: STEPS + 1,
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
        prefill_attention_backend_str="",
        decode_attention_backend_str="",
    )


def planned(backend: Any) -> dict[str, torch.Tensor]:
    """All that a backend plans with, by where it keeps it, and what compiled planners were called with."""
    # A planner that is a function keeps the calls of all backends.
    names = [
        name
        for name, value in vars(backend).items()
        if ("metadata" in name or "wrapper" in name) and not isinstance(value, mock.NonCallableMock)
    ]
    return tensors_in({name: getattr(backend, name) for name in names})


def tensors_in(value: Any, place: str = "") -> dict[str, torch.Tensor]:
    """All tensors and numbers in the attributes and items of `value`, by where they are."""
    if isinstance(value, torch.Tensor):
        return {place: value.clone()}
    if isinstance(value, (bool, int)):
        return {place: torch.tensor(int(value))}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, mock.NonCallableMock):
        given = [[*call.args, *call.kwargs.values()] for call in value.mock_calls]
        plain = (torch.Tensor, int)
        items = ((number, [each for each in values if isinstance(each, plain)]) for number, values in enumerate(given))
    elif hasattr(value, "__dict__"):
        items = vars(value).items()
    else:
        return {}
    return {name: each for key, item in items for name, each in tensors_in(item, f"{place}.{key}").items()}
