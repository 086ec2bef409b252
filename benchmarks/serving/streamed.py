"""A streamed request to a server, timed."""

from __future__ import annotations

import json
import time
from typing import Any

import requests


def streamed(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The last event of a stream of `/generate`, which has the whole answer, and milliseconds until the first one.

    Raises:
        requests.HTTPError: the server refused the request.
    """
    start, first, last = time.monotonic(), None, {}
    with requests.post(f"{url}/generate", json={**body, "stream": True}, stream=True, timeout=3600) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                first = first or time.monotonic()
                last = json.loads(line.removeprefix(b"data: "))
    return last, 1e3 * ((first or start) - start)
