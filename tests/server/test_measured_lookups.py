"""Look-up weights that SGLang fits, held to those that transformers fits, for layers unlike a Llama's."""

from __future__ import annotations

import pytest

from family_servers import prepared, started
from harness import STAGES, TWO_GROUPS, compression, cores_for, prompt
from measured_statistics import LOOKUP_JOB, assert_close, looked_up, measuring
from sets import wide


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("seed-oss", STAGES),  # layers of one stage alone, or stages in another order
        wide("seed-oss", ("--tp-size", "2")),  # heads of one rank alone
        ("qwen3-moe-all", TWO_GROUPS),  # tokens of one group alone, and batches whose sizes groups do not agree on
        wide("gemma-4-shared", ()),  # several layers read one layer's KV
        wide("hunyuan", ()),  # a norm after the rotation
        wide("exaone4", ()),  # windows, and no RoPE
        wide("mimo-v2", ()),  # values narrower than keys
        wide("cohere2", ()),  # interleaved pairs
        wide("falcon-h1", ()),  # a state in each layer
    ],
)
def test_weights_agree_with_those_of_transformers(serve, tmp_path, family, flags):
    """Prevents keys before a norm, of another layer or of padded widths, and queries of one reader alone."""
    tiny, _ = prepared(tmp_path, family)
    env = {**measuring(tmp_path, job=LOOKUP_JOB), **cores_for(flags)}
    client = started(serve, tiny, family, *flags, "--triattention-stats", "look-ups", env=env)
    found, expected = looked_up(client, tiny, family, LOOKUP_JOB)
    assert_close(found, expected, "weights")
    assert (expected.roll(1, dims=1) - expected).norm() > 0.1 * expected.norm()
    # Rounds read them.
    assert compression(client.generate(prompt(4, 40), 200))["rounds"] > 0
    client.assert_alive()
    serve.stop(client)
