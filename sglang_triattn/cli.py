"""The `sglang-triattn` command: a pair of functions for each subcommand, one for its options, one to run it.

Torch and transformers are imported where a subcommand runs, so that `--help` is instant.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_triattn.errors import TriAttentionError

USER_ERROR = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 2 for a user's mistake, 130 when interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except TriAttentionError as error:
        print(f"sglang-triattn: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("sglang-triattn: interrupted, no file was written", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-triattn", description="Tools for TriAttention KV-cache compression in SGLang."
    )
    subcommands = parser.add_subparsers(title="subcommands", required=True, metavar="SUBCOMMAND")
    _add_calibrate(subcommands)
    _add_score_case(subcommands)
    return parser


def _add_calibrate(subcommands) -> None:
    parser = subcommands.add_parser(
        "calibrate",
        help="measure a model's query statistics",
        description="Measures the query statistics of a model on a text file, for --triattention-stats.",
    )
    parser.add_argument("--model", required=True, help="model folder or Hugging Face name")
    parser.add_argument("--data", required=True, help="UTF-8 text file, best of the kind the model will serve")
    parser.add_argument("--out", required=True, help="statistics file to write (.safetensors)")
    parser.add_argument("--max-tokens", type=int, default=32768, help="tokens of the text to use (%(default)s)")
    parser.add_argument("--window", type=int, default=2048, help="tokens per forward pass (%(default)s)")
    parser.add_argument("--device", help="torch device (cuda if there is one, else cpu)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="what to compute in (the checkpoint's dtype on cuda, float32 on cpu)",
    )
    parser.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    # Before the long part, not after it.
    if out.suffix != ".safetensors":
        raise TriAttentionError(f"--out is {out}, but its name must end in .safetensors.")
    if not out.parent.is_dir():
        raise TriAttentionError(f"--out is {out}, but its folder does not exist: create it first.")

    import torch

    from sglang_triattn.calibrate import calibrate
    from sglang_triattn.stats import save_stats

    try:
        stats = calibrate(
            arguments.model,
            arguments.data,
            max_tokens=arguments.max_tokens,
            window=arguments.window,
            device=arguments.device,
            dtype=arguments.dtype,
        )
        save_stats(stats, out)
    except torch.OutOfMemoryError as error:
        raise TriAttentionError(
            "The device ran out of memory: use a smaller --window, --dtype bfloat16 or --device cpu."
        ) from error
    layers, heads, _ = stats.mean.shape
    print(f"wrote {out}: {layers} layers of {heads} query heads, {stats.token_count} tokens")


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


def _score_case(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    if out.suffix != ".npz":
        raise TriAttentionError(f"--out is {out}, but its name must end in .npz.")
    if not out.parent.is_dir():
        raise TriAttentionError(f"--out is {out}, but its folder does not exist: create it first.")

    from sglang_triattn.score_case import save_answers, score_case

    answers = score_case(arguments.case, arguments.stats, device=arguments.device, dtype=arguments.dtype)
    save_answers(answers, out)
    layers, heads, count = answers["score_mean"].shape
    print(f"wrote {out}: {layers} layers of {heads} query heads, {count} keys")
