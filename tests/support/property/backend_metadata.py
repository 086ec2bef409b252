"""Checks what attention backends plan with after a round: the same as for a request that never was longer.

SGLang's own index builders run on rows and lengths as a round leaves them. Not collected by itself, because they are
Triton kernels: tests/slow/test_interpreted.py runs it in a process with Triton's interpreter.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

from checks import decode_together
from content import KV_HEADS, Q_HEADS
from simulation import Simulation


def metadata(sim: Simulation, rows: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    """indptr and indices, which FlashInfer's and Triton's backends both build, and the plan of Triton's split.

    Args:
        rows: [rows, context] int32, slots.
        requests: [R] int64, indices into `rows`.
        lengths: [R] int64.
    """
    translator = KVIndexTranslator(
        req_to_token=rows,
        token_to_kv_pool_allocator=sim.allocator,
        token_to_kv_pool=sim.pool,
        page_size=sim.page_size,
        device="cpu",
        is_draft_worker=False,
    )
    plan = translator.plan(req_pool_indices=requests, seq_lens=lengths, seq_lens_cpu=lengths, write_virtual=None)
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indices = torch.full((int(lengths.sum()),), -1, dtype=torch.int32)
    backend = SimpleNamespace(kv_index_translator=translator)
    TritonAttnBackend._fill_kv_indptr_and_indices(backend, plan, len(lengths), lengths, requests, indices, indptr)
    splits = torch.zeros(len(lengths), dtype=torch.int32)
    get_num_kv_splits_triton[(1,)](splits, lengths, len(lengths), 1, Q_HEADS, KV_HEADS, 16, 132, MAX_NUM_SEQ=256)
    return [indptr, indices, splits]


@pytest.mark.parametrize("selection", ["shared-mean", "per-layer-head"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_metadata_is_that_of_the_physical_length(page_size, selection):
    """Prevents a backend from reading evicted slots, another request's slots, or as many as the logical length."""
    sim = Simulation(page_size, selection=selection)
    running = [sim.request([5] * 8 + [tail] * (1 + 3 * tail)) for tail in range(3)]
    for request in running:
        assert sim.admit(request, 1000)
    decode_together(sim, running, 40)
    batch = sim.compress()
    assert all(request.evicted for request in running)
    requests = torch.tensor([request.req.kv.req_pool_idx for request in running])
    found = metadata(sim, sim.rows.req_to_token, requests, batch.seq_lens)

    # The same slots, in rows of requests that never were longer.
    fresh = torch.full_like(sim.rows.req_to_token, -1)
    others = torch.arange(len(running)).flip(0)
    held = [sim.row(request) for request in running]
    for row, slots in zip(others, held, strict=True):
        fresh[row, : len(slots)] = slots
    expected = metadata(sim, fresh, others, torch.tensor([len(slots) for slots in held]))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found[1], torch.cat(held))
    # torch_native reads the row up to the length.
    for request, length, slots in zip(requests, batch.seq_lens_cpu, held, strict=True):
        assert torch.equal(sim.rows.req_to_token[request, :length], slots)
