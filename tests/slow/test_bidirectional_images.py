"""What SGLang's Triton prefill makes of a mask that lets an image's tokens see one another, as Gemma-3 asks for."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")

PROBE = """
import torch
from sglang.kernels.ops.attention import extend_attention

torch.manual_seed(0)
tokens, width, block = 160, 16, 64
extend_attention._get_block_sizes_for_extend_attention = lambda *_: (width, 0, width, block, block, 4)
q, k, v, answers = (torch.randn(tokens, 1, width) for _ in range(4))
seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
seen[20:140, 20:140] = True
nothing, indices = torch.zeros(1, 1, width), torch.zeros(0, dtype=torch.int64)
whole, none = (torch.tensor([0, length], dtype=torch.int32) for length in (tokens, 0))
masks = torch.tensor([0, seen.numel()])
extend_attention.extend_attention_fwd(
    *(q, k, v, answers, nothing, nothing, whole, none, indices, seen.flatten()), True, masks, tokens, 1.0, 1.0, 1.0
)

def error(mask):
    expected = torch.where(mask, q[:, 0] @ k[:, 0].T, -torch.inf).softmax(-1) @ v[:, 0]
    return (answers[:, 0] - expected).abs().max().item()

end = (torch.arange(tokens)[:, None] // block + 1) * block
print(error(seen), error(seen & (torch.arange(tokens) < end)))
"""


@pytest.mark.wide
def test_triton_cuts_an_image_at_its_blocks_of_queries():
    """Prevents documents that go on reporting what SGLang computes of an image's tokens after it has changed."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    asked, cut = (float(word) for word in ended.stdout.split()[-2:])
    assert cut < 1e-5 < 0.1 < asked
