"""Streams of the quality benchmark as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.quality.streams.format import Stream, StreamError

TEXT = "text"
"""The task of scored text."""


@dataclass(frozen=True)
class Asked:
    """One question in tokens."""

    task: str
    text: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Tokens:
    """One stream in tokens."""

    id: str
    prompt: list[int]
    private: list[int]
    questions: tuple[Asked, ...] = ()
    score_last: int = 0


def tokenized(stream: Stream, tokenizer: Any) -> Tokens:
    """Tokenizes prompt, private text, questions and answers separately; the prompt begins as this tokenizer's texts do.

    Raises:
        StreamError: a part has no tokens, or fewer than are to be scored.
    """

    def ids(text: str, **options: Any) -> list[int]:
        found = tokenizer(text, verbose=False, **options)["input_ids"]
        if not found:
            raise StreamError(f"A part of stream {stream.id!r} has no tokens: {text[:40]!r}.")
        return found

    def plain(text: str) -> list[int]:
        return ids(text, add_special_tokens=False)

    begin = ids(stream.prompt)[:1]
    prompt, private = plain(stream.prompt), plain(stream.private)
    if begin == [tokenizer.bos_token_id]:
        prompt = begin + prompt
    if (stream.score_last or 0) > len(private):
        raise StreamError(f"Stream {stream.id!r} has only {len(private)} of the {stream.score_last} tokens to score.")
    asked = tuple(Asked(one.task, plain(one.text), plain(one.answer)) for one in stream.questions)
    return Tokens(stream.id, prompt, private, asked, stream.score_last or 0)
