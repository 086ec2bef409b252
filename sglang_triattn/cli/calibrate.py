"""`sglang-triattn calibrate`: options and implementation."""

import argparse
from pathlib import Path

from sglang_triattn.calibration.job import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TRACE_TOKENS,
    DEFAULT_WINDOW,
    check_lengths,
    check_texts,
)
from sglang_triattn.errors import TriAttentionError

PARSER = {
    "help": "measure a model's query statistics",
    "usage": "sglang-triattn calibrate --model M (--data FILE | --self N) ... --out FILE [options] [-- SERVER_ARGS]",
    "description": "Measures the query statistics of a model on texts, for --triattention-stats. A run that was "
    "stopped goes on when the same command is given again.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="model folder or Hugging Face name")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 text, best of the kind the model will serve; .jsonl: one chat a line, as a list of messages or an "
        'object with "messages" or "conversations"; may be given several times',
    )
    parser.add_argument(
        "--self",
        type=int,
        default=0,
        dest="traces",
        metavar="N",
        help="let the model generate N texts itself and measure those (needs --engine sglang)",
    )
    parser.add_argument(
        "--self-tokens",
        type=int,
        default=DEFAULT_TRACE_TOKENS,
        metavar="TOKENS",
        help="tokens of such a text, at most (%(default)s)",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="statistics file to write (.safetensors)")
    parser.add_argument(
        "--engine",
        choices=("transformers", "sglang"),
        default="transformers",
        help="what runs the model (%(default)s); sglang takes server arguments after --, such as -- --tp 2",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="tokens of the files to use (%(default)s)"
    )
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="tokens per forward pass (%(default)s)")
    parser.add_argument("--device", help="torch device (cuda if there is one, else cpu)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="what to compute in (the checkpoint's dtype on cuda, float32 on cpu)",
    )
    parser.add_argument(
        "--look-ups",
        action="store_true",
        help="also fit weights that predict which keys are looked up (takes longer)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Runs the calibration and writes --out. Raises TriAttentionError for a user error."""
    out = Path(arguments.out)
    # Before the long part: importing torch and transformers takes seconds already.
    if out.suffix != ".safetensors":
        raise TriAttentionError(f"--out is {out}, but its name must end in .safetensors.")
    if not out.parent.is_dir():
        raise TriAttentionError(f"--out is {out}, but its folder does not exist: create it first.")
    if arguments.engine == "transformers" and arguments.traces:
        raise TriAttentionError("--self needs --engine sglang, which generates the texts: add it, or give --data.")
    if arguments.engine == "transformers" and arguments.server_args:
        raise TriAttentionError(
            f"Arguments after -- ({' '.join(arguments.server_args)}) are for --engine sglang: add it or leave them out."
        )
    check_lengths(arguments.max_tokens, arguments.window)
    check_texts(arguments.data, arguments.traces, arguments.self_tokens)

    import torch

    from sglang_triattn.calibration.resume import partial_path
    from sglang_triattn.files import remove_unfinished
    from sglang_triattn.stats.concentration import layer_lines, outlook
    from sglang_triattn.stats.file import load_stats

    try:
        layers, heads, tokens = (_with_sglang if arguments.engine == "sglang" else _with_transformers)(arguments, out)
    except torch.OutOfMemoryError as error:
        raise TriAttentionError(
            "The device ran out of memory: use a smaller --window, --dtype bfloat16 or --device cpu."
        ) from error
    except KeyboardInterrupt:
        partial = partial_path(out)
        remove_unfinished(partial)
        remove_unfinished(out)
        if not partial.exists():
            raise
        raise KeyboardInterrupt(f"the same command goes on from {partial}") from None
    print(f"wrote {out}: {layers} layers of {heads} query heads, {tokens} tokens")
    stats = load_stats(out)
    print("\n".join(["concentration of the queries", *layer_lines(stats), f"  it predicts   {outlook(stats)}"]))


def _with_transformers(arguments: argparse.Namespace, out: Path) -> tuple[int, int, int | None]:
    from sglang_triattn.calibration.resume import partial_path
    from sglang_triattn.calibration.transformers_engine import calibrate
    from sglang_triattn.stats.file import save_stats

    stats = calibrate(
        arguments.model,
        arguments.data,
        max_tokens=arguments.max_tokens,
        window=arguments.window,
        device=arguments.device,
        dtype=arguments.dtype,
        partial=partial_path(out),
        lookups=arguments.look_ups,
    )
    save_stats(stats, out)
    return stats.mean.shape[0], stats.mean.shape[1], stats.token_count


def _with_sglang(arguments: argparse.Namespace, out: Path) -> tuple[int, int, int | None]:
    from sglang_triattn.calibration.inputs import Texts, prepare_job
    from sglang_triattn.calibration.resume import partial_path, remove_progress
    from sglang_triattn.calibration.transformers_engine import device_and_dtype

    device, dtype = device_and_dtype(arguments.device, arguments.dtype)
    server_args = ["--device", device, "--dtype", dtype, *arguments.server_args]
    texts = Texts(
        data=arguments.data,
        traces=arguments.traces,
        trace_tokens=arguments.self_tokens,
        max_tokens=arguments.max_tokens,
        window=arguments.window,
        lookups=arguments.look_ups,
    )
    job = prepare_job(arguments.model, texts, identity=f"sglang {' '.join(server_args)}", partial=partial_path(out))
    # `patches` imports SGLang: only code that starts the engine may import it.
    from sglang_triattn.patches.calibration.engine import calibrate_with_engine

    made = calibrate_with_engine(arguments.model, job, out, server_args)
    remove_progress(job)
    return made.layers, made.heads, made.tokens
