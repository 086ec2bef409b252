"""Checks what the attention of a draft model plans with after a round: the same as for rows that never were longer.

SGLang's own backends for CUDA plan the steps of a draft here, eagerly and for a graph. Not collected by itself, because
of their Triton kernels: tests/slow/test_interpreted.py runs it in a process with Triton's interpreter.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_draft_cuda_graph_runner import EAGLEDraftCudaGraphRunner
from sglang.srt.speculative.eagle_info import EagleDraftInput

from checks import decode_together
from cuda_backends import FOLDER, STEPS, drafting, planned, publish_settings, runner_of, seeing, without_gpu
from sets import matrix
from sglang_triattn.patches.hooks.hook import resolve
from sglang_triattn.patches.request import draft_steps
from simulation import Simulation

# Requests of a captured graph, more than there are.
GRAPH_SIZE = 4
# Those that list slots one by one, and those that plan with a table of pages.
LISTING = {
    "flashinfer": "flashinfer_backend.FlashInferMultiStepDraftBackend",
    "flashinfer latent": "flashinfer_mla_backend.FlashInferMLAMultiStepDraftBackend",
    "triton": "triton_backend.TritonMultiStepDraftBackend",
    "triton latent": "triton_backend.TritonMultiStepDraftBackend",
}
PAGED = {
    "fa3": "flashattention_backend.FlashAttentionMultiStepBackend",
    "fa3 latent": "flashattention_backend.FlashAttentionMultiStepBackend",
    "flashmla latent": "flashmla_backend.FlashMLAMultiStepDraftBackend",
    "trtllm_mha": "trtllm_mha_backend.TRTLLMHAAttnMultiStepDraftBackend",
    "trtllm_mla latent": "trtllm_mla_backend.TRTLLMMLAMultiStepDraftBackend",
    "cutedsl_mla latent": "cutedsl_mla_backend.CuteDslMLAMultiStepDraftBackend",
}


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    publish_settings()
    with without_gpu():
        yield


@contextmanager
def hooked() -> Iterator[None]:
    """While open, the hooks of `draft_steps` are in place."""
    with ExitStack() as stack:
        for hook in draft_steps.hooks():
            module, owner, name = hook.target.rsplit(".", 2)
            around = _around(hook.function, resolve(hook.target))
            stack.enter_context(mock.patch.object(getattr(importlib.import_module(module), owner), name, around))
        yield


def _around(function: Any, original: Any) -> Any:
    return lambda *args, **kwargs: function(original, *args, **kwargs)


class Scene:
    """Three requests, all of which have had rounds, with slots for drafts after their rows.

    Args:
        reach: tokens before its own that a query of a window layer sees; None without such layers.
        branches: tokens that each step drafts.
        sees: of a row, how many of the newest tokens the draft model sees, and how many of the first; 0 for all.
        settings: of the Simulation, in addition.

    Attributes:
        lengths, evicted: [3] int64.
    """

    def __init__(
        self,
        page_size: int,
        reach: int | None = None,
        branches: int = 1,
        sees: tuple[int, int] = (0, 0),
        **settings: int,
    ) -> None:
        self.reach, self.branches, self.sees = reach, branches, sees
        # Of each branch, the pages that its tokens may touch.
        drafted = (branches - 1) * (STEPS + 2 * (page_size - 1)) + STEPS + 1
        self.sim = sim = Simulation(page_size, **{"reserve": drafted + drafted % 2, **settings})
        running = [sim.request([5] * 8 + [tail] * (1 + 3 * tail)) for tail in range(3)]
        for request in running:
            assert sim.admit(request, 1000)
        decode_together(sim, running, 40)
        self.lengths = sim.compress().seq_lens
        self.evicted = torch.tensor([request.evicted for request in running])
        self.rows = torch.tensor([request.req.kv.req_pool_idx for request in running])
        assert self.evicted.all()

    def batch(self, shift: torch.Tensor) -> ForwardBatch:
        """The step that drafts, with positions `shift` above the rows' lengths."""
        count = len(self.lengths)
        forward = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=count,
            input_ids=None,
            req_pool_indices=self.rows,
            seq_lens=self.lengths,
            out_cache_loc=self.drafted().flatten(),
            seq_lens_sum=int(self.lengths.sum()),
            seq_lens_cpu=self.lengths,
            positions=(self.lengths + shift).repeat_interleave(self.branches),
            spec_info=EagleDraftInput(
                torch.zeros(count, self.branches), torch.zeros(count, self.branches, dtype=torch.int64)
            ),
        )
        forward.kv_loc_plan = self.plan(self.lengths)
        return forward

    def plan(self, lengths: torch.Tensor, written: torch.Tensor | None = None) -> Any:
        """SGLang's plan of where rows of these lengths are read, and of the slots that are written."""
        return self.runner().kv_index_translator.plan(
            req_pool_indices=self.rows, seq_lens=lengths, seq_lens_cpu=lengths, write_virtual=written
        )

    def runner(self, *, latent: bool = False) -> SimpleNamespace:
        """What the served model's backend reads of SGLang's ModelRunner."""
        return runner_of(self.sim, latent=latent, reach=self.reach)

    def backend(self, name: str, names: dict[str, str], reach: int | None = None) -> Any:
        """One of the backends for the steps of a draft.

        Args:
            reach: tokens before its own that a query of the draft model sees; None for all.
        """
        module, owner = names[name].rsplit(".", 1)
        runner = runner_of(self.sim, latent="latent" in name, draft=True, reach=reach)
        return getattr(importlib.import_module(f"{FOLDER}.{module}"), owner)(runner, self.branches, STEPS)

    def drafted(self) -> torch.Tensor:
        """[3, branches, STEPS] int64: the slots of drafted tokens. In pages, those of a branch begin with one in which
        the row's last page, where it is not full, is repeated; else they follow one another."""
        size = self.sim.page_size
        spare = self.lengths % size if self.branches > 1 else torch.zeros_like(self.lengths)
        width = (spare + STEPS + size - 1) // size * size if self.branches > 1 and size > 1 else torch.tensor(STEPS)
        first = self.lengths[:, None] + torch.arange(self.branches) * width.view(-1, 1)
        columns = (first[..., None] + torch.arange(STEPS)).flatten(1)
        return self.sim.rows.req_to_token[self.rows[:, None], columns].long().view(-1, self.branches, STEPS)

    def expected(self, step: int) -> tuple[list[int], list[int]]:
        """indptr and indices of a step: for each branch, its row's entries and the slots of its tokens so far; of a row
        that the draft model does not see whole, its first entries and its newest."""
        table, found = self.sim.rows.req_to_token, []
        newest, sinks = self.sees
        for row, length, branches in zip(self.rows, self.lengths, self.drafted(), strict=True):
            seen = table[row, :length]
            if newest and length > newest + sinks:
                seen = torch.cat([seen[:sinks], seen[length - newest :]])
            found += [torch.cat([seen, slots[: step + 1]]) for slots in branches]
        ends = torch.tensor([len(slots) for slots in found]).cumsum(0).tolist()
        return [0, *ends], torch.cat(found).tolist()


