"""Servers for the serving benchmarks: of the tiny random model in tools/, or of any other."""

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

# As large as in real models, whose logits take a noticeable part of a decode step.
VOCABULARY = 32768


@contextmanager
def prepared_model(model: str | None, stats: str | None):
    """(model, statistics): those given, or the tiny model's, which live as long as the context."""
    if model is not None:
        yield model, stats or "auto"
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny = build_tiny_model(Path(folder), vocabulary=VOCABULARY)
        yield str(tiny.path), str(tiny.stats)


@contextmanager
def serving(model: str, args: Sequence[str], log: Path):
    """URL of a server that takes token ids, with the SGLang memory checks that a user has."""
    common = ["--skip-tokenizer-init", "--random-seed", "1"]
    if not torch.accelerator.is_available():
        common += ["--dtype", "float32"]
    with running_server(model, [*common, *args], log_path=log) as server:
        yield server.url
