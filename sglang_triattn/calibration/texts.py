"""Calibration texts: plain text files and JSONL chats, as windows of token ids."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_triattn.calibration.job import CalibrationError, opened, unreadable
from sglang_triattn.errors import first_line

# No common tokenizer averages more characters per token; reading on would only load a corpus into memory.
_CHARACTERS_PER_TOKEN = 16
# Speaker names in common chat data sets, and the roles that chat templates call them.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def read_windows(paths: Sequence[str], tokenizer: Any, *, max_tokens: int, window: int) -> tuple[tuple[int, ...], ...]:
    """The first `max_tokens` tokens of all files, in windows of at most `window`.

    A *.jsonl file has one chat per line, formatted with the tokenizer's chat template; any other is one plain text.
    Each text, and each window, is a separate document and starts with the tokenizer's BOS if texts do.

    Args:
        paths: UTF-8 files, read in this order.
        tokenizer: a tokenizer of transformers.

    Raises:
        CalibrationError: a file cannot be used.
    """
    windows: list[tuple[int, ...]] = []
    left = max_tokens
    for path in paths:
        for ids in _documents(path, tokenizer, left):
            cut = ids[:left]
            left -= len(cut)
            windows += _split(cut, tokenizer.bos_token_id, window)
            if left <= 0:
                return tuple(windows)
    return tuple(windows)


def template_ids(tokenizer: Any, messages: Sequence[dict], **options: Any) -> list[int]:
    """Token ids of a chat, formatted with the tokenizer's chat template."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _documents(path: str, tokenizer: Any, max_tokens: int) -> Iterator[list[int]]:
    if Path(path).suffix == ".jsonl":
        yield from _chats(path, tokenizer)
        return
    with opened(path) as file:
        text = _read(path, lambda: file.read(max_tokens * _CHARACTERS_PER_TOKEN))
    yield tokenizer(text, verbose=False)["input_ids"]


def _chats(path: str, tokenizer: Any) -> Iterator[list[int]]:
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"The model has no chat template, which the chats of {path} need: give a plain text file instead."
        )
    with opened(path) as file:
        number = 0
        while line := _read(path, file.readline):
            number += 1
            if not line.strip():
                continue
            messages = _messages(line, f"Line {number} of {path}")
            try:
                yield template_ids(tokenizer, messages)
            except Exception as error:  # a template is code by the model's author
                reason = first_line(error)
                raise CalibrationError(
                    f"Line {number} of {path} does not fit the model's chat template, which says {reason!r}: correct "
                    "or remove the line."
                ) from error


def _messages(line: str, where: str) -> list[dict[str, str]]:
    """The messages of one chat, each with "role" and "content"."""
    try:
        chat = json.loads(line)
    except ValueError as error:
        raise CalibrationError(
            f"{where} is not JSON ({error}): each line must be a chat, that is, a list of messages or an object with "
            '"messages".'
        ) from error
    if isinstance(chat, dict):
        chat = chat.get("messages", chat.get("conversations"))
    entries = chat if isinstance(chat, list) else []
    messages = [message for message in map(_message, entries) if message is not None]
    if not messages or len(messages) < len(entries):
        raise CalibrationError(
            f'{where} is not a chat: it must be a list of messages, each with "role" and "content", or an object with '
            'such a list as "messages" or "conversations".'
        )
    return messages


def _message(entry: Any) -> dict[str, str] | None:
    if not isinstance(entry, dict):
        return None
    role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": _ROLES.get(role, role), "content": content}


def _split(ids: list[int], bos: int | None, window: int) -> list[tuple[int, ...]]:
    start = ids[:1] if ids and ids[0] == bos else []
    rest = ids[len(start) :]
    step = window - len(start)
    return [tuple(start + rest[first : first + step]) for first in range(0, len(rest), step)]


def _read(path: str, how):
    try:
        return how()
    except UnicodeDecodeError as error:
        raise CalibrationError(f"Calibration text {path} is not UTF-8 text: give a plain text file.") from error
    except OSError as error:
        raise unreadable(path, error) from error