def plan_now(backend: Any, forward: ForwardBatch) -> None:
    """Plans for a draft without a graph; each step's lists are kept as `listed` of its backend, those of a draft model
    with windows as `in_windows`."""
    for inner in backend.attn_backends:
        plan = inner.init_forward_metadata

        def keep(batch, inner=inner, plan=plan):
            info = batch.spec_info
            if info.kv_indices is not None:
                inner.listed = [info.kv_indptr.clone(), info.kv_indices.clone()]
            if info.window_kv_indices is not None:
                inner.in_windows = [info.window_kv_indptr.clone(), info.window_kv_indices.clone()]
            plan(batch)

        inner.init_forward_metadata = keep
    backend.init_forward_metadata(forward)


def plan_graph(backend: Any, forward: ForwardBatch) -> torch.Tensor:
    """Plans for a draft by a captured graph for GRAPH_SIZE requests, by SGLang's runner of such graphs.

    Returns:
        The positions that the graph rotates by.
    """
    runner = draft_runner(backend)
    backend.init_cuda_graph_state(GRAPH_SIZE, GRAPH_SIZE * backend.topk)
    fill = backend.attn_backends[0].get_cuda_graph_seq_len_fill_value()
    runner.seq_len_fill_value = fill
    lengths = torch.full((GRAPH_SIZE,), fill)
    captured = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=GRAPH_SIZE,
        input_ids=None,
        req_pool_indices=runner.buffers.req_pool_indices,
        seq_lens=runner.buffers.seq_lens.copy_(lengths),
        out_cache_loc=runner.buffers.out_cache_loc,
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths,
        positions=runner.buffers.positions,
        spec_info=EagleDraftInput(runner.buffers.topk_p, runner.buffers.topk_index),
    )
    backend.attn_backends[0].kv_index_translator.bind_runner_slots(captured)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    backend.init_forward_metadata_in_graph(captured)
    runner.execute(forward)
    backend.init_forward_metadata_in_graph(captured)
    for step, inner in enumerate(backend.attn_backends):
        if hasattr(backend, "cuda_graph_kv_indices"):
            inner.listed = [backend.kv_indptr[step].clone(), backend.cuda_graph_kv_indices[step].clone()]
        if getattr(backend, "window_rail", False):
            lists = backend.window_kv_indptr, backend.cuda_graph_window_kv_indices
            inner.in_windows = [each[step].clone() for each in lists]
    return runner.buffers.positions.clone()


