"""A streamed request to a server, timed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import requests


def events(response: requests.Response) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer of `/generate`, each of which has all of the answer so far."""
    for line in response.iter_lines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


def streamed(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The last event of a stream of `/generate`, which has the whole answer, and milliseconds until the first one.

    Raises:
        requests.HTTPError: the server refused the request.
    """
    start, first, last = time.monotonic(), None, {}
    with requests.post(f"{url}/generate", json={**body, "stream": True}, stream=True, timeout=3600) as response:
        response.raise_for_status()
        for event in events(response):
            first, last = first or time.monotonic(), event
    return last, 1e3 * ((first or start) - start)
