"""Servers for the benchmarks of serving: of the tiny random model of tools/, or of any other."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from server import running_server
from tiny_model import build_tiny_model

# As large as those of real models, whose logits take their part of a decode step.
VOCABULARY = 32768


@contextmanager
def prepared_model(model: str | None, stats: str | None):
    """(model, statistics): as given, or the tiny model, which lives as long as the context."""
    if model is not None:
        yield model, stats or "auto"
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny_model(Path(folder), vocabulary=VOCABULARY)
        yield str(tiny.path), str(tiny.stats)


@contextmanager
def serving(model: str, args: Sequence[str], log: Path):
    """URL of a server of token ids, with SGLang's memory checks as a user has them."""
    common = ["--skip-tokenizer-init", "--random-seed", "1"]
    if not torch.accelerator.is_available():
        common += ["--dtype", "float32"]
    with running_server(model, [*common, *args], log_path=log) as server:
        yield server.url
