"""Fits the weights of `look-ups` for a model, see `lookups.py`, on prose and code and on records that nothing predicts.

Make them, then compare:

    python -m benchmarks.quality.fit_lookups --model FOLDER --out lookups.safetensors
    python -m benchmarks.quality --model FOLDER --lookups lookups.safetensors --policies look-ups
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from benchmarks.quality.cli import say
from benchmarks.quality.lookups import LookupsError, fitted, read_again, save_lookups
from benchmarks.quality.model import load_model, load_tokenizer
from benchmarks.quality.records import records
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.transformers_cache.cache import shape_of

WINDOW, WINDOWS = 1024, 12
"""Tokens of a text, and how many texts are read, half of them records."""
_CHARACTERS_PER_TOKEN = 6


def texts(tokenizer: Any, windows: int = WINDOWS, window: int = WINDOW) -> list[list[int]]:
    """Token ids of the texts: the package's calibration text first, then as many of records.

    Raises:
        LookupsError: the calibration text is too short for so many.
    """
    plain = files("sglang_triattn").joinpath("data", "calibration.txt").read_text(encoding="utf-8")
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", plain)))
    ids = tokenizer(plain, add_special_tokens=False, verbose=False)["input_ids"]
    half = windows // 2
    found = [ids[number * window : (number + 1) * window] for number in range(half)]
    for seed in range(windows - half):
        made = records(seed, words, window * _CHARACTERS_PER_TOKEN)
        found.append(tokenizer(made, add_special_tokens=False, verbose=False)["input_ids"][:window])
    if any(len(one) < window for one in found):
        raise LookupsError(f"There is no text for {windows} windows of {window} tokens: use fewer.")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    try:
        model, tokenizer = load_model(options.model, options.device, options.dtype), load_tokenizer(options.model)
        chosen = texts(tokenizer, options.windows, options.window)
        measured = []
        for number, ids in enumerate(chosen, 1):
            measured.append(read_again(model, tokenizer, ids))
            say(f"text {number} of {len(chosen)}")
        weights, explained = fitted(measured, shape_of(model).rope)
        save_lookups(options.out, weights)
    except (LookupsError, TriAttentionError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{options.out}: weights explain {float(explained.mean()):.2f} of the variance on average")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.fit_lookups", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--out", required=True, metavar="FILE", help="safetensors file to write")
    parser.add_argument("--windows", type=int, default=WINDOWS, help=f"texts to read, half of them records ({WINDOWS})")
    parser.add_argument("--window", type=int, default=WINDOW, help=f"tokens of a text ({WINDOW})")
    parser.add_argument("--device", help="by default cuda if there is one, else cpu")
    parser.add_argument("--dtype", help="by default float32 on the CPU, else the checkpoint's")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
