"""The `sglang-triattn` command. Each subcommand has one function for its options and one that runs it.

Torch and transformers are imported only when a subcommand runs, so that `--help` is instant.
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_triattn import __version__
from sglang_triattn.cli import calibrate as calibrate_command
from sglang_triattn.cli import check as check_command
from sglang_triattn.cli import doctor as doctor_command
from sglang_triattn.cli import plan as plan_command
from sglang_triattn.cli import stats as stats_command
from sglang_triattn.cli import top as top_command
from sglang_triattn.cli import verify as verify_command
from sglang_triattn.errors import TriAttentionError, suggestion

USER_ERROR = 2
INTERRUPTED = 130
CLOSED_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    It is 0, 1 for "no", 2 for a user error, 130 when interrupted, 141 when nobody reads the output any more.
    """
    for stream in (sys.stdout, sys.stderr):
        # A terminal that knows ASCII alone shows what it does not know as an escape.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    words, server_args = _split(sys.argv[1:] if argv is None else list(argv))
    parser = _parser()
    arguments, others = parser.parse_known_args(words)
    if others and arguments.run is not check_command.run:
        flags = [word for word in others if word.startswith("-")] or others
        hint = suggestion(flags[0].partition("=")[0], _flags_of(parser, words))
        parser.error(f"unrecognized arguments: {' '.join(others)}: {hint}")
    arguments.others = others
    if server_args and arguments.run is not calibrate_command.run:
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
    _add_calibrate(subcommands)
    _add_stats(subcommands)
    _add_plan(subcommands)
    _add_check(subcommands)
    _add_doctor(subcommands)
    _add_verify(subcommands)
    _add_score_case(subcommands)
    _add_top(subcommands)
    return parser


def _add_calibrate(subcommands) -> None:
    parser = subcommands.add_parser(
        "calibrate",
        help="measure a model's query statistics",
        usage="sglang-triattn calibrate --model M (--data FILE | --self N) ... --out FILE [options] [-- SERVER_ARGS]",
        description="Measures the query statistics of a model on texts, for --triattention-stats. A run that was "
        "stopped goes on when the same command is given again.",
    )
    calibrate_command.add_options(parser)


def _add_stats(subcommands) -> None:
    parser = subcommands.add_parser(
        "stats",
        help="show what a statistics file holds",
        description="Prints what a statistics file holds and draws how concentrated the queries of each head are.",
    )
    stats_command.add_options(parser)


def _add_plan(subcommands) -> None:
    parser = subcommands.add_parser(
        "plan",
        help="calculate what fits a GPU, dense and compressed",
        description="Calculates from a model's config.json how many tokens and requests the KV cache of a GPU holds, "
        "dense, in 8 bits, compressed, and both. Needs no weights, no GPU and no network.",
    )
    plan_command.add_options(parser)


def _add_check(subcommands) -> None:
    parser = subcommands.add_parser(
        "check",
        help="say whether a model and server flags will be compressed",
        usage="sglang-triattn check --model CONFIG [--json] [SERVER_FLAGS]",
        description="Says from a model's config.json and the flags of a server whether compression works with them, "
        "and what is scored; else the reason, with exit status 1. Starts nothing and needs no weights and no GPU. "
        "SERVER_FLAGS may be any of SGLang's; it lists those that it does not judge.",
        allow_abbrev=False,
    )
    check_command.add_options(parser)


def _add_doctor(subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="say what is right and wrong with this installation",
        description="Looks at versions, plugins, GPUs, kernels, kept statistics, and at everything in the installed "
        "SGLang that this package hooks or uses. Exits with 1 if something is wrong. Starts no server.",
    )
    doctor_command.add_options(parser)


def _add_verify(subcommands) -> None:
    parser = subcommands.add_parser(
        "verify",
        help="check on a live server that it compresses, and that its answers are still right",
        description="Sends some twenty small requests to a server that compresses, and says for each check what was "
        "seen. Needs nothing but its URL, and may run beside other users. The exit status is 0 if no check failed, 1 "
        "if one failed, 2 if they could not be made; a check that is not tested, for the reason shown, does not fail.",
    )
    verify_command.add_options(parser)


def _add_score_case(subcommands) -> None:
    parser = subcommands.add_parser(
        "score-case",
        help="score keys from a file, to compare with another implementation",
        description="Scores the cached keys of an .npz case and writes scores and kept sets. The case needs layers, "
        "num_q_heads, num_kv_heads, keys_cached, next_position, inv_freq and keep.",
    )
    parser.add_argument("case", metavar="CASE.npz", help="keys and positions to score")
    parser.add_argument("--stats", required=True, help="statistics file (.safetensors, or a published .pt)")
    parser.add_argument("--out", required=True, help="file to write (.npz)")
    parser.add_argument("--device", help="torch device (cuda if there is one, else cpu)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        help="what the keys are stored in (%(default)s)",
    )
    parser.set_defaults(run=_score_case)


def _add_top(subcommands) -> None:
    parser = subcommands.add_parser(
        "top",
        help="show what a running server holds",
        description="Shows a server's running requests, pool, rounds and conversations, until Ctrl-C.",
    )
    top_command.add_options(parser)


def _score_case(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    if out.suffix != ".npz":
        raise TriAttentionError(f"--out is {out}, but its name must end in .npz.")
    if not out.parent.is_dir():
        raise TriAttentionError(f"--out is {out}, but its folder does not exist: create it first.")

    from sglang_triattn.cli.score_case import save_answers, score_case

    answers = score_case(arguments.case, arguments.stats, device=arguments.device, dtype=arguments.dtype)
    save_answers(answers, out)
    layers, heads, count = answers["score_mean"].shape
    print(f"wrote {out}: {layers} layers of {heads} query heads, {count} keys")
