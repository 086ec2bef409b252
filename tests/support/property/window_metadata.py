"""Checks what attention backends for CUDA plan for window layers, above all where drafted tokens are verified, or read
by a model's own draft layers.

As `target_metadata`, which it continues: not collected by itself, run by tests/slow/test_interpreted.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_spec

from cuda_backends import publish_settings, without_gpu
from draft_metadata import LISTING, Scene, assert_listed, assert_tables_equal, hooked, plan_graph, plan_now
from sets import matrix
from target_metadata import DRAFTED, MODES, assert_physical, plan, step

WINDOW = 10
REACH = WINDOW - 1
# Window layers' K/V in the pool of the other layers, and in one of their own.
POOLS = {"one pool": 0, "own pool": WINDOW}
BACKENDS = ("triton", "fa3", "trtllm_mha")
VERIFYING = ("verify", "verify ngram")
# What draft layers do with the tokens that were just verified.
READING = (*VERIFYING, "draft extend")


@pytest.fixture(scope="module", autouse=True)
def no_gpu():
    publish_settings()
    with without_gpu():
        yield


def scene_of(pool: str) -> Scene:
    lengths = {"budget": 24, "interval": 8, "recent": 14, "pool": 320, "reserve": 2 * DRAFTED}
    return Scene(1, REACH, window=POOLS[pool], **lengths)


def slots_of(scene: Scene, first: int, end: int) -> torch.Tensor:
    """[3, end - first] int64: where window layers find the entries from `first` to `end` of each row, counted from the
    row's length."""
    columns = scene.lengths.unsqueeze(1) + torch.arange(first, end)
    slots = scene.sim.rows.req_to_token[scene.rows.unsqueeze(1), columns].long()
    return scene.sim.allocator.full_to_swa_index_mapping[slots] if scene.sim.window else slots


def verified(scene: Scene, name: str, mode: str) -> Any:
    """What the backend plans for window layers in such a step."""
    return plan(scene, name, mode, scene.evicted)


@pytest.mark.parametrize(("name", "pool", "mode"), matrix([*BACKENDS, "flashinfer"], [*POOLS], MODES, strength=1))
def test_plans_do_not_follow_positions(name, pool, mode):
    """Prevents a window layer from reading as many slots as a request has tokens."""
    assert_physical(scene_of(pool), name, mode)


@pytest.mark.parametrize("mode", READING)
@pytest.mark.parametrize("pool", POOLS)
def test_triton_reads_the_newest_tokens(pool, mode):
    """Prevents drafted tokens from being verified or read with others than a window's newest, or in the wrong pool."""
    scene = scene_of(pool)
    assert_newest_listed(scene, verified(scene, "triton", mode).forward_metadata)


def assert_newest_listed(scene: Scene, found: Any) -> None:
    """What Triton's attention reads before the tokens of the step is each window's newest, in the right pool."""
    count = len(scene.lengths)
    assert found.window_kv_indptr[: count + 1].tolist() == [REACH * number for number in range(count + 1)]
    assert torch.equal(found.window_kv_indices[: count * REACH].view(count, REACH), slots_of(scene, -REACH, 0))
    # Where the mask of drafted tokens has the window's first one.
    assert torch.equal(found.window_kv_offsets[:count], scene.lengths - REACH)
    if scene.sim.window:
        assert torch.equal(found.swa_out_cache_loc.view(count, DRAFTED), slots_of(scene, 0, DRAFTED))


@pytest.mark.parametrize("mode", READING)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", ["fa3", "trtllm_mha"])
def test_tables_hold_the_newest_tokens(name, pool, mode):
    """Prevents the same of backends whose kernels cut a window out of a table by the row's length."""
    scene = scene_of(pool)
    assert_newest_in_table(scene, verified(scene, name, mode).forward_metadata)


def assert_newest_in_table(scene: Scene, found: Any) -> None:
    """A window that ends at the row's length shows its newest tokens, in the right pool."""
    table = found.swa_page_table if scene.sim.window else found.page_table
    ends = (scene.lengths + DRAFTED).tolist()
    assert found.cache_seqlens_int32.tolist() == ends
    held = torch.stack([row[end - DRAFTED - REACH : end] for row, end in zip(table.long(), ends, strict=True)])
    assert torch.equal(held, slots_of(scene, -REACH, DRAFTED))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", BACKENDS)
def test_graphs_of_draft_layers_read_the_newest_tokens(name, pool):
    """Prevents draft layers with a window from reading others than its newest where graphs replay their steps."""
    scene = scene_of(pool)
    backend = planned_for_graph(scene, name)
    # Some backends plan within the graph alone.
    backend.init_forward_metadata_in_graph(reading_step(scene))
    (assert_newest_listed if name == "triton" else assert_newest_in_table)(scene, backend.forward_metadata)


