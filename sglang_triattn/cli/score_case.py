"""`sglang-triattn score-case`: scores keys from a file, to compare this scorer with another implementation."""

import argparse
from pathlib import Path

from sglang_triattn.errors import TriAttentionError

PARSER = {
    "help": "score keys from a file, to compare with another implementation",
    "description": "Scores the cached keys of an .npz case and writes scores and kept sets. The case needs layers, "
    "num_q_heads, num_kv_heads, keys_cached, next_position, inv_freq and keep.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Writes --out and says what it holds. Raises TriAttentionError for a user error."""
    out = Path(arguments.out)
    if out.suffix != ".npz":
        raise TriAttentionError(f"--out is {out}, but its name must end in .npz.")
    if not out.parent.is_dir():
        raise TriAttentionError(f"--out is {out}, but its folder does not exist: create it first.")

    from sglang_triattn.cli.scored_keys import save_answers, score_case

    answers = score_case(arguments.case, arguments.stats, device=arguments.device, dtype=arguments.dtype)
    save_answers(answers, out)
    layers, heads, count = answers["score_mean"].shape
    print(f"wrote {out}: {layers} layers of {heads} query heads, {count} keys")
