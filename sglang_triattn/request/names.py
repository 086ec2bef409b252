"""Settings of clients that cannot send `custom_params`: headers of this package, and names in fields of other APIs.

The headers stand for fields of `custom_params.triattention`, and are refused as those are. The fields of
--triattention-name-fields belong to their clients, which use them for other ends as well: what cannot be a name there
is ignored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_triattn.config import PREVIOUS_RESPONSE, is_header
from sglang_triattn.errors import quoted
from sglang_triattn.request.options import KEY, LONGEST_NAME, RequestError, is_name

CONVERSATION, SWITCH = "X-TriAttention-Conversation", "X-TriAttention"

REMEMBERED = 4096
"""How many responses are remembered with the names of their chains."""


class Chains:
    """The names of chains of responses (`previous_response_id`): the id of a chain's first response."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, str] = OrderedDict()

    def name(self, response: str, previous: str | None) -> str:
        """The name of the chain that a new response begins, or continues after `previous`."""
        if previous is None:
            return response
        # Of a response that is not remembered, this finds the second of a chain, whose name is `previous` itself.
        name = self._names[response] = self._names.get(previous, previous)
        if len(self._names) > REMEMBERED:
            self._names.popitem(last=False)
        return name


def settings_in(headers: Mapping[str, str]) -> dict[str, Any]:
    """What the headers ask for, as `custom_params.triattention` holds it.

    Args:
        headers: by names in any case, decoded as Latin-1.

    Raises:
        RequestError: a value is none that a header may have.
    """
    asked: dict[str, Any] = {}
    switch, name = headers.get(SWITCH), headers.get(CONVERSATION)
    if switch is not None:
        if switch.lower() != "off":
            raise RequestError(
                f"The header {SWITCH} is {quoted(switch)}, but it must be off: write that, or leave it out."
            )
        asked["enabled"] = False
    if name is not None:
        asked["conversation"] = _utf8(name)
        if not is_name(asked["conversation"]):
            raise RequestError(
                f"The header {CONVERSATION} is {quoted(name)}, but it must be a name of 1 to {LONGEST_NAME} characters "
                "in UTF-8."
            )
    return asked


def foreign_name(fields: Sequence[str], headers: Mapping[str, str], body: object, chain: str | None) -> str | None:
    """The conversation's name by the first of the operator's fields that has one.

    Args:
        fields: as of `read_name_fields`.
        headers: as of `settings_in`.
        body: of the request, parsed.
        chain: the name of the request's chain of responses, if it may be continued.
    """
    for field in fields:
        if field == PREVIOUS_RESPONSE:
            found = chain
        elif is_header(field):
            found = _utf8(headers.get(field, ""))
        else:
            name, _, key = field.partition(".")
            found = body.get(name) if isinstance(body, Mapping) else None
            if key:
                found = found.get(key) if isinstance(found, Mapping) else None
        if is_name(found):
            return found
    return None


def with_settings(custom_params: Any, settings: Mapping[str, Any]) -> Any:
    """`custom_params` with settings of compression that were brought elsewhere; a field that they hold already stays.

    What is no object is returned as it is, for `read_request` to refuse.
    """
    custom = {} if custom_params is None else custom_params
    if not settings or not isinstance(custom, Mapping):
        return custom_params
    asked = {} if custom.get(KEY) is None else custom[KEY]
    if not isinstance(asked, Mapping):
        return custom_params
    given = {name: value for name, value in asked.items() if value is not None}
    return {**custom, KEY: {**settings, **given}}


def _utf8(text: str) -> str | None:
    """A header's value as its client wrote it; None if it is not UTF-8."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError:
        return None
