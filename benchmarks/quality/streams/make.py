"""Streams for the quality benchmark: what does a model still know of a text after its KV cache was compressed?

Deterministic in form, seed and length; generated here, with nothing downloaded. Kinds of streams and their tasks:

    mixed      statements among unrelated sentences, asked for at the end: facts, early, words
    state      the last values of twelve counters in a log
    dfs        a depth-first search: parents, steps, and the stack at its end
    variables  the values of variables in code
    agent      identifiers that an agent's tools returned
    text       prose and code that come with Python; no questions, the second half is scored

    python -m benchmarks.quality.streams --model FOLDER --seed 1 --out streams.jsonl
    python -m benchmarks.quality.streams --model FOLDER --form held-out --streams mixed=12 dfs=4 --out x.jsonl

format.py describes the file and reads it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.quality.streams.agent import agent
from benchmarks.quality.streams.code import variables
from benchmarks.quality.streams.draft import Builder, Length, fitted
from benchmarks.quality.streams.format import Stream, StreamError, write_streams
from benchmarks.quality.streams.logs import dfs, state
from benchmarks.quality.streams.prose import mixed
from benchmarks.quality.streams.text import text
from benchmarks.quality.streams.words import FORMS

KINDS: dict[str, Builder] = {
    "mixed": mixed,
    "state": state,
    "dfs": dfs,
    "variables": variables,
    "agent": agent,
    "text": text,
}
DEFAULT_STREAMS = {"mixed": 6, "state": 3, "dfs": 2, "variables": 2, "agent": 2, "text": 2}
# Below this, the statements would make up most of a stream.
MIN_TOKENS = 1024
# For English and code, to convert lengths in characters.
CHARACTERS_PER_TOKEN = 4


def length_in_tokens(tokens: int, count: Callable[[str], int]) -> Length:
    """`count` gives the number of tokens of a text, without any that a tokenizer puts before it."""
    return Length(tokens, count, tokens)


def length_by_tokenizer(tokenizer: Any, tokens: int) -> Length:
    """Length of private texts in a model's own tokens; `tokenizer` is from transformers."""
    return length_in_tokens(
        tokens, lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    )


def length_in_characters(characters: int) -> Length:
    return Length(characters, len, characters // CHARACTERS_PER_TOKEN)


def make_streams(form: str, seed: int, streams: Mapping[str, int], length: Length) -> tuple[Stream, ...]:
    """The first streams of each kind, as many as `streams` says; other seeds, forms and kinds give unrelated ones.

    Raises:
        StreamError: a kind, a number or the length is not available.
    """
    if form not in FORMS:
        raise StreamError(f"There is no form {form!r}: use one of {', '.join(FORMS)}.")
    if length.tokens < MIN_TOKENS:
        raise StreamError(
            f"A private text of {length.tokens} tokens is too short for its questions: use at least {MIN_TOKENS}."
        )
    made = []
    for kind, count in streams.items():
        if kind not in KINDS or count < 0:
            raise StreamError(f"{kind}={count} names no streams: use {', '.join(KINDS)}, each with a number from 0 on.")
        for number in range(count):
            identity = f"{form}-{kind}-{seed}-{number}"
            draft = fitted(KINDS[kind], identity, form, number, length)
            made.append(Stream(identity, draft.prompt, draft.private, draft.questions, draft.score_last))
    return tuple(made)


def _counted(entry: str) -> tuple[str, int]:
    kind, equals, count = entry.partition("=")
    if not equals or not count.isdecimal():
        raise argparse.ArgumentTypeError(f"{entry!r} is not KIND=NUMBER, such as mixed=6")
    return kind, int(count)


def _model_length(model: str, tokens: int) -> Length:
    from transformers import AutoTokenizer

    return length_by_tokenizer(AutoTokenizer.from_pretrained(model), tokens)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.streams",
        description="Write streams for the quality benchmark.",
        allow_abbrev=False,
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--model", help="folder or hub name of the model whose tokenizer counts --tokens")
    size.add_argument("--characters", type=int, help="length of the private texts in characters, instead of --model")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the private texts (2048)")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help="held-out: the same in other words")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", nargs="+", type=_counted, metavar="KIND=NUMBER", help="which and how many")
    parser.add_argument("--out", required=True, help="JSONL file to write")
    arguments = parser.parse_args(argv)
    length = (
        length_in_characters(arguments.characters)
        if arguments.model is None
        else _model_length(arguments.model, arguments.tokens)
    )
    try:
        streams = make_streams(arguments.form, arguments.seed, dict(arguments.streams or DEFAULT_STREAMS), length)
        write_streams(arguments.out, streams)
    except (OSError, StreamError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{arguments.out}: {len(streams)} streams, {sum(len(stream.questions) for stream in streams)} questions")
