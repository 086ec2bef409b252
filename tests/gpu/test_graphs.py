"""A decode step captured before a round and replayed after it: slots, lengths and positions are read on replay.

On a CUDA device the step is a CUDA graph. Elsewhere there are no graphs, and the same step runs on the same static
buffers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paged_cases import GROUP, HEAD_DIM, LAYERS, PagedCase

LONGEST = 128


class Step:
    """Attention of one query per request, as SGLang captures it: every input lies in a permanent buffer."""

    def __init__(self, case: PagedCase) -> None:
        self._case = case
        requests = len(case.rows)
        whole = {"dtype": torch.int64, "device": case.device}
        self._rows = torch.zeros(requests, LONGEST, **whole)
        self._lengths = torch.ones(requests, **whole)
        self._positions = torch.zeros(requests, **whole)
        heads = case.k[0].shape[1] * GROUP
        self._queries = torch.zeros(LAYERS, requests, heads, HEAD_DIM, dtype=case.dtype, device=case.device)
        self._replay = captured(self._attend, case.device)

    def __call__(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[L, R, H_q, D] on the host. queries: of the same shape, before rotation; positions: [R], logical."""
        for request, row in enumerate(self._case.rows):
            self._rows[request, : len(row)].copy_(row)
        self._lengths.copy_(torch.tensor([len(row) for row in self._case.rows]))
        self._positions.copy_(positions)
        self._queries.copy_(queries)
        return self._replay().cpu()

    def _attend(self) -> torch.Tensor:
        queries = turned(self._queries, self._positions)
        there = torch.arange(LONGEST, device=self._rows.device) < self._lengths[:, None]
        answers = []
        for layer in range(LAYERS):
            keys, values = (
                buffer[layer][self._rows].repeat_interleave(GROUP, 2) for buffer in (self._case.k, self._case.v)
            )
            mask = there[:, :, None]
            scores = torch.einsum("rhd,rnhd->rnh", queries[layer], keys) / HEAD_DIM**0.5
            weights = scores.masked_fill(~mask, float("-inf")).softmax(1)
            # Slots without an owner hold NaN.
            answers.append(torch.einsum("rnh,rnhd->rhd", weights, values.masked_fill(~mask[..., None], 0)))
        return torch.stack(answers)


def captured(work: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """`work` as a CUDA graph, bound to the current addresses; unchanged where there are no graphs."""
    if device != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = work()

    def replay() -> torch.Tensor:
        graph.replay()
        return answer

    return replay


def turned(queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[L, R, H_q, D] queries rotated to their positions [R], in half style."""
    inv_freq = 1e4 ** (-torch.arange(HEAD_DIM // 2, device=queries.device) * 2 / HEAD_DIM)
    angles = (positions[:, None] * inv_freq)[None, :, None]
    one, other = queries.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


@pytest.mark.parametrize(
    ("strategy", "sets", "page_size"),
    [
        ("remap", "shared", 1),
        ("slide", "shared", 16),
        ("fill", "per-layer-head", 16),
        ("cut", "per-layer-head", 16),
        ("cut", "per-head", 1),
    ],
)
def test_a_step_captured_before_a_round(device, strategy, sets, page_size):
    """Prevents a captured graph from keeping the slots, lengths or positions that it was captured with."""
    case = PagedCase(device, torch.float32, page_size)
    logical = torch.tensor([len(row) for row in case.rows])
    step = Step(case)

    def error(positions: torch.Tensor) -> float:
        queries = case.queries([1, 1, 1])
        expected = case.expected(turned(queries, logical), [1, 1, 1])
        return (step(queries, positions).double() - expected).abs().amax().item()

    assert error(logical) < 1e-4
    for keep in (33, 22):
        case.compact(strategy, sets, keep)
        assert error(logical) < 1e-4
        physical = torch.tensor([len(row) for row in case.rows])
        assert not error(physical) < 0.01, "a query at its place in the row gives the same answer"
        case.append(5)
        logical += 5
        assert error(logical) < 1e-4
