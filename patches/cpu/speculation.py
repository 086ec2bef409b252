"""Speculative decoding on plain CPUs: torch in the place of kernels that are compiled for GPUs alone (`drafts`).

SGLang parts: the kernels' modules in sglang/kernels/ops/speculative, and the modules that import from them by name.
Everything else of SGLang's speculative decoding runs unchanged.

Drafted tokens are verified greedily at every temperature, as SGLang's own engine for CPUs does
(`_verify_uses_greedy`, sglang/srt/speculative/eagle_utils.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from sglang_triattn.patches.cpu import drafts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DRAFT_MODELS = "STANDALONE", "EAGLE", "EAGLE3", "FROZEN_KV_MTP", "DFLASH"
"""Algorithms whose drafts come from a second model."""

ALGORITHMS = ("NGRAM", *DRAFT_MODELS)


def install(algorithm: str) -> None:
    """Called before SGLang imports the worker of `algorithm`, once in each process that drafts."""
    if algorithm not in ALGORITHMS:
        return
    reconstruct_tree = import_tree()
    from sglang.srt.mem_cache import allocation, memory_pool
    from sglang.srt.speculative import eagle_utils, spec_utils

    reconstruct_tree.reconstruct_indices_from_tree_mask_func = drafts.describe_trees
    allocation.assign_req_to_token_pool_func = spec_utils.assign_req_to_token_pool_func = drafts.write_rows
    memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup = _move_by_torch
    spec_utils.fill_front_out_cache_loc_func = drafts.front_slots
    spec_utils.fill_accept_out_cache_loc_func = drafts.accepted_slots
    eagle_utils.verify_tree_greedy_func = drafts.verify_greedily
    eagle_utils._verify_uses_greedy = lambda **_: True
    if algorithm in DRAFT_MODELS:
        _install_draft_model()
    if algorithm == "DFLASH":
        _install_blocks()


def allow_overlap() -> None:
    """Called before SGLang resolves its settings. What it lacks for overlap scheduling on CPUs is here."""
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None


def _install_draft_model() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative import draft_utils, eagle_utils, eagle_worker_common, multi_layer_eagle_utils

    from sglang_triattn.patches.cpu import draft_model

    overlap_utils.gather_spec_extras = drafts.relayed
    eagle_utils.build_tree_kernel_efficient_func = drafts.build_trees
    eagle_worker_common.assign_draft_cache_locs_contiguous_func = drafts.slots_after
    eagle_worker_common.fill_bonus_tokens_func = drafts.last_accepted
    multi_layer_eagle_utils.rotate_input_ids = drafts.shift_inputs
    # Graphs for a draft model of several layers, which SGLang leaves out on its own CPU platform alone.
    envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.set(True)
    # SGLang declares its own backends.
    factory: Any = draft_utils.DraftBackendFactory
    factory.create_decode_backend = draft_model.for_drafts
    factory.create_draft_extend_backend = draft_model.for_verified
    _count_all_logits()
    # Some models wait for CUDA, GPU or not, when the target's embeddings are given to the draft model.
    setattr(torch.cuda, "synchronize", lambda device=None: None)  # noqa: B010


def _install_blocks() -> None:
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.speculative import dflash_utils

    memory_pool._set_kv_buffer_prefix_valid_impl = drafts.store_front
    dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE = False
    # By it, CUDA's allocator learns that a stream reads the lengths; on a CPU it raises.
    setattr(torch.Tensor, "record_stream", lambda self, stream: None)  # noqa: B010
    _keep_embeddings()


def _keep_embeddings() -> None:
    """Gives a draft model the served model's embeddings as they are, which SGLang rounds to bfloat16 for any model."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    with_rounded = ModelRunner._extend_forward_kwargs

    def with_own(self: ModelRunner, forward_batch: ForwardBatch, pp_proxy_tensors: object) -> dict[str, Any]:
        kwargs = with_rounded(self, forward_batch, pp_proxy_tensors)
        if self.is_draft_worker and forward_batch.input_embeds is not None:
            kwargs["input_embeds"] = forward_batch.input_embeds
        return kwargs

    setattr(ModelRunner, "_extend_forward_kwargs", with_own)  # noqa: B010


def _count_all_logits() -> None:
    """Has groups of ranks exchange the logits of all tokens that a draft model of several layers reads.

    SGLang computes them all there, as its graphs know, but without graphs counts one for each request.
    """
    from sglang.srt.speculative import multi_layer_eagle_worker_v2 as worker
    from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

    def all_counted(*, num_tokens_per_req: int, **others: Any) -> EagleDraftExtendInput:
        others["num_tokens_for_logprob_per_req"] = num_tokens_per_req
        return EagleDraftExtendInput(num_tokens_per_req=num_tokens_per_req, **others)

    setattr(worker, "EagleDraftExtendInput", all_counted)  # noqa: B010


def _move_by_torch(self: MHATokenToKVPool) -> None:
    """Has a pool move accepted tokens by SGLang's own torch path, in place of warming up a kernel."""
    self._kv_copy_config, self.use_native_move_kv_cache = None, True


def import_tree() -> Any:
    """SGLang's module `reconstruct_tree`, which imports compiled kernels everywhere but on an XPU."""
    from sglang.srt import utils

    is_xpu = utils.is_xpu
    utils.is_xpu = lambda: True
    try:
        return importlib.import_module("sglang.kernels.ops.speculative.reconstruct_tree")
    finally:
        utils.is_xpu = is_xpu
