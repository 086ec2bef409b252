"""The file format of the quality benchmark: one stream a line of JSON, and the reader that refuses bad ones.

    {"id": "a", "prompt": "...", "private": "...", "questions": [{"task": "facts", "text": "...", "answer": " 42"}]}
    {"id": "b", "prompt": "...", "private": "...", "score_last": 1024}

The prompt is frozen. The private text is fed as if the model had generated it. A question branches off from what is
left of it: the question's text is fed, then its answer, and it is right when every token of the answer is the most
likely one. A stream with `score_last` has no questions: that many tokens at the end of its private text are scored.

Prompt, private text, question and answer are tokenized separately. For this to give the same tokens as the whole text,
prompt and private text end with one line break, a question starts with a letter or a sign, and an answer with a space.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class StreamError(ValueError):
    """A stream file cannot be used or a stream cannot be made; the message is one sentence for the user."""


@dataclass(frozen=True)
class Question:
    """One question about a private text."""

    task: str
    """Name under which it is counted."""
    text: str
    """What is fed before the answer."""
    answer: str
    """What the model should continue with; starts with a space where a token does."""
    at: int | None = None
    """Character of the private text at which the answering statement begins; None if there is no single one."""


@dataclass(frozen=True)
class Stream:
    """One text with what is asked or scored about it: `questions` or `score_last`."""

    id: str
    prompt: str
    private: str
    questions: tuple[Question, ...] = ()
    score_last: int | None = None
    """Number of private tokens at the end that are scored."""


def to_line(stream: Stream) -> str:
    """One line of JSON, without its line break."""
    entry: dict[str, Any] = {"id": stream.id, "prompt": stream.prompt, "private": stream.private}
    if stream.score_last is not None:
        entry["score_last"] = stream.score_last
    else:
        entry["questions"] = [
            {name: value for name, value in vars(question).items() if value is not None}
            for question in stream.questions
        ]
    return json.dumps(entry, ensure_ascii=False)


def write_streams(path: str | Path, streams: Iterable[Stream]) -> None:
    Path(path).write_text("".join(to_line(stream) + "\n" for stream in streams), encoding="utf-8")


def read_streams(path: str | Path) -> tuple[Stream, ...]:
    """Reads the streams of a file in order; empty lines are skipped.

    Raises:
        StreamError: a line is wrong; the message names the line, what is wrong with it and what to do.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StreamError(f"{path} is not UTF-8 text: write it again with benchmarks.quality.streams.") from error
    except OSError as error:
        raise StreamError(
            f"{path} cannot be read ({error.strerror}): name a file that benchmarks.quality.streams wrote."
        ) from error
    streams: list[Stream] = []
    lines: dict[str, int] = {}
    # Not splitlines(): JSON strings may hold characters that it takes for line breaks.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        stream = _stream(line, f"Line {number} of {path}")
        if stream.id in lines:
            raise StreamError(
                f"Line {number} of {path} has the id {stream.id!r}, which line {lines[stream.id]} has already: give "
                "each stream an id of its own."
            )
        lines[stream.id] = number
        streams.append(stream)
    if not streams:
        raise StreamError(f"{path} holds no streams: write some with benchmarks.quality.streams.")
    return tuple(streams)


def _stream(line: str, where: str) -> Stream:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise StreamError(f"{where} is not JSON ({error}): each line must be one stream.") from error
    if not isinstance(entry, dict):
        raise StreamError(f'{where} is not an object: each line must be one, with "id", "prompt" and "private".')
    _check_keys(entry, ("id", "prompt", "private"), ("questions", "score_last"), where)
    questions, score_last = entry.get("questions"), entry.get("score_last")
    if (questions is None) == (score_last is None):
        raise StreamError(f'{where} must have either "questions" or "score_last": add one, or remove one.')
    if questions is not None:
        if not isinstance(questions, list) or not questions:
            raise StreamError(f'{where} has no list of questions: give at least one, or "score_last" instead.')
        asked = tuple(_question(item, f"Question {i} in line" + where[4:]) for i, item in enumerate(questions, 1))
        return Stream(entry["id"], entry["prompt"], entry["private"], asked)
    if not _is_count(score_last) or score_last < 1:
        raise StreamError(f'{where} has a "score_last" of {score_last!r}: give a number of tokens, at least 1.')
    return Stream(entry["id"], entry["prompt"], entry["private"], score_last=score_last)


def _question(item: Any, where: str) -> Question:
    if not isinstance(item, dict):
        raise StreamError(f'{where} is not an object: it must have "task", "text" and "answer".')
    _check_keys(item, ("task", "text", "answer"), ("at",), where)
    at = item.get("at")
    if at is not None and (not _is_count(at) or at < 0):
        raise StreamError(f'{where} has an "at" of {at!r}: give the number of a character, or leave it out.')
    return Question(item["task"], item["text"], item["answer"], at)


def _check_keys(entry: dict, texts: Sequence[str], others: Sequence[str], where: str) -> None:
    for name in texts:
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise StreamError(f'{where} has no text as "{name}": give it as a string that is not empty.')
    for name in entry:
        if name not in texts and name not in others:
            raise StreamError(f'{where} has the unknown key "{name}": remove it, or correct its spelling.')


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
