"""What a request brings outside `custom_params`: headers, and names of conversations in fields of other APIs.

SGLang parts: `TokenizerManager.generate_request` (sglang/srt/managers/tokenizer_manager.py), to which each endpoint
passes what it made of a request and the HTTP request itself; `ORJSONRequest` (sglang/srt/entrypoints/http_server.py),
which keeps the body that it has parsed. SGLang's records lack most of the fields.

SGLang makes several records of one request (`n`, several prompts), so a context variable takes what was found to
`request_validation`, where the settings of each are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_triattn.config import PREVIOUS_RESPONSE, read_name_fields
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.launch.server_args import rules_of
from sglang_triattn.patches.observability.stopped import route_of
from sglang_triattn.request.names import Chains, foreign_name, settings_in

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

    from sglang_triattn.patches.sglang_types import ServerArgs

_RESPONSES = "/v1/responses"


@dataclass(frozen=True)
class Brought:
    """What a request brought.

    Attributes:
        settings: by headers of this package, as `custom_params.triattention` holds them.
        name: of its conversation, in a field that the operator has chosen; ignored where a name cannot be had.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None


_NOTHING = Brought()
_brought: ContextVar[Brought] = ContextVar("triattention_brought", default=_NOTHING)
_chains = Chains()


def main_hooks() -> list[Hook]:
    """Hooks for the main process."""
    return [
        Hook(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
            "before",
            note,
            "self obj request",
            why="reads a request's headers, and the fields that name its conversation",
        )
    ]


def brought() -> Brought:
    """What the request that is being handled brought."""
    return _brought.get()


def note(manager: Any, obj: GenerateReqInput | EmbeddingReqInput, request: Request | None = None) -> None:
    """Notes what a request brought, for `brought`. Those of `sglang.Engine` and of launches have no HTTP request.

    Args:
        manager: SGLang's TokenizerManager, or the one of several HTTP processes.

    Raises:
        RequestError: a header of this package has a wrong value.
    """
    rules = rules_of(manager.server_args)
    found = _NOTHING
    if rules is not None and request is not None:
        # Not there for a body that is no JSON.
        body = getattr(request, "_json", None)
        fields = read_name_fields(rules.name_fields)
        chain = _chain_of(manager.server_args, obj, body, request) if PREVIOUS_RESPONSE in fields else None
        found = Brought(settings_in(request.headers), foreign_name(fields, request.headers, body, chain))
    _brought.set(found)


def _chain_of(server_args: ServerArgs, obj: Any, body: Any, request: Request) -> str | None:
    """The name of the chain of responses to which a request belongs; None if its response cannot be continued."""
    if not server_args.enable_response_store or not isinstance(body, Mapping) or not body.get("store", True):
        return None
    if route_of(request.scope) != _RESPONSES:
        return None
    return _chains.name(obj.rid, body.get("previous_response_id"))
