"""Structured output of requests that outgrow their budget."""

from __future__ import annotations

import json
import re

import pytest

import prepare_model
from harness import STRICT, Client, compression
from warm import running_server


@pytest.fixture(scope="module")
def smollm(forkserver, tmp_path_factory):
    model, stats = prepare_model.prepare()
    args = ["--enable-triattention", "--triattention-stats", str(stats), "--triattention-budget", "64"]
    # In bfloat16, processors without bfloat16 arithmetic would answer for minutes.
    args += ["--triattention-interval", "32", "--max-total-tokens", "6144", "--sleep-on-idle", "--dtype", "float32"]
    with running_server(forkserver, model, args, STRICT, tmp_path_factory.mktemp("logs") / "log") as server:
        yield Client(server)


def test_structured_output(smollm):
    """Prevents a grammar from losing its place when tokens that it has accepted are evicted."""
    response = smollm.post(
        "/generate",
        text="Some three-letter words:",
        sampling_params={"max_new_tokens": 176, "temperature": 0.8, "regex": "([a-z]{3} [0-9]{2}, ){100}"},
    ).json()
    assert compression(response)["rounds"] >= 3
    whole = len(response["text"]) // 8 * 8
    assert re.fullmatch("([a-z]{3} [0-9]{2}, )+", response["text"][:whole])


def test_json_schema_in_a_chat(smollm):
    """Prevents an answer that breaks the schema it was promised to follow."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 36}
    schema = {"type": "object", "properties": {"numbers": numbers | {"maxItems": 36}}, "required": ["numbers"]}
    response = smollm.post(
        "/v1/chat/completions",
        model="default",
        messages=[{"role": "user", "content": "Thirty-six numbers, please."}],
        max_tokens=900,
        temperature=0.8,
        response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
    ).json()
    assert len(json.loads(response["choices"][0]["message"]["content"])["numbers"]) == 36
