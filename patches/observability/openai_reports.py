"""Reports in the answers of SGLang's OpenAI endpoints.

SGLang parts: `OpenAIServingChat` and `OpenAIServingCompletion` (serving_chat.py and serving_completions.py in
sglang/srt/entrypoints/openai).

SGLang gives `meta_info` to whole chats alone, on `return_meta_info`, which it refuses for streams and does not know for
completions. A request with `custom_params.triattention`, be it an empty object, finds its report at the same place in
each kind of answer: `choices[i].meta_info.triattention`, in a stream with the choice's last chunk, which has the
`finish_reason`. Answers to other requests stay as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import cache
from typing import TYPE_CHECKING, Any

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.request.options import KEY

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.entrypoints.openai.protocol import (
        ChatCompletionRequest,
        ChatCompletionResponse,
        CompletionRequest,
        CompletionResponse,
        CompletionResponseChoice,
    )
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_DATA = "data: "


def main_hooks() -> list[Hook]:
    """Hooks for the main process."""
    openai = "sglang.srt.entrypoints.openai"
    chat = f"{openai}.serving_chat.OpenAIServingChat"
    completion = f"{openai}.serving_completions.OpenAIServingCompletion"
    streamed = "self adapted_request request raw_request"
    return [
        Hook(
            f"{chat}._build_chat_response",
            "after",
            _add_to_chat,
            "self request ret created",
            why="puts the report into whole chats",
        ),
        Hook(
            f"{chat}._generate_chat_stream",
            "around",
            _add_to_stream,
            streamed,
            why="puts the report into streamed chats",
        ),
        Hook(
            f"{completion}._build_completion_response",
            "after",
            _add_to_completion,
            "self request ret created",
            why="puts the report into whole completions",
        ),
        Hook(
            f"{completion}._generate_completion_stream",
            "around",
            _add_to_stream,
            streamed,
            why="puts the report into streamed completions",
        ),
    ]


def _asks(request: ChatCompletionRequest | CompletionRequest) -> bool:
    params = request.custom_params
    return isinstance(params, Mapping) and params.get(KEY) is not None


def _add_to_chat(
    response: ChatCompletionResponse, _: object, request: ChatCompletionRequest, ret: list[dict[str, Any]], __: object
) -> ChatCompletionResponse:
    if _asks(request):
        for choice, answer in zip(getattr(response, "choices", ()), ret, strict=False):
            choice.meta_info = {**(choice.meta_info or {}), **_report_of(answer)}
    return response


def _add_to_completion(
    response: CompletionResponse, _: object, request: CompletionRequest, ret: list[dict[str, Any]], __: object
) -> CompletionResponse:
    if not _asks(request):
        return response
    kind, choice_kind = _reported_completion()
    choices = [
        choice_kind.model_construct(**dict(choice), meta_info=_report_of(answer))
        for choice, answer in zip(response.choices, ret, strict=True)
    ]
    return kind.model_construct(**{**dict(response), "choices": choices})


@cache
def _reported_completion() -> tuple[type[CompletionResponse], type[CompletionResponseChoice]]:
    """SGLang's records of a completion and of one of its choices, with the field that it has for chats alone."""
    from pydantic import create_model
    from sglang.srt.entrypoints.openai.protocol import CompletionResponse, CompletionResponseChoice

    choice = create_model("ReportedChoice", __base__=CompletionResponseChoice, meta_info=(dict[str, Any], ...))
    return create_model("ReportedCompletion", __base__=CompletionResponse, choices=(list, ...)), choice


def _report_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The report of compression in `meta_info`; {} for an answer that was aborted early."""
    report = answer["meta_info"].get(KEY)
    return {} if report is None else {KEY: report}


def _add_to_stream(
    original: Callable,
    serving: OpenAIServingBase,
    adapted_request: GenerateReqInput,
    request: ChatCompletionRequest | CompletionRequest,
    raw_request: Request,
) -> AsyncGenerator[str, None]:
    if not _asks(request):
        return original(serving, adapted_request, request, raw_request)
    # SGLang drops the reports between its manager and the chunks, so this request gets a manager that notes them.
    reading = copy.copy(serving)
    noting = _Noting(serving.tokenizer_manager)
    setattr(reading, "tokenizer_manager", noting)  # noqa: B010 - of another type than SGLang's
    return _reported(original(reading, adapted_request, request, raw_request), noting.reports)


class _Noting:
    """SGLang's TokenizerManager as one request sees it.

    Attributes:
        reports: those of its choices that have ended, by the choice's index.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self.reports: dict[int, dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, *args: Any, **more: Any) -> AsyncGenerator[Any, None]:
        # Of a stream, each answer is one choice's.
        answers: AsyncGenerator[Any, None] = self._manager.generate_request(*args, **more)
        async with aclosing(answers):
            async for answer in answers:
                if KEY in answer["meta_info"]:
                    self.reports[answer.get("index", 0)] = answer["meta_info"][KEY]
                yield answer


async def _reported(chunks: AsyncGenerator[str, None], reports: dict[int, dict[str, Any]]) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield with_reports(chunk, reports) if reports and chunk.startswith(_DATA + "{") else chunk


def with_reports(chunk: str, reports: Mapping[int, dict[str, Any]]) -> str:
    """One event of a stream, with the reports of the choices that end in it."""
    content = json.loads(chunk.removeprefix(_DATA))
    ended = [choice for choice in content.get("choices", ()) if choice.get("finish_reason") is not None]
    for choice in ended:
        if choice["index"] in reports:
            choice["meta_info"] = {KEY: reports[choice["index"]]}
    return f"{_DATA}{json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n" if ended else chunk
