"""What an operator prefers for all requests (--preferred-sampling-params), where it holds settings of compression.

SGLang part: `TokenizerManager.preferred_sampling_params` (sglang/srt/managers/tokenizer_manager.py). SGLang takes of it
each field that a request does not give. Its chat and completion endpoints always give `custom_params`, null if the
client sent none, so that there the operator's are lost.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_triattn.errors import TriAttentionError, quoted
from sglang_triattn.request.options import KEY, read_request
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_FLAG = "--preferred-sampling-params"


def check_preferred(settings: Any, config: RoundRules) -> None:
    """Raises TriAttentionError for preferred settings of compression that no request could have, or not every one.

    Args:
        settings: SGLang's settings, resolved or not; unresolved ones may hold the text of an object.
        config: the server's settings.
    """
    preferred = settings.preferred_sampling_params
    if preferred is None:
        return
    if isinstance(preferred, str):
        try:
            preferred = read_preferred(preferred)
        except ValueError as error:
            raise TriAttentionError(
                f"{_FLAG} is {quoted(preferred)}, which is not JSON ({error}): give an object of sampling parameters."
            ) from None
    if not isinstance(preferred, Mapping):
        raise TriAttentionError(
            f"{_FLAG} is {quoted(preferred)}, but it must be a JSON object of sampling parameters: correct it, or "
            "leave it out."
        )
    try:
        asked = read_request(config, preferred.get("custom_params"))
    except TriAttentionError as error:
        raise TriAttentionError(f"In {_FLAG}, {error}") from None
    if asked.conversation is not None:
        raise TriAttentionError(
            f"In {_FLAG}, custom_params.{KEY}.conversation is {quoted(asked.conversation)}, but a name stands for the "
            "conversation of one client, and these settings hold for all requests: leave it out."
        )


def prefer(manager: TokenizerManager, request: GenerateReqInput | EmbeddingReqInput) -> None:
    """Gives a request the operator's settings of compression if it has none, at each endpoint."""
    params: Any = request.sampling_params
    custom = params.get("custom_params") if isinstance(params, Mapping) else None
    found = with_preferred(getattr(manager, "preferred_sampling_params", None), custom)
    if found is not custom:
        request.sampling_params = {**params, "custom_params": found}


@functools.cache
def read_preferred(text: str) -> Any:
    """The operator's sampling parameters from the text of the flag. Raises ValueError if it is not JSON."""
    return json.loads(text)


def with_preferred(preferred: object, custom_params: object) -> Any:
    """`custom_params` with the operator's settings of compression, unless the client sent some, or sent no object.

    Args:
        preferred: the operator's sampling parameters.
    """
    settings = _settings_in(preferred)
    if settings is None or (custom_params is not None and not isinstance(custom_params, Mapping)):
        return custom_params
    own = custom_params or {}
    return custom_params if own.get(KEY) is not None else {**own, KEY: settings}


def _settings_in(params: object) -> object | None:
    """The settings of compression in sampling parameters; None if there are none, or null."""
    custom = params.get("custom_params") if isinstance(params, Mapping) else None
    return custom.get(KEY) if isinstance(custom, Mapping) else None
