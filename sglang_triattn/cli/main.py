"""The `sglang-triattn` command. Each subcommand has a module with PARSER, `add_options` and `run`.

Torch and transformers are imported only when a subcommand runs, so that `--help` is instant.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence

from sglang_triattn import __version__
from sglang_triattn.cli import calibrate, check, doctor, plan, score_case, stats, top, verify
from sglang_triattn.errors import TriAttentionError, suggestion

COMMANDS = {
    "calibrate": calibrate,
    "stats": stats,
    "plan": plan,
    "check": check,
    "doctor": doctor,
    "verify": verify,
    "score-case": score_case,
    "top": top,
}
USER_ERROR = 2
INTERRUPTED = 130
CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    It is 0, 1 for "no", 2 for a user error, 130 when interrupted, 141 when the output is closed.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows ASCII alone shows what it does not know as an escape.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    words, server_args = _split(sys.argv[1:] if argv is None else list(argv))
    parser = _parser()
    arguments, others = parser.parse_known_args(words)
    if others and arguments.run is not check.run:
        flags = [word for word in others if word.startswith("-")] or others
        hint = suggestion(flags[0].partition("=")[0], _flags_of(parser, words))
        parser.error(f"unrecognized arguments: {' '.join(others)}: {hint}")
    arguments.others = others
    if server_args and arguments.run is not calibrate.run:
        parser.error(f"unrecognized arguments: -- {' '.join(server_args)}")
    arguments.server_args = server_args
    try:
        status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except TriAttentionError as error:
        print(f"sglang-triattn: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt as interruption:
        print(f"sglang-triattn: interrupted, {str(interruption) or 'no file was written'}", file=sys.stderr)
        return INTERRUPTED


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words for this command, and those after `--`, which are for SGLang."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def _flags_of(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """The flags of the subcommand that these words name."""
    choices = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    name = next(word for word in words if word in choices)
    return list(choices[name]._option_string_actions)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-triattn", description="Tools for TriAttention KV-cache compression in SGLang."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(title="subcommands", required=True, metavar="SUBCOMMAND")
    for name, command in COMMANDS.items():
        command.add_options(subcommands.add_parser(name, **command.PARSER))
    return parser
