"""Structured output of requests that outgrow their budget."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import prepare_model
from harness import compression
from tiny_model import build_tiny_model

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ITS_SIZE = 49_152


@pytest.fixture(scope="module")
def speller(serve, tmp_path_factory):
    """The Client of a server of a random model with a trained model's tokenizer, which spells any text."""
    trained, _ = prepare_model.prepare()
    model = build_tiny_model(tmp_path_factory.mktemp("speller"), vocabulary=ITS_SIZE)
    for name in TOKENIZER:
        shutil.copy(trained / name, model.path)
    # A random model would fill its answers with white space.
    return serve("--constrained-json-disable-any-whitespace", model=model, tokenizer=True)


def test_structured_output(speller):
    """Prevents a grammar from losing its place when tokens that it has accepted are evicted."""
    response = speller.post(
        "/generate",
        text="Some three-letter words:",
        sampling_params={"max_new_tokens": 176, "temperature": 0.8, "regex": "([a-z]{3} [0-9]{2}, ){100}"},
    ).json()
    assert compression(response)["rounds"] >= 3
    whole = len(response["text"]) // 8 * 8
    assert re.fullmatch("([a-z]{3} [0-9]{2}, )+", response["text"][:whole])


@pytest.mark.wide
def test_json_schema_in_a_chat(speller):
    """Prevents an answer that breaks the schema it was promised to follow."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 36}
    schema = {"type": "object", "properties": {"numbers": numbers | {"maxItems": 36}}, "required": ["numbers"]}
    response = speller.post(
        "/v1/chat/completions",
        model="default",
        messages=[{"role": "user", "content": "Thirty-six numbers, please."}],
        max_tokens=900,
        return_meta_info=True,
        temperature=0.8,
        response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
    ).json()
    answer = response["choices"][0]
    assert compression(answer)["rounds"] >= 2
    assert len(json.loads(answer["message"]["content"])["numbers"]) == 36