def draft_runner(backend: Any) -> EAGLEDraftCudaGraphRunner:
    """SGLang's runner with its buffers, as captured, but for the graphs themselves."""
    runner, branches = EAGLEDraftCudaGraphRunner.__new__(EAGLEDraftCudaGraphRunner), backend.topk
    whole = {"dtype": torch.int64}
    absent = ("rids_int", "bootstrap_room_ids_int", "draft_probs", "sampling_seed", "hidden_states", "dsa_seed_topk")
    runner.buffers = SimpleNamespace(
        seq_lens=torch.ones(GRAPH_SIZE, **whole),
        seq_lens_cpu=torch.ones(GRAPH_SIZE, **whole),
        out_cache_loc=torch.zeros(GRAPH_SIZE * branches * STEPS, **whole),
        positions=torch.zeros(GRAPH_SIZE * branches, **whole),
        topk_p=torch.zeros(GRAPH_SIZE, branches),
        topk_index=torch.zeros(GRAPH_SIZE, branches, **whole),
        req_pool_indices=torch.zeros(GRAPH_SIZE, **whole),
        **dict.fromkeys(absent),
    )
    runner.deepep_adapter = mock.MagicMock()
    runner.captured_req_width, runner.capture_bs = branches, [GRAPH_SIZE]
    runner.speculative_num_steps = STEPS
    runner.require_mlp_tp_gather = runner.require_gathered_buffer = False
    model = SimpleNamespace(model_is_mrope=False, vocab_size=100)
    runner.model_runner = SimpleNamespace(model_config=model, device_timer=None)
    runner.draft_attn_backend = backend
    runner._replay_graph = lambda *_: [None] * 4
    return runner


@pytest.mark.parametrize(("name", "graph", "page_size"), matrix([*LISTING], [False, True], [1, 4]))
def test_steps_read_the_shortened_rows(name, graph, page_size):
    """Prevents a draft model from reading slots of other requests, or past the end of the list: SGLang's kernel
    takes positions for the lengths of rows."""
    assert_listed(Scene(page_size), name, graph=graph)


def assert_listed(scene: Scene, name: str, *, graph: bool) -> None:
    """Holds what one of LISTING plans to the rows."""
    for shift, hooks in ((scene.evicted, hooked()), (torch.zeros_like(scene.evicted), nullcontext())):
        backend = scene.backend(name, LISTING)
        with hooks:
            (plan_graph if graph else plan_now)(backend, forward := scene.batch(shift))
        logical = (scene.lengths + shift).repeat_interleave(scene.branches)
        assert torch.equal(forward.positions, logical), "the model's own positions are logical"
        for step, inner in enumerate(backend.attn_backends):
            indptr, indices = scene.expected(step)
            found = [each.tolist() for each in inner.listed]
            assert found[0][: len(indptr)] == indptr
            assert found[1][: indptr[-1]] == indices
            if graph:
                # The row that pads the batch: no positions, and the tokens that would be drafted.
                assert found[0][len(indptr)] == indptr[-1] + step + 1


