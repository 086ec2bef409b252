"""Refuses bad settings of requests on arrival, and gives those without any the operator's.

SGLang parts: `TokenizerManager._create_tokenized_object` (sglang/srt/managers/tokenizer_manager.py), which every
request passes through; `serve_generate_request` and the FastAPI application (sglang/srt/entrypoints/http_server.py), to
which a middleware is added.

The scheduler reads the settings (`admission`), but by the time it could refuse them a stream has begun with status 200.
SGLang's chat and completion endpoints wait for the first chunk, so an error in the main process becomes status 400;
/generate does not wait, so its requests are checked beforehand. Headers, which may come to any endpoint, are checked
before it is called.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches import request_names
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.launch.preferred import prefer
from sglang_triattn.patches.launch.server_args import rules_of
from sglang_triattn.patches.observability.metrics import Refusals
from sglang_triattn.patches.request.fields import kinds_of
from sglang_triattn.request.names import CONVERSATION, settings_in, with_settings
from sglang_triattn.request.options import CONFLICT, KEY, RequestError, read_request, with_media
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from fastapi import Request as HttpRequest
    from fastapi import Response
    from sglang.srt.managers.io_struct import (
        EmbeddingReqInput,
        GenerateReqInput,
        TokenizedEmbeddingReqInput,
        TokenizedGenerateReqInput,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from sglang_triattn.patches.sglang_types import ServerArgs


# Fields of a request to /generate are named after what they hold.
_MEDIA = ("image", "video", "audio")
_refusals = Refusals()


def main_hooks() -> list[Hook]:
    """Hooks for the main process."""
    return [
        *_refusals.hooks(),
        *request_names.main_hooks(),
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
            "around",
            _prefer_and_check,
            "self obj input_text input_ids input_embeds mm_inputs token_type_ids",
            why="gives a request the operator's preferred settings, and refuses a bad field, whichever endpoint",
        ),
        Hook(
            "sglang.srt.entrypoints.http_server.serve_generate_request",
            "around",
            _check_before_stream,
            "obj request",
            why="refuses a bad field with status 400 before a stream of `/generate` begins",
        ),
    ]


def _prefer_and_check(
    original: Callable,
    manager: TokenizerManager,
    obj: GenerateReqInput | EmbeddingReqInput,
    *inputs: object,
    **named_inputs: object,
) -> TokenizedGenerateReqInput | TokenizedEmbeddingReqInput:
    """Raises TriAttentionError, a ValueError: SGLang answers it with status 400, and `sglang.Engine` raises it."""
    rules = rules_of(manager.server_args)
    if rules is None:
        return original(manager, obj, *inputs, **named_inputs)
    settings = request_names.brought().settings
    if settings and isinstance(obj.sampling_params, dict):
        custom = with_settings(obj.sampling_params.get("custom_params"), settings)
        obj.sampling_params = {**obj.sampling_params, "custom_params": custom}
    prefer(manager, obj)
    tokenized: TokenizedGenerateReqInput = original(manager, obj, *inputs, **named_inputs)
    media = _media_of(obj) if tokenized.mm_inputs is None else kinds_of(tokenized.mm_inputs.mm_items)
    params = tokenized.sampling_params
    params.custom_params = _checked(rules, manager.server_args, params.custom_params, params.beam_width, media)
    return tokenized


def _media_of(obj: GenerateReqInput | EmbeddingReqInput) -> set[str]:
    """Kinds of non-text input that another server encodes and sends later (`--language-only`)."""
    if not getattr(obj, "need_wait_for_mm_inputs", False):
        return set()
    return _given_media(obj)


def _given_media(obj: GenerateReqInput | EmbeddingReqInput) -> set[str]:
    from sglang.srt.managers.io_struct import has_valid_data

    return {kind for kind in _MEDIA if has_valid_data(getattr(obj, f"{kind}_data"))}


async def _check_before_stream(original: Callable, obj: GenerateReqInput, request: HttpRequest) -> Response:
    from sglang.srt.entrypoints import http_server

    manager = http_server.get_global_state().tokenizer_manager
    rules = rules_of(manager.server_args)
    if rules is not None:
        asked = obj.sampling_params
        # Which of several prompts have images is checked later.
        media = set() if isinstance(asked, list) else _given_media(obj)
        try:
            request_names.note(manager, obj, request)
            for params in asked if isinstance(asked, list) else [asked]:
                if isinstance(params, Mapping):
                    custom = with_settings(params.get("custom_params"), request_names.brought().settings)
                    _checked(rules, manager.server_args, custom, params.get("beam_width"), media)
        except TriAttentionError as error:
            return http_server._create_error_response(error)
    return await original(obj, request)


def _no_conversations(rules: RoundRules, server_args: object) -> str | None:
    """Why a server can keep no conversations, to complete "with ..."; None if it can."""
    # SGLang puts the fields of its record together at run time.
    settings = cast("ServerArgs", server_args)
    if settings.pp_size > 1:
        return f"--pp-size {settings.pp_size}, whose stages have no clock in common by which a row could expire"
    if settings.disaggregation_mode == "decode":
        return "--disaggregation-mode decode, which another server sends whole prompts and not what follows a row"
    if not rules.keeps_rows:
        return (
            f"--speculative-algorithm {settings.speculative_algorithm} for a model whose layers keep a state, which "
            "queued steps move beyond the row"
        )
    return None


def _checked(
    rules: RoundRules, server_args: object, custom_params: Any, beam_width: object, media: Collection[str]
) -> Any:
    """`custom_params`, with the name that a field of the client's own gives unless such a name would be refused.

    Args:
        custom_params, beam_width: as the client sent them, unchecked; SGLang checks the latter later.

    Raises:
        RequestError: a client must not ask for this; it has been counted.
    """
    name = request_names.brought().name
    if name is not None:
        named = with_settings(custom_params, {"conversation": name})
        with suppress(RequestError):
            check_settings(rules, server_args, named, beam_width, media)
            return named
    try:
        check_settings(rules, server_args, custom_params, beam_width, media)
    except RequestError as error:
        _refusals.count(error.reason)
        raise
    return custom_params


def check_settings(
    rules: RoundRules, server_args: object, custom_params: object, beam_width: object, media: Collection[str]
) -> None:
    """Raises RequestError for settings that a request must not have on this server.

    Args:
        media: kinds of what is not text in its prompt.
    """
    asked = with_media(read_request(rules, custom_params), media)
    # SGLang itself refuses a width that is no number.
    if asked.conversation is not None and isinstance(beam_width, int) and beam_width > 1:
        raise RequestError(
            f"custom_params.{KEY}.conversation does not work with beam_width {beam_width}, because beam search is not "
            "compressed and keeps no row: leave one of the two out.",
            CONFLICT,
        )
    no_conversations = _no_conversations(rules, server_args)
    if asked.conversation is not None and no_conversations is not None:
        raise RequestError(
            f"custom_params.{KEY}.conversation does not work on a server with {no_conversations}: leave the "
            "conversation out.",
            CONFLICT,
        )


class HeaderCheck:
    """ASGI middleware that answers a request with a wrong header of this package with status 400 and one sentence.

    SGLang's other endpoints would answer status 500, or begin a stream with status 200.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Callable, send: Callable) -> None:
        answer = self._app
        # Clients send their headers with questions about the server as well.
        if scope["type"] == "http" and scope["method"] in ("POST", "PUT"):
            try:
                _check_headers(scope)
            except RequestError as error:
                from starlette.responses import JSONResponse

                _refusals.count(error.reason)
                # A server closes the connection of a request whose body is not read, before its client has the answer.
                while (await receive()).get("more_body"):
                    pass
                # Anthropic's clients look for the types.
                content = {"type": "error", "error": {"type": "invalid_request_error", "message": str(error)}}
                answer = JSONResponse(content, status_code=400)
        await answer(scope, receive, send)


def _check_headers(scope: Any) -> None:
    """Raises RequestError for headers that no request could have."""
    from sglang.srt.entrypoints import http_server
    from starlette.datastructures import Headers

    settings = settings_in(Headers(scope=scope))
    server_args = http_server.get_global_state().tokenizer_manager.server_args
    rules = rules_of(server_args)
    if not settings or rules is None:
        return
    try:
        check_settings(rules, server_args, {KEY: settings}, None, ())
    except RequestError as error:
        raise RequestError(f"In the header {CONVERSATION}, {error}", error.reason) from None


def check_headers() -> None:
    """Adds the middleware to SGLang's application, once."""
    from sglang.srt.entrypoints.http_server import app

    if all(added.cls is not HeaderCheck for added in app.user_middleware):
        app.add_middleware(HeaderCheck)
