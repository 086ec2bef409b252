"""What calibration takes as a query: SGLang's own RadixAttention hands it over, and only a finished one counts."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_triattn.calibration.job import CalibrationError
from sglang_triattn.patches.calibration.capture import capture
from sglang_triattn.patches.model.layers import AttentionLayer

HEADS, HEAD_DIM, TOKENS = 4, 8, 3


class Recorder:
    """Stands in for QuerySums."""

    def __init__(self) -> None:
        self.seen = []

    def add(self, layer, query, positions):
        self.seen.append((layer, query, positions))


class Backend:
    """Stands in for SGLang's attention backend."""

    def __init__(self) -> None:
        self.ran = 0

    def forward(self, q, *_, **__):
        self.ran += 1
        return q


def attend(query: torch.Tensor, **extra) -> tuple[Recorder, Backend]:
    """One call of a real attention layer while its queries are captured."""
    sums, backend = Recorder(), Backend()
    layer = RadixAttention(HEADS, HEAD_DIM, 1.0, HEADS, layer_id=2)
    # Some models move these while they run.
    forward = SimpleNamespace(
        positions=torch.arange(1, 1 + TOKENS), forward_mode=ForwardMode.EXTEND, global_num_token_non_padded_cpu=None
    )
    positions = torch.arange(5, 5 + TOKENS)
    key = torch.zeros(TOKENS, HEADS * HEAD_DIM)
    with forward_context(ForwardContext(backend)), capture([AttentionLayer(layer)], sums, lambda: positions):
        layer(query, key, key, forward, **extra)
    return sums, backend


def test_rotated_queries_are_taken_as_they_are():
    """Prevents heads, tokens or positions from being mixed up, and refusing what every model does."""
    query = torch.randn(TOKENS, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    sums, backend = attend(query, q_descale=None, return_lse=False)
    ((layer, taken, positions),) = sums.seen
    # The layer's place among those that are scored, not its number.
    assert (layer, backend.ran) == (0, 1)
    assert torch.equal(taken, query.view(TOKENS, HEADS, HEAD_DIM).transpose(0, 1))
    assert positions.tolist() == [5, 6, 7]


@pytest.mark.parametrize("name", ["q_descale", "q_rope", "cos_sin_cache", "mxfp8_norm_rope_positions"])
def test_queries_that_the_backend_finishes_are_refused(name):
    """Prevents statistics of queries that the backend still scales, norms or rotates."""
    refused(torch.zeros(TOKENS, HEADS * HEAD_DIM), f"with {name}", **{name: torch.ones(TOKENS)})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantised_queries_are_refused(dtype):
    """Prevents statistics of queries whose scales only the backend knows, like HunYuan V3's with FP8 attention."""
    refused(torch.zeros(TOKENS, HEADS * HEAD_DIM).to(dtype), f"as {str(dtype).removeprefix('torch.')}")


def refused(query: torch.Tensor, words: str, **extra) -> None:
    with pytest.raises(CalibrationError, match=words) as caught:
        attend(query, **extra)
    text = str(caught.value)
    assert text.startswith("The queries of layer 2 cannot be measured")
    assert "--attention-backend" in text
    assert "\n" not in text
    assert text.endswith(".")