@pytest.mark.parametrize(
    ("name", "graph", "page_size"), matrix(["flashinfer", "triton", "triton latent"], [False, True], [1, 4])
)
def test_steps_of_branches_read_the_shortened_rows(name, graph, page_size):
    """Prevents a branch of a draft that reads another's tokens, or another request's."""
    with drafting(2, page_size):
        assert_listed(Scene(page_size, branches=2), name, graph=graph)


@pytest.mark.parametrize(
    ("name", "graph", "branches"), matrix(["flashinfer", "triton", "triton latent"], [False, True], [1, 2])
)
def test_steps_read_the_newest_of_shortened_rows(name, graph, branches):
    """Prevents a draft model that sees the newest tokens alone from seeing them where they stood before a round."""
    with drafting(branches), seeing(9, 3):
        scene = Scene(1, branches=branches, sees=(9, 3))
        assert min(scene.lengths) > 12
        assert_listed(scene, name, graph=graph)


@pytest.mark.parametrize("name", LISTING)
def test_they_would_not_without_the_hooks(name):
    """Prevents the test before this one from passing without the hooks."""
    scene = Scene(1)
    backend = scene.backend(name, LISTING)
    plan_now(backend, scene.batch(scene.evicted))
    assert backend.attn_backends[0].listed[0].tolist() != scene.expected(0)[0]


@pytest.mark.parametrize(("name", "graph", "page_size"), matrix([*PAGED], [False, True], [1, 4]))
def test_tables_do_not_follow_positions(name, graph, page_size):
    """Prevents the other backends from planning with logical lengths, which they too find in the batch."""
    assert_tables_equal(Scene(page_size), name, graph=graph)


def assert_tables_equal(scene: Scene, name: str, *, graph: bool) -> None:
    """Holds what one of PAGED plans at logical positions to what it plans at physical ones."""
    plans = []
    for shift in (scene.evicted, torch.zeros_like(scene.evicted)):
        backend = scene.backend(name, PAGED)
        with hooked():
            (plan_graph if graph else plan_now)(backend, scene.batch(shift))
        plans.append([planned(inner) for inner in backend.attn_backends])
    for found, expected in zip(*plans, strict=True):
        assert found.keys() == expected.keys()
        assert found
        for place, tensor in expected.items():
            assert torch.equal(found[place], tensor), place


@pytest.mark.parametrize(("name", "graph", "page_size"), matrix(["fa3", "fa3 latent"], [False, True], [1, 4]))
def test_tables_of_branches_do_not_follow_positions(name, graph, page_size):
    """Prevents the same where drafts branch."""
    with drafting(2, page_size):
        assert_tables_equal(Scene(page_size, branches=2), name, graph=graph)


@pytest.mark.parametrize("name", PAGED)
def test_tables_follow_lengths(name):
    """Prevents the test before this one from passing because it looks at nothing."""
    scene = Scene(1)
    backend, other = scene.backend(name, PAGED), scene.backend(name, PAGED)
    plan_now(backend, scene.batch(scene.evicted))
    scene.lengths = scene.lengths + scene.evicted
    plan_now(other, scene.batch(torch.zeros_like(scene.evicted)))
    found, logical = planned(backend.attn_backends[0]), planned(other.attn_backends[0])
    assert any(not torch.equal(found[place], logical[place]) for place in found)


def test_a_graph_still_rotates_by_logical_positions():
    """Prevents a hook that leaves physical positions in a graph's buffer, by which the draft model rotates."""
    scene = Scene(1)
    backend = scene.backend("triton", LISTING)
    with hooked():
        positions = plan_graph(backend, scene.batch(scene.evicted))
    assert positions.tolist() == [*(scene.lengths + scene.evicted).tolist(), 0]
