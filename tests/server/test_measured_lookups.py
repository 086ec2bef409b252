"""Look-up weights that SGLang fits, held to those that transformers fits, for layers unlike a Llama's."""

from __future__ import annotations

import pytest

from family_servers import prepared, started
from harness import prompt
from measured_statistics import assert_close, looked_up, measuring
from sets import wide
from sglang_triattn.calibration.job import CalibrationJob

JOB = CalibrationJob(
    windows=(tuple(prompt(1, 300)),),
    lookup_texts=(tuple(prompt(2, 140)), tuple(prompt(3, 140))),
    lookup_request=(5, 6, 7),
)


@pytest.mark.parametrize(
    "family",
    [
        wide("gemma-4-shared"),  # several layers read one layer's KV
        wide("hunyuan"),  # a norm after the rotation
        wide("exaone4"),  # windows, and no RoPE
        wide("mimo-v2"),  # values narrower than keys
        wide("cohere2"),  # interleaved pairs
        wide("falcon-h1"),  # a state in each layer
    ],
)
def test_weights_agree_with_those_of_transformers(serve, tmp_path, family):
    """Prevents keys before a norm, of another layer or of padded widths, and queries of one reader alone."""
    tiny, _ = prepared(tmp_path, family)
    client = started(serve, tiny, family, "--triattention-stats", "auto", env=measuring(tmp_path, job=JOB))
    found, expected = looked_up(client, tiny, family, JOB)
    assert_close(found, expected, "weights")
    assert (expected.roll(1, dims=1) - expected).norm() > 0.1 * expected.norm()
    # Rounds read them.
    client.generate(prompt(4, 40), 200)
    assert client.totals()["rounds"] > 0
    client.assert_alive()
    serve.stop(client)
