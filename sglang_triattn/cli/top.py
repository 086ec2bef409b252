"""`sglang-triattn top`: what a running server holds, in a terminal, from its `/server_info`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.error
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from sglang_triattn.cli import connecting
from sglang_triattn.errors import TriAttentionError, first_line

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_triattn.verify.connection import Connection

TIMEOUT_S = 10
TOTALS = ("rounds", "pressure_rounds", "evicted_tokens", "freed_slots", "moved_bytes")


@dataclass(frozen=True)
class Look:
    """What a server reported at one time: `states` has one entry for each data-parallel replica."""

    at: float
    states: list[dict[str, Any]]


PARSER = {
    "help": "show what a running server holds",
    "description": "Shows a server's running requests, pool, rounds and conversations, until Ctrl-C.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (%(default)s)")
    connecting.add_options(parser)
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="time between two looks (%(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="look twice, print one frame and exit")
    parser.add_argument("--json", action="store_true", help="print it as JSON; only with --once")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Shows the server until Ctrl-C, or once. Raises TriAttentionError for a user error."""
    if arguments.interval <= 0:
        raise TriAttentionError(f"--interval is {arguments.interval:g}, but it must be above 0 seconds.")
    if arguments.json and not arguments.once:
        raise TriAttentionError("--json prints one frame: give --once too.")
    if not (arguments.once or sys.stdout.isatty()):
        raise TriAttentionError("The output is not a terminal: give --once to print one frame.")
    connection = connecting.connection(arguments)
    url = connection.url
    first = look(connection, arguments.api_key)
    if not arguments.once:
        _watch(connection, arguments, first)
        return
    time.sleep(arguments.interval)
    frame = frame_of(first, look(connection, arguments.api_key))
    if arguments.json:
        print(json.dumps({"url": url, "replicas": frame}, indent=1))
        return
    from rich.console import Console

    from sglang_triattn.cli.top_view import render

    console = Console()
    console.print(render(url, frame, console.width, plain=_is_ascii(console)))


def _is_ascii(console: Console) -> bool:
    """Whether the output takes no other characters, as with LANG=C or PYTHONIOENCODING=ascii."""
    return console.options.ascii_only


def _watch(connection: Connection, arguments: argparse.Namespace, before: Look) -> None:
    from rich.console import Console
    from rich.live import Live

    from sglang_triattn.cli.top_view import render

    console = Console()
    frame, fault, plain = frame_of(before, before), None, _is_ascii(console)
    try:
        # A separate screen restores the terminal however the loop ends.
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                view = render(connection.url, frame, console.width, console.height, fault, plain=plain)
                live.update(view, refresh=True)
                time.sleep(arguments.interval)
                try:
                    now = look(connection, arguments.api_key)
                except TriAttentionError as error:
                    fault = f"{error} Trying again."
                    continue
                frame, before, fault = frame_of(before, now), now, None
    except KeyboardInterrupt:
        return


def look(connection: Connection, key: str | None) -> Look:
    """Asks the server. Raises TriAttentionError if it does not answer, or does not compress.

    Args:
        connection: to the server.
        key: the API key in use, or None.
    """
    url = connection.url
    try:
        with connection.open("/server_info", TIMEOUT_S) as response:
            info = json.load(response)
    except TriAttentionError:
        raise
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            wrong = f"{'refuses this' if key else 'asks for an'} API key (status {error.code})"
            remedy = "give the server's with --api-key"
        else:
            wrong, remedy = f"answers with status {error.code}", "give the --url of an SGLang server"
        raise TriAttentionError(f"{url}/server_info {wrong}: {remedy}.") from error
    except ValueError as error:
        raise TriAttentionError(f"{url} is not the address of an SGLang server: give its --url.") from error
    # A connection may break in many ways.
    except (OSError, HTTPException) as error:
        why = first_line(getattr(error, "reason", None) or error)
        raise TriAttentionError(f"No server answers at {url} ({why}): start it, or give its --url.") from error
    states = info.get("internal_states") if isinstance(info, dict) else None
    if not states or not all("triattention" in state for state in states):
        raise TriAttentionError(f"The server at {url} does not compress: start it with --enable-triattention.")
    return Look(time.monotonic(), states)


def frame_of(before: Look, now: Look) -> list[dict[str, Any]]:
    """What to show of each replica; rates, in tokens per second, are those since the look before, None if unknown."""
    seconds = now.at - before.at
    return [
        _replica(number, state, before.states[number] if number < len(before.states) else {}, seconds)
        for number, state in enumerate(now.states)
    ]


def _replica(number: int, state: dict[str, Any], before: dict[str, Any], seconds: float) -> dict[str, Any]:
    report = state["triattention"]
    known = {one["id"]: one["generated"] for one in before.get("triattention", {}).get("requests", ())}
    return {
        "replica": number,
        "running_requests": report["running_requests"],
        "waiting_requests": report["waiting_requests"],
        # SGLang keeps the last figure while nothing runs.
        "tokens_per_second": state.get("last_gen_throughput") if report["running_requests"] else 0.0,
        "physical_tokens": report["physical_tokens"],
        "logical_tokens": report["logical_tokens"],
        "pool": {name: report[f"pool_{name}"] for name in ("slots", "free_slots", "evictable_slots")},
        "totals": {name: report[name] for name in TOTALS},
        "conversations": {name: report[f"conversations_{name}"] for name in ("parked", "resumed")},
        "requests": [{**one, "tokens_per_second": _rate(one, known, seconds)} for one in report["requests"]],
    }


def _rate(one: dict[str, Any], known: dict[str, int], seconds: float) -> float | None:
    # A retracted request starts over.
    grown = one["generated"] - known.get(one["id"], one["generated"] + 1)
    return None if grown < 0 or seconds <= 0 else grown / seconds
