"""`sglang-triattn verify`: whether a live server compresses, and whether what it serves is still right."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from typing import TYPE_CHECKING

from sglang_triattn.cli import connecting
from sglang_triattn.errors import TriAttentionError

if TYPE_CHECKING:
    from sglang_triattn.verify.finding import Finding
    from sglang_triattn.verify.traffic import Evidence

FAILED = 1
TIMEOUT_S = 300.0

PARSER = {
    "help": "check on a live server that it compresses, and that its answers are still right",
    "description": "Sends some twenty small requests to a server that compresses, and reports for each check what was "
    "seen. Needs nothing but its URL, and may run while others use the server. The exit status is 0 if no check "
    "failed, 1 if one failed, 2 if they could not be made; a check that is not tested, for the reason shown, does "
    "not fail.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="of the server, such as http://localhost:30000")
    connecting.add_options(parser)
    parser.add_argument(
        "--shared",
        action="store_true",
        help="others use the server meanwhile: its sums may rise by more than these requests report, and its memory "
        "in use is not judged (noticed without this flag if one of their requests is seen)",
    )
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="of one request (%(default).0f)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints what each check found; returns 1 if one failed. Raises TriAttentionError if they could not be made."""
    if arguments.timeout <= 0:
        raise TriAttentionError(f"--timeout is {arguments.timeout:g}, but it must be greater than 0 seconds.")

    from sglang_triattn.verify.checks import any_failed, judge
    from sglang_triattn.verify.client import Client
    from sglang_triattn.verify.traffic import gather

    client = Client(connecting.connection(arguments), arguments.timeout)
    start = time.monotonic()
    found = gather(client, shared=arguments.shared)
    seconds = round(time.monotonic() - start, 2)
    findings = judge(found)
    if arguments.json:
        print(json.dumps(_to_dict(client.url, found, findings, seconds), indent=1))
    else:
        _show(client.url, found, findings, seconds)
    return FAILED if any_failed(findings) else 0


def _to_dict(url: str, found: Evidence, findings: dict[str, Finding], seconds: float) -> dict:
    from sglang_triattn.verify.checks import any_failed

    return {
        "url": url,
        "model": found.before.info.get("model_path"),
        "passed": not any_failed(findings),
        "checks": [
            {"name": name, "status": finding.status, "detail": finding.detail} for name, finding in findings.items()
        ],
        "shared": found.shared,
        "page_size": found.page_size,
        "replicas": len(found.after.replicas),
        "seconds": {**found.seconds, "total": seconds},
    }


def _show(url: str, found: Evidence, findings: dict[str, Finding], seconds: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"passed": "green", "failed": "bold red", "not tested": "yellow"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("check", "result", "what was seen"):
        table.add_column(title, no_wrap=title != "what was seen")
    for name, finding in findings.items():
        table.add_row(name, Text(finding.status, colours[finding.status]), Text(finding.detail))
    console = Console(highlight=False)
    console.print(Text(f"{url}: {found.before.info.get('model_path')}, page size {found.page_size}"))
    console.print(table)
    numbers = Counter(finding.status for finding in findings.values())
    counts = ", ".join(f"{number} {status}" for status, number in numbers.items())
    console.print(f"{counts}, in {seconds:.0f} s{'; others use the server' if found.shared else ''}")