def planned_for_graph(scene: Scene, name: str) -> Any:
    """The backend, once it has planned what draft layers do, for a graph and for its replay."""
    count = len(scene.lengths)
    backend = verified(scene, name, "draft extend")
    backend.init_cuda_graph_state(count, count * DRAFTED)
    for in_capture in (True, False):
        backend.init_forward_metadata_out_graph(reading_step(scene), in_capture=in_capture)
    return backend


def reading_step(scene: Scene) -> ForwardBatch:
    """What draft layers do, as SGLang's runner of graphs has it."""
    forward = step(scene, "draft extend", scene.evicted)
    forward.spec_info.extend_seq_lens_tensor = forward.extend_seq_lens
    return forward


@pytest.mark.parametrize("pool", POOLS)
def test_tables_of_trees_hold_the_newest_tokens(pool):
    """Prevents the same where drafts are trees: each drafted token has a table of its own."""
    scene = scene_of(pool)
    with get_spec().override(speculative_eagle_topk=2):
        found = verified(scene, "fa3", "verify ngram").forward_metadata.swa_spec_metadata
    ends = (scene.lengths + DRAFTED).repeat_interleave(DRAFTED).tolist()
    # Each of them sees all others here.
    assert found.cache_seqlens_int32.tolist() == ends
    held = torch.stack([row[end - DRAFTED - REACH : end] for row, end in zip(found.page_table, ends, strict=True)])
    assert torch.equal(held.long(), slots_of(scene, -REACH, DRAFTED).repeat_interleave(DRAFTED, 0))


@pytest.mark.parametrize("mode", VERIFYING)
@pytest.mark.parametrize("pool", POOLS)
def test_flashinfer_reads_the_oldest_tokens(pool, mode):
    """Prevents its refusal from outliving the reason: SGLang gives it as many slots as a window has, but from the start
    of the row."""
    scene = scene_of(pool)
    backend = verified(scene, "flashinfer", mode)
    assert_oldest(scene, backend.prefill_wrappers_verify[0])


@pytest.mark.parametrize("pool", POOLS)
def test_flashinfer_reads_the_oldest_tokens_in_graphs_of_draft_layers(pool):
    """Prevents the same of draft layers with a window, for which it plans rightly without a graph alone."""
    scene = scene_of(pool)
    graphs = planned_for_graph(scene, "flashinfer").draft_extend_cuda_graph_metadata
    assert_oldest(scene, graphs[len(scene.lengths)][0])


def assert_oldest(scene: Scene, windows: Any) -> None:
    """This wrapper of FlashInfer was planned for the window layers, with each row's first tokens."""
    _, indptr, indices, *_ = windows.begin_forward.mock_calls[-1].args
    assert indptr.tolist() == [(REACH + DRAFTED) * number for number in range(len(scene.lengths) + 1)]
    read = indices[: indptr[-1]].view(len(scene.lengths), -1).long()
    oldest = scene.sim.rows.req_to_token[scene.rows, : REACH + DRAFTED].long()
    oldest = scene.sim.allocator.full_to_swa_index_mapping[oldest] if scene.sim.window else oldest
    assert torch.equal(read, oldest)
    assert not torch.equal(read[:, :REACH], slots_of(scene, -REACH, 0))


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_a_draft_model_reads_the_slots_of_rows(name, graph):
    """Prevents a draft model, which has no window, from reading slots of its target's window layers."""
    assert_listed(scene_of("own pool"), name, graph=graph)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_draft_model_with_a_window_reads_the_newest_of_rows(graph, pool):
    """Prevents layers of a draft model with `--speculative-draft-window-size` from reading slots that a round freed, or
    those of its target's window layers."""
    scene = scene_of(pool)
    backend = scene.backend("triton", LISTING, REACH)
    with hooked():
        (plan_graph if graph else plan_now)(backend, scene.batch(scene.evicted))
    for number, inner in enumerate(backend.attn_backends):
        ends, slots = scene.expected(number)
        newest = [slots[end - REACH : end] for end in ends[1:]]
        indptr, indices = inner.in_windows
        assert indptr[: len(ends)].tolist() == [REACH * count for count in range(len(ends))]
        assert indices[: indptr[len(newest)]].tolist() == [slot for row in newest for slot in row]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["fa3", "trtllm_mha"])
def test_tables_of_a_draft_model(name, graph):
    """Prevents the same of backends that plan with tables, and tables by logical lengths."""
    assert_tables_equal(scene_of("own pool"), name, graph=graph)
