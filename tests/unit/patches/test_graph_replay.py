"""What SGLang's decode graph reads on replay: its own static buffers, filled after the hook on positions."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_triattn.patches.request.positions import _use_logical_positions

GRAPH_SIZE = 4


def forward_batch(physical: list[int], logical: list[int]) -> ForwardBatch:
    """A decode step as SGLang builds it from rows of these lengths, this step's token included, after the hook."""
    lengths = torch.tensor(physical)
    count = len(physical)
    forward = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=count,
        input_ids=torch.arange(100, 100 + count),
        req_pool_indices=torch.arange(1, 1 + count),
        seq_lens=lengths,
        out_cache_loc=torch.arange(50, 50 + count),
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths,
        positions=lengths - 1,
    )
    batch = SimpleNamespace(seq_lens=lengths, orig_seq_lens=torch.tensor(logical, dtype=torch.int32), spec_info=None)
    _use_logical_positions(forward, ForwardBatch, batch)
    return forward


@pytest.fixture
def registry():
    """The static buffers of a decode graph for GRAPH_SIZE requests."""
    return build_decode_registry(
        device=torch.device("cpu"),
        max_bs=GRAPH_SIZE,
        max_num_token=GRAPH_SIZE,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        share_pool=False,
    )


def test_a_graph_captured_before_a_round_replays_logical_positions(registry):
    """Prevents a captured graph from rotating by physical positions, or attending over evicted tokens."""
    buffers = {name: registry.get_slot(name).buffer for name in ("positions", "seq_lens", "input_ids")}
    sizes = {"raw_bs": 3, "padded_bs": GRAPH_SIZE, "raw_num_tokens": 3, "padded_num_tokens": GRAPH_SIZE}
    registry.fill_from(forward_batch([97, 60, 7], [97, 60, 7]), **sizes)
    assert buffers["positions"].tolist() == [96, 59, 6, 0]
    # The first request has just had a round, the second had one some time ago.
    registry.fill_from(forward_batch([66, 61, 8], [98, 161, 8]), **sizes)
    assert buffers["positions"].tolist() == [97, 160, 7, 0]
    assert buffers["seq_lens"].tolist() == [66, 61, 8, 1]
    assert all(registry.get_slot(name).buffer is buffer for name, buffer in buffers.items())


def test_a_step_planned_before_its_inputs_are_copied(registry):
    """Prevents the graph's other route to its inputs, the copy on replay itself, from using other positions."""
    static = SimpleNamespace(**{name: registry.get_slot(name).buffer for name in ("positions", "input_ids")})
    runner = SimpleNamespace(buffers=static, raw_num_token=2, _prefilled_inputs=None)
    DecodeCudaGraphRunner._copy_replay_inputs(runner, forward_batch([66, 61], [98, 161]))
    assert static.positions.tolist() == [97, 160, 0, 0]
