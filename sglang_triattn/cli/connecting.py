"""The options of the subcommands that ask a server: its key, and which certificates to trust."""

from __future__ import annotations

import argparse

from sglang_triattn.verify.connection import Connection


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help="the server's, if it has one")
    parser.add_argument(
        "--cacert",
        metavar="FILE",
        help="trust these certificates (PEM) alone: authorities', or the server's own; for https",
    )
    parser.add_argument("--insecure", action="store_true", help="trust any certificate; for https")


def connection(arguments: argparse.Namespace) -> Connection:
    """The connection to the server that the options name; it has their `url`. Raises TriAttentionError."""
    return Connection(arguments.url, arguments.api_key, arguments.cacert, arguments.insecure)
