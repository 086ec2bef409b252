"""Does it matter which text a model is calibrated on?

The model is calibrated on prose, code, chats, and texts that it generates itself, with the same number of tokens each.
The benchmark then measures how much of the attention to older tokens each calibration's scores predict
(`predict_attention.py`) on every kind of stream of the quality benchmark, in its held-out words, which no default was
chosen on.

    python -m benchmarks.quality.calibration_texts --model FOLDER --json calibration_texts.json

Prose and code come with Python and change with its version. Generating texts with the model needs SGLang.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import report
from benchmarks.quality.model import load_model, load_tokenizer
from benchmarks.quality.predict_attention import Captures, score_name
from benchmarks.quality.streams.make import KINDS, MIN_TOKENS, length_by_tokenizer, make_streams
from benchmarks.quality.streams.text import SOURCES, TOPICS
from benchmarks.quality.tokens import tokenized
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.stats.file import QueryStats, check_stats, load_stats
from sglang_triattn.transformers_cache.cache import shape_of

CODE = ("textwrap", "csv", "heapq", "dataclasses", "shlex", "zipfile", "tokenize", "pprint")
"""Modules of Python's own sources; none of the streams is made from them."""
GENERATED = 16
"""Number of texts that the model generates."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, no generated texts, two kinds of streams")
    options = parser.parse_args(argv)
    try:
        report(rows_of(options.model, options.quick), options.json, options.quick)
    except (TriAttentionError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def rows_of(path: str, quick: bool) -> list[dict]:
    """One row per kind of stream: what each calibration's scores capture, and what criteria without one capture."""
    tokens = 1024 if quick else 8192
    with tempfile.TemporaryDirectory() as folder:
        stats = calibrations(path, Path(folder), tokens, generated=not quick)
    model, tokenizer = load_model(path), load_tokenizer(path)
    stats = {name: check_stats(one, shape_of(model)) for name, one in stats.items()}
    length = length_by_tokenizer(tokenizer, 2 * MIN_TOKENS)
    rows = []
    for kind in ("mixed", "text") if quick else KINDS:
        made = make_streams("held-out", 1, {kind: 1 if quick else 2}, length)
        captures = Captures.of(model, [tokenized(stream, tokenizer) for stream in made], stats)
        names = [*map(score_name, stats), "value-size", "newest", "random", "best"]
        rows.append({"stream": kind, **{name: captures.shares(name)[0] for name in names}})
    return rows


def calibrations(path: str, folder: Path, tokens: int, generated: bool) -> dict[str, QueryStats]:
    """Statistics of a model by what it was calibrated on."""
    found = {
        file.stem: calibrate(path, str(file), max_tokens=tokens, progress=False)
        for file in texts(folder, chats=bool(getattr(load_tokenizer(path), "chat_template", None)))
    }
    if generated:
        out = folder / "generated.safetensors"
        command = [str(Path(sys.executable).with_name("sglang-triattn")), "calibrate", "--engine", "sglang"]
        command += ["--model", str(Path(path).absolute()), "--self", str(GENERATED)]
        command += ["--self-tokens", str(tokens // GENERATED), "--out", str(out)]
        subprocess.run([*command, "--", "--max-total-tokens", str(2 * tokens)], cwd=folder, env=os.environ, check=True)
        found["generated"] = load_stats(out)
    return found


def texts(folder: Path, chats: bool) -> list[Path]:
    """Files to calibrate on: prose.txt, code.txt, and chats.jsonl for models with a chat template."""
    from pydoc_data.topics import topics

    names = [name for name in sorted(topics) if not any(name in held for held in TOPICS.values())]
    prose, chats = names[::2], names[1::2]
    assert not set(CODE) & {name for held in SOURCES.values() for name in held}
    code = [Path(os.__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in CODE]
    talks = [
        [
            {"role": "user", "content": f"What does Python's reference manual say under {name!r}?"},
            {"role": "assistant", "content": topics[name]},
        ]
        for name in chats
    ]
    files = {
        "prose.txt": "\n\n".join(topics[name] for name in prose),
        "code.txt": "\n\n".join(code),
        "chats.jsonl": "".join(json.dumps(chat) + "\n" for chat in talks),
    }
    if not chats:
        del files["chats.jsonl"]
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in files]


if __name__ == "__main__":
    main()
