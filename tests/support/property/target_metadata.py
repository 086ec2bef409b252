"""Checks that no attention backend for CUDA plans a step of the served model with logical positions.

SGLang's own backends plan each kind of step twice here, for a batch with logical positions and for the same rows as if
they had never been longer. Not collected by itself, because of their Triton kernels: tests/slow/test_interpreted.py
runs it in a process with Triton's interpreter.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from cuda_backends import FOLDER, STEPS, drafting, planned, publish_settings, without_gpu
from draft_metadata import Scene
from sets import matrix

BACKENDS = {
    "triton": "triton_backend.TritonAttnBackend",
    "flashinfer": "flashinfer_backend.FlashInferAttnBackend",
    "fa3": "flashattention_backend.FlashAttentionBackend",
    "trtllm_mha": "trtllm_mha_backend.TRTLLMHAAttnBackend",
    "triton latent": "triton_backend.TritonAttnBackend",
    "flashinfer latent": "flashinfer_mla_backend.FlashInferMLAAttnBackend",
    "fa3 latent": "flashattention_backend.FlashAttentionBackend",
    "flashmla latent": "flashmla_backend.FlashMLABackend",
    "trtllm_mla latent": "trtllm_mla_backend.TRTLLMMLABackend",
    "cutedsl_mla latent": "cutedsl_mla_backend.CuteDslMLABackend",
}
# Tokens that each request computes in a step that verifies drafts or reads those that hold, and in a prefill chunk.
DRAFTED, CHUNK = STEPS + 1, 3
# Plan a chunk by its own tokens alone; the prefix is read in chunks of another function.
OWN_TOKENS = {("trtllm_mla latent", "prefill"), ("cutedsl_mla latent", "prefill")}
MODES = ("decode", "prefill", "verify", "verify ngram", "draft extend")


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    publish_settings()
    with without_gpu():
        yield


def step(scene: Scene, mode: str, shift: torch.Tensor) -> ForwardBatch:
    """A step of this kind, with positions `shift` above the rows' places."""
    lengths, count = scene.lengths, len(scene.lengths)
    new = {"decode": 1, "prefill": CHUNK}.get(mode, DRAFTED)
    places = (lengths.unsqueeze(1) - int(mode == "decode") + torch.arange(new)).flatten()
    slots = scene.sim.rows.req_to_token[scene.rows.repeat_interleave(new), places]
    positions = places + shift.repeat_interleave(new)
    before = lengths
    if mode in ("prefill", "draft extend"):
        lengths = lengths + new
    forward = ForwardBatch(
        forward_mode={
            "decode": ForwardMode.DECODE,
            "prefill": ForwardMode.EXTEND,
            "draft extend": ForwardMode.DRAFT_EXTEND_V2,
        }.get(mode, ForwardMode.TARGET_VERIFY),
        batch_size=count,
        input_ids=torch.zeros(count * new, dtype=torch.int64),
        req_pool_indices=scene.rows,
        seq_lens=lengths,
        out_cache_loc=slots.long(),
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths,
        positions=positions,
        spec_info=spec_info(mode, before, positions),
    )
    if mode in ("prefill", "draft extend"):
        forward.extend_num_tokens = count * new
        forward.extend_seq_lens = torch.full((count,), new, dtype=torch.int32)
        forward.extend_prefix_lens = before.int()
        forward.extend_start_loc = torch.arange(count, dtype=torch.int32) * new
        forward.extend_seq_lens_cpu, forward.extend_prefix_lens_cpu = [new] * count, before.tolist()
    forward.kv_loc_plan = scene.plan(lengths, forward.out_cache_loc)
    return forward


def spec_info(mode: str, lengths: torch.Tensor, positions: torch.Tensor) -> Any:
    count = len(lengths)
    mask = torch.ones(int(lengths.sum()) * DRAFTED + count * DRAFTED**2, dtype=torch.bool)
    if mode == "verify":
        return EagleVerifyInput(
            draft_token=torch.zeros(count * DRAFTED, dtype=torch.int64),
            custom_mask=mask,
            positions=positions,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=STEPS,
            topk=get_spec().speculative_eagle_topk,
            draft_token_num=DRAFTED,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
        )
    if mode == "verify ngram":
        return NgramVerifyInput(
            torch.zeros(count * DRAFTED, dtype=torch.int64), mask, positions, None, None, None, DRAFTED
        )
    if mode == "draft extend":
        accepted = torch.full((count,), DRAFTED, dtype=torch.int32)
        return EagleDraftExtendInput(
            num_correct_drafts=accepted - 1, num_accept_tokens=accepted, num_tokens_per_req=DRAFTED
        )
    return None


def plan(scene: Scene, name: str, mode: str, shift: torch.Tensor) -> Any:
    """The backend, once it has planned such a step."""
    module, owner = BACKENDS[name].rsplit(".", 1)
    backend = getattr(importlib.import_module(f"{FOLDER}.{module}"), owner)(scene.runner(latent="latent" in name))
    backend.init_forward_metadata(step(scene, mode, shift))
    return backend


@pytest.mark.parametrize(("name", "mode"), matrix([*BACKENDS], MODES, strength=1))
def test_plans_do_not_follow_positions(name, mode):
    """Prevents a backend from reading as many slots as a request has tokens: what it plans with follows from physical
    lengths, at any positions in the batch."""
    assert_physical(Scene(1), name, mode)


@pytest.mark.parametrize(
    ("name", "page_size", "mode"),
    matrix(["triton", "flashinfer", "fa3", "triton latent", "fa3 latent"], [1, 4], ["verify", "draft extend"]),
)
def test_plans_of_branches_do_not_follow_positions(name, page_size, mode):
    """Prevents the same where drafts branch, whose masks begin where a row's length says."""
    with drafting(2, page_size):
        assert_physical(Scene(page_size, branches=2), name, mode)


def assert_physical(scene: Scene, name: str, mode: str) -> None:
    logical = planned(plan(scene, name, mode, scene.evicted))
    physical = planned(plan(scene, name, mode, torch.zeros_like(scene.evicted)))
    assert logical.keys() == physical.keys()
    assert logical
    for place, tensor in physical.items():
        assert torch.equal(logical[place], tensor), place
    if (name, mode) in OWN_TOKENS:
        return
    scene.lengths = scene.lengths + 1
    longer = planned(plan(scene, name, mode, torch.zeros_like(scene.evicted)))
    assert any(not torch.equal(longer[place], tensor) for place, tensor in physical.items() if place in longer)
